"""How much slower compute and communication run beside one another than each alone: the overlap coefficient."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import paddle

from ..runtime import collectives
from ..runtime.groups import Groups
from .processors import pinned
from .stopwatch import Stopwatch, Timing

MESSAGE_MIB = 4
FLOAT_BYTES = 4
ALONE_MS = 50.0  # communication alone: long enough that starting a thread does not matter
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

    def ms(operation: Callable[[], Any]) -> float:
        return Timing.of(np.max(stopwatch.together(operation), axis=1)).ms

    with pinned(rank, len(PAIR)):
        products = max(1, round(times * ALONE_MS / ms(partial(compute, 1))))
        messages = max(1, round(ALONE_MS / ms(partial(communicate, 1))))

        def both() -> None:
            beside = threading.Thread(target=communicate, args=(messages,))
            beside.start()
            compute(products)
            beside.join()

        short, long = sorted([ms(partial(compute, products)), ms(partial(communicate, messages))])
        return max(1.0, (ms(both) - (long - short)) / short)
