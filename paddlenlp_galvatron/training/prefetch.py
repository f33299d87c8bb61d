"""A step's rows of the data, read in a thread while the step before computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def prefetch(load: Callable[[int], T], steps: Iterable[int]) -> Generator[T]:
    """Yields `load(step)` for each step; a thread loads the next meanwhile. An error of `load` comes at its step.

    The thread touches no device: page-locked memory is made by a call that may wait for all that the device was given
    to do, and the ids of a step are copied, before its first message, in far less time than a pass takes.
    """
    thread = ThreadPoolExecutor(1, "data")
    loading: deque[Future[T]] = deque()
    try:
        for step in steps:
            loading.append(thread.submit(load, step))
            if len(loading) > 1:
                yield loading.popleft().result()
        while loading:
            yield loading.popleft().result()
    finally:
        thread.shutdown(wait=False, cancel_futures=True)
