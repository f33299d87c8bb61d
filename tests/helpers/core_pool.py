"""Tokens of this machine's cores that launches of ranks take, over all workers of a test run."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

# Ranks wait for one another a third of their time, so two of them keep a core busy. With three, `make test` took 5 %
# longer, and 15 % more processor time.
RANKS_PER_CORE = 2
POLL_S = 0.05
WAIT_S = 120.0  # after which a launch begins without: tokens make tests faster, and must not stop them


class CorePool:
    """A token is a locked file, so it returns however its holder ends. `folder`: shared by all workers of a run."""

    def __init__(self, folder: Path, size: int = RANKS_PER_CORE * len(os.sched_getaffinity(0))):
        self._folder, self._size, self._holding = folder, size, False
        folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def ranks(self, number: int) -> Iterator[None]:
        """Hold a token for each rank of a launch, and all of them for a larger launch than there are; a launch within
        another of this process holds none."""
        if self._holding:
            yield
            return
        with ExitStack() as held:
            with self._locked("queue"):  # one takes its tokens at a time: nobody holds some and waits for more
                waiting = list(range(self._size))
                for _ in range(min(number, self._size)):
                    held.enter_context(self._first_free(waiting))
            self._holding = True
            held.callback(setattr, self, "_holding", False)
            yield

    @contextmanager
    def _locked(self, name: str, flags: int = fcntl.LOCK_EX) -> Iterator[None]:
        with (self._folder / name).open("w") as file:
            fcntl.flock(file, flags)
            yield

    @contextmanager
    def _first_free(self, waiting: list[int]) -> Iterator[None]:
        """The lock of a free token, which leaves the list."""
        with ExitStack() as stack:
            deadline = time.monotonic() + WAIT_S
            while time.monotonic() < deadline:
                for token in waiting:
                    try:
                        stack.enter_context(self._locked(f"token.{token}", fcntl.LOCK_EX | fcntl.LOCK_NB))
                    except BlockingIOError:
                        continue
                    waiting.remove(token)
                    yield
                    return
                time.sleep(POLL_S)
            yield
