"""The cost of a plan: time, memory, schedule simulation, traffic.

A price is computed in one pass. `collectives` has bytes and times of the collectives in `plan.comm_points`, `module`
adds passes and weights, and `layers` (with `experts`) prices a layer by its strategy. `model` has all prices of a
search and predicts a plan: `simulate` times its step, `stage_memory` bounds and estimates its memory, `traffic` counts
its bytes. `load` makes it from profile files or a data sheet. `facts` are a plan's time and memory by term, which text,
JSON and pages render.
"""

from .costs import CostOptions, LayerCost, Prediction, StageSetting, States, Task, Terms, Workspace
from .facts import MEMORY, TIME, PlanFacts, StageBreakdown, strategy_words
from .load import derive, load
from .model import CostModel
from .simulate import StageTimes, step_ms, timeline
