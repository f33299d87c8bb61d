"""How far searches are, for whoever waits for them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

from paddlenlp_galvatron.base.printing import Bars, say
from paddlenlp_galvatron.search.engine import SearchState, Watch

LONG_S = 2.0


@contextmanager
def watched(note: str = "") -> Iterator[Watch]:
    """What searches tell their state to. It is shown on stderr when they take long; `note`: what is said then, once."""
    begin = time.monotonic()
    timer = Timer(LONG_S, say, (note,), {"err": True})
    timer.daemon = True
    with Bars() as bars:
        task = bars.add_task("searching", total=None, visible=False)

        def watch(state: SearchState) -> None:
            if time.monotonic() > begin + LONG_S:
                bars.update(task, visible=True, completed=state.done, total=state.families, description=_words(state))

        if note:
            timer.start()
        try:
            yield watch
        finally:
            timer.cancel()


def _words(state: SearchState) -> str:
    best = f"{state.best:.4g} samples/s" if state.best else "no plan yet"
    return f"searching: {best}, at most {state.limit:.4g}"
