"""How much slower compute and communication run beside one another than each alone: the overlap coefficient."""

from __future__ import annotations

from functools import partial

import numpy as np
import paddle

from ...runtime import collectives, device
from ...runtime.groups import Groups, Ranks
from ..cpu_host.processors import pinned
from ..stopwatch import Stopwatch

MESSAGE_MIB = 4
FLOAT_BYTES = 4
ALONE_MS = 50.0  # communication alone: long enough that its start does not matter
LAPS = 6  # what disturbs one only adds time, so the quickest counts
MATRIX, GPU_MATRIX = 256, 4096  # side of the matrices that are multiplied: a product takes about 1 ms


def overlapping_ranks(world_size: int) -> Ranks:
    """The ranks that measure it: all, each on its own GPU, as the messages of more ranks take more of each. On CPU a
    pair, each pinned to a processor of its own, where messages are copied by the processor that computes, however many
    ranks there are; the others wait, so that none is shared."""
    return tuple(range(world_size if device.on_gpu() else min(world_size, 2)))


def overlap_coefficient(stopwatch: Stopwatch, rank: int, world_size: int, groups: Groups, times: int) -> float:
    """Work of c ms (`times` as long as the messages), messages of m ms, each for itself, then both at once: messages
    are started, work is done, messages are waited for, as in training.

    While both run, each goes 1/o as fast, until the shorter is done: both = o·min(c, m) + |c - m|. Solved for o.
    """
    ranks = overlapping_ranks(world_size)
    mine = rank in ranks
    group = groups.get(ranks) if mine else None
    side = GPU_MATRIX if device.on_gpu() else MATRIX
    matrix, buffer = paddle.ones([side, side]), paddle.zeros([MESSAGE_MIB * 2**20 // FLOAT_BYTES])

    def compute(count: int) -> None:
        for _ in range(count if mine else 0):
            paddle.matmul(matrix, matrix)

    def communicate(count: int) -> None:
        for _ in range(count if mine else 0):
            collectives.all_reduce(buffer, group)

    with pinned(rank, len(ranks)):
        compute(1)
        communicate(1)
        products = max(1, round(times * ALONE_MS / stopwatch.once(partial(compute, 1))))
        messages = max(1, round(ALONE_MS / stopwatch.once(partial(communicate, 1))))

        def both() -> None:
            under_way = [collectives.all_reduce_start(buffer, group) for _ in range(messages if mine else 0)]
            compute(products)
            for message in under_way:
                message.wait()

        work = partial(compute, products), partial(communicate, messages), both
        laps = [[stopwatch.once(operation) for operation in work] for _ in range(LAPS)]
    *alone, both_ms = np.min(laps, axis=0)
    short, long = sorted(alone)
    return max(1.0, float((both_ms - (long - short)) / short))
