"""The cost of a plan: time, memory, schedule simulation, traffic.

A price is made in one pass: bytes of the collectives in `plan.comm_points` and their times (`collectives`), with passes
and weights the cost of a module (`module`), a layer by its strategy (`layers`, with `experts`). `model`
has all prices that a search asks for, and predicts a plan: `simulate` times its step, `stage_memory` bounds its memory
as the search does, and estimates it; `traffic` counts its bytes. `load` makes it of profile files or a data sheet.
`facts` are a plan's time and memory by term, which text, JSON and pages render.
"""

from .costs import CostOptions, LayerCost, Prediction, StageSetting, States, Task, Terms, Workspace
from .facts import MEMORY, TIME, PlanFacts, StageBreakdown, strategy_words
from .load import derive, load
from .model import CostModel
from .simulate import StageTimes, step_ms, timeline
