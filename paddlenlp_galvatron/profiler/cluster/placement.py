"""Where a host places the processors of ranks that are pinned: beside one another while messages are measured.

Hypervisors and kernels bring together who wakes each other, as ranks do in training, and put anywhere who never halts.
Two virtual processors that shared no cache took 420 ns to exchange a cache line instead of 100 ns, and passed messages
on up to twice as slowly, for minutes or seconds; profiles taken then and at other times do not agree.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from math import inf

import paddle

from ...runtime import collectives
from ...runtime.processors import halting
from ..stopwatch import Stopwatch
from .messages import NEAR

REFERENCE = [1, 2**17]  # shape of what each rank gives to the reference message, fp32: it took 0.13 or 0.19 ms
WAKING_S = 0.3  # was mostly enough to bring two processors together
FIRST_TRIES = 10  # before the quickest is known
TRIES_A_NUMBER = 0.2  # on average: some hosts have no room


# A token goes round among processes on the given processors, each of which halts until it comes.
PASS_TOKEN = """
import os, sys, time
end, processors = time.monotonic() + float(sys.argv[1]), [int(word) for word in sys.argv[2:]]
pipes = [os.pipe() for _ in processors]
number = next((number for number in range(1, len(processors)) if not os.fork()), 0)
os.sched_setaffinity(0, {processors[number]})
take, give = pipes[number][0], pipes[(number + 1) % len(processors)][1]
if number == 0:
    os.write(give, b"x")
while os.read(take, 1) == b"x" and time.monotonic() < end:
    os.write(give, b"x")
os.write(give, b".")
"""


class ProcessorPlacement:
    """Ranks of one launch. A reference message tells whether they stand as well as they ever did."""

    def __init__(self, stopwatch: Stopwatch, processors: Sequence[int], matters: bool):
        """`processors`: one of each rank of this host on one of these ranks, none on the others. Where placement does
        not matter, `improve` does nothing."""
        self.matters = matters
        self._stopwatch, self._processors = stopwatch, processors
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
        with halting():
            if self._processors:
                wake_in_turn(self._processors, WAKING_S)
            self._stopwatch.any_rank(False)  # the others wait meanwhile


def wake_in_turn(processors: Sequence[int], seconds: float) -> None:
    """Let processors of this host wake each other, thousands of times a second; they should be idle."""
    words = [str(seconds), *map(str, processors)]
    subprocess.run([sys.executable, "-S", "-c", PASS_TOKEN, *words], check=False)
