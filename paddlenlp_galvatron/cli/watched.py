"""How far searches are, for those who wait for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from threading import Timer

from paddlenlp_galvatron.base.printing import Bars, say
from paddlenlp_galvatron.planner.branch_and_bound import SearchState, Watch

LONG_S = 2.0


@contextmanager
def watched(note: str = "") -> Iterator[Watch]:
    """Receives the state of searches, and shows it on stderr when they take long; `note`: shown then, once."""
    timer = Timer(LONG_S, say, (note,), {"err": True})
    timer.daemon = True
    with _shown() as show:
        if note:
            timer.start()
        try:
            yield lambda state: show("searching", state)
        finally:
            timer.cancel()


@contextmanager
def each_watched() -> Iterator[Callable[[], Watch]]:
    """Watchers of searches that run one after the other and are numbered."""
    numbers = count(1)

    def begin() -> Watch:
        number = next(numbers)
        return lambda state: show(f"search {number}", state)

    with _shown() as show:
        yield begin


@contextmanager
def _shown() -> Iterator[Callable[[str, SearchState], None]]:
    begin = time.monotonic()
    with Bars() as bars:
        task = bars.add_task("", total=None, visible=False)

        def show(what: str, state: SearchState) -> None:
            if time.monotonic() > begin + LONG_S:
                words = f"{what}: {_words(state)}"
                bars.update(task, visible=True, completed=state.done, total=state.families, description=words)

        yield show


def _words(state: SearchState) -> str:
    best = f"{state.best:.4g} samples/s" if state.best else "no plan yet"
    return f"{best}, at most {state.limit:.4g}"
