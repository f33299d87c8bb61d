"""A rank of a parity check with one mistake in latent attention or routing, by its name."""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import patch

from paddlenlp_galvatron.check.parity import parity_worker
from paddlenlp_galvatron.plan.comm_points import CommPoint
from paddlenlp_galvatron.runtime import experts
from paddlenlp_galvatron.runtime.groups import run_as_rank
from paddlenlp_galvatron.runtime.placement import Placement

cross, parameter, routed, shares = Placement.cross, Placement.parameter, experts.OwnExperts.__call__, experts.shares


def shared_key_unsummed(self: Any, point: CommPoint, x: Any) -> Any:
    """The gradient of the key that all heads share is that of a rank's own heads."""
    return x if point is CommPoint.LATENT_KEY else cross(self, point, x)


def down_projections_unsummed(self: Any, *rest: Any) -> Any:
    """Under Megatron-SP a rank has the gradient of its own tokens."""
    made = parameter(self, *rest)
    if made.slice.axis is None and len(made.shape) > 1:
        made.presum_group = None
    return made


def bias_in_scores(self: Any, x: Any, router: Any, bias: Any, memo: Any) -> Any:
    """The bias counts in a token's sum over its experts, not in their choice alone."""
    with patch.object(experts, "shares", lambda scores, *rest: shares(scores + bias, *rest)):
        return routed(self, x, router, bias, memo)


MISTAKES = {
    "shared key": (Placement, "cross", shared_key_unsummed),
    "down": (Placement, "parameter", down_projections_unsummed),
    "bias": (experts.OwnExperts, "__call__", bias_in_scores),
}

if __name__ == "__main__":
    setattr(*MISTAKES[sys.argv.pop()])
    run_as_rank(parity_worker.main)
