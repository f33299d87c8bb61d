"""The cost of a plan: time, memory, schedule simulation, traffic.

A price is made in this order: bytes of the collectives in `plan.comm_points` (`communication`), their times
(`messages`), states and transients (`module_memory`), one module (`module_cost`), a layer by its strategy
(`layer_prices`, with `recompute` and `experts`), resharding (`redistribution`). `model` has all prices that a search
asks for, and predicts a plan: `simulate` times its step, `stage_memory` bounds its memory as the search does, `peak`
estimates it.
"""

from .costs import CostOptions, LayerCost, Prediction, StageMemory, StagePrediction, States, Task, Terms, Workspace
from .derived import derive
from .load import load
from .model import CostModel
from .simulate import StageTimes, lower_bound_ms, step_ms, timeline
from .traffic import step_traffic_bytes

__all__ = [
    "CostModel",
    "CostOptions",
    "LayerCost",
    "Prediction",
    "StageMemory",
    "StagePrediction",
    "StageTimes",
    "States",
    "Task",
    "Terms",
    "Workspace",
    "derive",
    "load",
    "lower_bound_ms",
    "step_ms",
    "step_traffic_bytes",
    "timeline",
]
