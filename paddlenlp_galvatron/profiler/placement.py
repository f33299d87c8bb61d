"""Where a host places the processors of ranks that are pinned: beside one another while messages are measured.

Hypervisors and kernels bring together who wakes each other, as ranks do in training, and put anywhere who never halts.
Two virtual processors that shared no cache took 420 ns to exchange a cache line instead of 100 ns, and passed messages
on up to twice as slowly, for minutes or seconds; profiles taken then and at other times do not agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf

import paddle

from ..runtime import collectives
from .processors import Spinners, wake_in_turn
from .stopwatch import Stopwatch

REFERENCE = [1, 2**17]  # shape of what each rank gives to the reference message, fp32: it took 0.13 or 0.19 ms
NEAR = 1.2  # times the quickest reference: still as well placed
WAKING_S = 0.3  # was mostly enough to bring two processors together
FIRST_TRIES = 10  # before the quickest is known
MOST_TRIES = 60  # of a launch, 18 s: some hosts have no room
OFTEN = 0.5  # of the times that it was asked for, in vain: the user is told


class Placement:
    """Ranks of one launch. A reference message tells whether they stand as well as they ever did."""

    def __init__(self, stopwatch: Stopwatch, spinners: Spinners, processors: Sequence[int]):
        """`processors`: one of each rank of this host on one of these ranks, none on the others."""
        self._stopwatch, self._spinners, self._processors = stopwatch, spinners, processors
        self._message = partial(collectives.all_gather, paddle.zeros(REFERENCE), stopwatch.world)
        self._quickest_ms, self._tries = inf, 0
        self._asked, self._in_vain = 0, 0

    def improve(self) -> None:
        """Let the ranks wake each other until the reference is as quick as it was. Nothing to do where they are not
        pinned."""
        if not self._stopwatch.pinned:
            return
        self._asked += 1
        while not (good := self._is_good()) and self._tries < MOST_TRIES:
            self._wake_each_other()
            self._tries += 1
        self._in_vain += not good

    def _is_good(self) -> bool:
        reference_ms = self._stopwatch.brief(self._message)
        self._quickest_ms = min(self._quickest_ms, reference_ms)
        return self._tries >= FIRST_TRIES and reference_ms <= NEAR * self._quickest_ms

    @property
    def apart(self) -> float:
        """Share of the times that it was asked for in vain."""
        return self._in_vain / max(1, self._asked)

    @property
    def note(self) -> list[str]:
        """What the user should know."""
        if self.apart <= OFTEN:
            return []
        return ["the host kept the ranks' processors apart most of the time: messages may be quicker at other times"]

    def _wake_each_other(self) -> None:
        with self._spinners.paused():
            if self._processors:
                wake_in_turn(self._processors, WAKING_S)
            self._stopwatch.any_rank(False)  # the others wait meanwhile
