"""What NCCL is told by variables beside its own defaults."""

from __future__ import annotations

import os

from ..plan import Plan

# A posted receive is a kernel that waits on the GPU, a block for each channel, from the call to the message: with the
# 16 to 32 that NCCL takes between GPUs of a node it holds up to a quarter of an H100's 132 multiprocessors. Between
# nodes it takes about 2. How much longer messages take with 4 is not known yet.
VARIABLE = "NCCL_MAX_P2P_NCHANNELS"
P2P_CHANNELS = {VARIABLE: os.environ.get(VARIABLE, "4")}


def variables_of(plan: Plan) -> dict[str, str]:
    """For ranks that train by this plan. All-to-alls, which are messages to NCCL, too, keep all channels."""
    exchanges = any(part.ulysses for part in (*plan.layers, plan.vocab))
    return P2P_CHANNELS if plan.pipeline > 1 and not exchanges else {}
