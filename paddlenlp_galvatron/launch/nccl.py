"""Variables that change NCCL's defaults."""

from __future__ import annotations

import os

from ..plan import Plan

VARIABLE = "NCCL_MAX_P2P_NCHANNELS"
# A posted receive is a kernel that waits on the GPU, a block for each channel, from the call to the message: with the
# 16 to 32 that NCCL takes between GPUs of a node it holds up to a quarter of an H100's 132 multiprocessors. Between
# nodes it takes about 2. How much longer messages take with 4 is not known yet.
CHANNELS = "4"


def p2p_channels() -> dict[str, str]:
    """The variable for messages between stages; as the user set it, if at all."""
    return {VARIABLE: os.environ.get(VARIABLE) or CHANNELS}


def variables_of(plan: Plan) -> dict[str, str]:
    """For ranks that train by this plan. All-to-alls, which are messages to NCCL, too, keep all channels."""
    exchanges = any(part.ulysses for part in (*plan.layers, plan.vocab))
    return p2p_channels() if plan.pipeline > 1 and not exchanges else {}


def slowed_by_a_receive(multiprocessors: int) -> float:
    """How many times as long a GPU computes while a receive holds some of its multiprocessors, at most half."""
    given = p2p_channels()[VARIABLE]
    channels = int(given) if given.isdecimal() else int(CHANNELS)
    return 1 / (1 - min(channels / multiprocessors, 0.5))
