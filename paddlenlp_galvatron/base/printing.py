"""The one way to the terminal: whatever a name or a value of others holds, it is shown, and does nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import rich.console
from rich.progress import Progress, ProgressColumn
from rich.segment import Segment

from .text import printable


def say(text: str, err: bool = False) -> None:
    """Print lines to stdout, or to stderr."""
    print(printable(text), file=sys.stderr if err else sys.stdout, flush=True)


class Console(rich.console.Console):
    """Rich's, for which [bold] and :smile: are words like others."""

    def __init__(self, *, stderr: bool = False, **settings: Any) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False, **settings)

    def render(self, *args: Any, **settings: Any) -> Iterator[Segment]:
        """Rich's own control codes pass; those in text do not."""
        for segment in super().render(*args, **settings):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def progress_bar(*columns: str | ProgressColumn) -> Progress:
    """A bar on stderr; nothing where that is a file, in which faults are looked for."""
    console = Console(stderr=True)
    return Progress(*columns, console=console, disable=not console.is_terminal)
