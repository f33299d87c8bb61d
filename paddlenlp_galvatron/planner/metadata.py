"""The parts of a strategy file that describe the search."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from ..cost_model import CostModel
from ..cost_model.costs import Prediction
from ..model import joint_fingerprint
from .options import SearchOptions
from .result import Candidate


def documented(
    best: Candidate, cost: CostModel, options: SearchOptions, lower_bound_s: float, fastest_s: float
) -> Candidate:
    """The plan with its "predicted" and "searched_from". `fastest_s`: of the plan that the bound is of."""
    metadata = {
        "predicted": predicted(best.prediction, lower_bound_s, fastest_s),
        "searched_from": {
            "model": cost.given[0].name,
            "model_fingerprint": joint_fingerprint(cost.given),
            "num_nodes": cost.profiles.num_nodes,
            "num_gpus_per_node": cost.profiles.gpus_per_node,
            "memory_constraint_gb": options.memory_gib,
            "device": cost.profiles.device.model_dump(exclude_none=True),
            "profiles": [file.summary() for file in cost.profiles.files],
            "options": options.model_dump(mode="json", exclude_unset=True) | (cost.load._asdict() if cost.load else {}),
        },
    }
    return Candidate(replace(best.plan, metadata=metadata), best.prediction)


def predicted(prediction: Prediction, lower_bound_s: float, fastest_s: float | None = None) -> dict[str, Any]:
    """The strategy file's "predicted": step time, certificate, and each stage's times and memory. `fastest_s`: of the
    plan that the certificate is of; None: this one."""
    return {
        "time_s": prediction.time_s,
        "lower_bound_s": lower_bound_s,
        "gap": max(0.0, 1 - lower_bound_s / (fastest_s or prediction.time_s)),
        "samples_per_s": prediction.samples_per_s,
        "stages": [asdict(stage) | {"memory_mib": stage.memory.total_mib} for stage in prediction.stages],
    }
