"""What a plan costs: time, memory, schedule simulation, traffic."""

from .costs import CostOptions, LayerCost, Prediction, StageMemory, StagePrediction
from .load import load
from .model import CostModel, stage_seams, stage_times
from .simulate import StageTimes, lower_bound_ms, step_ms, timeline

__all__ = [
    "CostModel",
    "CostOptions",
    "LayerCost",
    "Prediction",
    "StageMemory",
    "StagePrediction",
    "StageTimes",
    "load",
    "lower_bound_ms",
    "stage_seams",
    "stage_times",
    "step_ms",
    "timeline",
]
