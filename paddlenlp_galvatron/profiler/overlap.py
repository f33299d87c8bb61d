"""How much slower compute and communication run beside one another than each alone: the overlap coefficient."""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
import paddle

from ..runtime import collectives
from ..runtime.groups import Groups
from .processors import pinned
from .stopwatch import Stopwatch

MESSAGE_MIB = 4
FLOAT_BYTES = 4
ALONE_MS = 50.0  # communication alone: long enough that starting a thread does not matter
LAPS = 8  # what disturbs one only adds time, so the quickest counts
MATRIX = 256  # side of the matrices that are multiplied
PAIR = (0, 1)  # the ranks that measure, each pinned to a processor of its own; the others wait, so that none is shared


def overlap_coefficient(stopwatch: Stopwatch, rank: int, groups: Groups, times: int) -> float:
    """Work of c ms (`times` as long as the messages), messages of m ms, each for itself, then both at once.

    While both run, each goes 1/o as fast, until the shorter is done: both = o·min(c, m) + |c - m|. Solved for o.
    """
    mine = rank in PAIR
    group = groups.get(PAIR) if mine else None
    matrix, buffer = paddle.ones([MATRIX, MATRIX]), paddle.zeros([MESSAGE_MIB * 2**20 // FLOAT_BYTES])

    def compute(count: int) -> None:
        for _ in range(count if mine else 0):
            paddle.matmul(matrix, matrix)

    def communicate(count: int) -> None:
        for _ in range(count if mine else 0):
            collectives.all_reduce(buffer, group)

    with pinned(rank, len(PAIR)):
        compute(1)
        communicate(1)
        products = max(1, round(times * ALONE_MS / stopwatch.once(partial(compute, 1))))
        messages = max(1, round(ALONE_MS / stopwatch.once(partial(communicate, 1))))

        def both() -> None:
            beside = threading.Thread(target=communicate, args=(messages,))
            beside.start()
            compute(products)
            beside.join()

        work = partial(compute, products), partial(communicate, messages), both
        laps = [[stopwatch.once(operation) for operation in work] for _ in range(LAPS)]
    *alone, both_ms = np.min(laps, axis=0)
    short, long = sorted(alone)
    return max(1.0, float((both_ms - (long - short)) / short))
