"""How much slower compute and communication run beside one another than each alone: the overlap coefficients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import paddle

from ..plan import Precision
from ..plan.communicators import Ranks
from ..profiles import Collective
from ..runtime import collectives, device
from ..runtime.groups import Groups
from ..runtime.precision import Numbers
from ..runtime.processors import pinned
from .stopwatch import Stopwatch

# A message of training: a layer's weights, or those of several layers of a stage. Smaller messages are over on a GPU
# before the host has launched what they should run beside.
MESSAGE_MIB, GPU_MESSAGE_MIB = 4, 128
ALONE_MS = 50.0  # communication alone: long enough that its start does not matter
SAMPLES = 6  # disturbances only add time, so the quickest counts
MATRIX, GPU_MATRIX = 256, 4096  # side of the matrices that are multiplied: a product takes about 1 ms

# Collectives that training starts and waits for later. The all-reduce comes first: its coefficient is Galvatron's one.
STARTED: dict[Collective, Callable[[Any, Any], collectives.Pending]] = {
    Collective.ALL_REDUCE: collectives.all_reduce_start,
    Collective.ALL_GATHER: collectives.all_gather_start,
    Collective.REDUCE_SCATTER: collectives.reduce_scatter_start,
}


def overlapping_kinds() -> list[Collective]:
    """The kinds that are measured: on CPU all-reduce alone, as gloo does every message in the call that starts it."""
    return list(STARTED) if device.on_gpu() else [Collective.ALL_REDUCE]


def overlapping_ranks(world_size: int) -> Ranks:
    """The ranks that measure it: all, each on its own GPU, as the messages of more ranks take more of each. On CPU a
    pair, each pinned to a processor of its own, where messages are copied by the processor that computes, however many
    ranks there are; the others wait, so that none is shared."""
    return tuple(range(world_size if device.on_gpu() else min(world_size, 2)))


def message_mib() -> int:
    """Size of the messages that are measured."""
    return GPU_MESSAGE_MIB if device.on_gpu() else MESSAGE_MIB


def overlap_coefficient(
    stopwatch: Stopwatch,
    rank: int,
    ranks: Ranks,
    groups: Groups,
    kind: Collective,
    precision: Precision,
    per_node: int,
) -> float:
    """Times work of c ms alone, messages of m ms alone, and both at once, in training's types: a message is started,
    some of the work is done, the next one is started; in the end all are waited for. `per_node` of the `ranks` are on
    each host.

    While both run, each goes 1/o as fast, until the shorter is done: both = o·min(c, m) + |c - m|. Solved for o.
    """
    mine, numbers = rank in ranks, Numbers.of(precision)
    group = groups.get(ranks) if mine else None
    side = GPU_MATRIX if device.on_gpu() else MATRIX
    matrix = paddle.ones([side, side], numbers.computed)
    whole = message_mib() * 2**20 // precision.bytes
    given = paddle.zeros([whole // (len(ranks) if kind is Collective.ALL_GATHER else 1)], numbers.stored)
    start = partial(STARTED[kind], given, group)

    def compute(count: int) -> None:
        for _ in range(count if mine else 0):
            paddle.matmul(matrix, matrix)

    def communicate(count: int) -> None:
        for _ in range(count if mine else 0):
            start().wait()

    local = min(per_node, len(ranks))
    with pinned(rank % per_node, local, wanted=not device.on_gpu()):
        compute(1)
        communicate(1)
        products = max(1, round(ALONE_MS / stopwatch.once(partial(compute, 1))))
        messages = max(1, round(ALONE_MS / stopwatch.once(partial(communicate, 1))))

        def both() -> None:
            under_way = []
            for number in range(messages):
                under_way += [start()] if mine else []
                compute(products * (number + 1) // messages - products * number // messages)
            for message in under_way:
                message.wait()

        work = partial(compute, products), partial(communicate, messages), both
        samples = [[stopwatch.once(operation) for operation in work] for _ in range(SAMPLES)]
    *alone, both_ms = np.min(samples, axis=0)
    short, long = sorted(alone)
    return max(1.0, float((both_ms - (long - short)) / short))
