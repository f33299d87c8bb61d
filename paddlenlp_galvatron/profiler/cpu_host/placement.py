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

from ...runtime import collectives
from ..cluster.messages import NEAR
from ..stopwatch import Stopwatch
from .processors import Spinners, wake_in_turn

REFERENCE = [1, 2**17]  # shape of what each rank gives to the reference message, fp32: it took 0.13 or 0.19 ms
WAKING_S = 0.3  # was mostly enough to bring two processors together
FIRST_TRIES = 10  # before the quickest is known
TRIES_A_NUMBER = 0.2  # on average: some hosts have no room


class ProcessorPlacement:
    """Ranks of one launch. A reference message tells whether they stand as well as they ever did."""

    def __init__(self, stopwatch: Stopwatch, spinners: Spinners, processors: Sequence[int], matters: bool):
        """`processors`: one of each rank of this host on one of these ranks, none on the others. Where placement does
        not matter, `improve` does nothing."""
        self.matters = matters
        self._stopwatch, self._spinners, self._processors = stopwatch, spinners, processors
        self._message = partial(collectives.all_gather, paddle.zeros(REFERENCE), stopwatch.world)
        self._quickest_ms = inf
        self._tries, self._most_tries = 0, float(FIRST_TRIES)

    def improve(self, wanted: bool = True) -> float:
        """Let the ranks wake each other, if `wanted`, until the reference is as quick as it was, before a number is
        measured. Its time in ms; 0 where placement does not matter."""
        if not self.matters:
            return 0.0
        self._most_tries += TRIES_A_NUMBER
        reference_ms = self._reference_ms()
        while wanted and not self._is_good(reference_ms) and self._tries < self._most_tries:
            self._wake_each_other()
            reference_ms = self._reference_ms()
        return reference_ms

    def _reference_ms(self) -> float:
        reference_ms = self._stopwatch.brief(self._message)
        self._quickest_ms = min(self._quickest_ms, reference_ms)
        return reference_ms

    def _is_good(self, reference_ms: float) -> bool:
        return self._tries >= FIRST_TRIES and reference_ms <= NEAR * self._quickest_ms

    def _wake_each_other(self) -> None:
        self._tries += 1
        with self._spinners.paused():
            if self._processors:
                wake_in_turn(self._processors, WAKING_S)
            self._stopwatch.any_rank(False)  # the others wait meanwhile
