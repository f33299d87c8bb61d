"""The cost of a plan: time, memory, schedule simulation, traffic."""

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
