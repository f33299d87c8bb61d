"""A rank of a parity check with one mistake in latent attention, by its name."""

from __future__ import annotations

import sys
from typing import Any

from paddlenlp_galvatron.check.parity import parity_worker
from paddlenlp_galvatron.plan.comm_points import CommPoint
from paddlenlp_galvatron.runtime.groups import run_as_rank
from paddlenlp_galvatron.runtime.placement import Placement

cross, parameter = Placement.cross, Placement.parameter


def shared_key_unsummed(self: Any, point: CommPoint, x: Any) -> Any:
    """The gradient of the key that all heads share is that of a rank's own heads."""
    return x if point is CommPoint.LATENT_KEY else cross(self, point, x)


def down_projections_unsummed(self: Any, *rest: Any) -> Any:
    """Under Megatron-SP a rank has the gradient of its own tokens."""
    made = parameter(self, *rest)
    if made.slice.axis is None and len(made.shape) > 1:
        made.presum_group = None
    return made


MISTAKES = {"shared key": ("cross", shared_key_unsummed), "down": ("parameter", down_projections_unsummed)}

if __name__ == "__main__":
    setattr(Placement, *MISTAKES[sys.argv.pop()])
    run_as_rank(parity_worker.main)
