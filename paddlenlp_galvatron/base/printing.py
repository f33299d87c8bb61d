"""Prints to the terminal. Control characters in foreign names and values are escaped."""

import re
import sys
import time
from collections.abc import Container, Iterable, Iterator
from typing import Any

import rich.console
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.table import Table

from .text import printable

BETWEEN = 2  # spaces between the columns of a table
WIDEST = 1000  # columns of a table that no terminal shows
LINE_S = 15.0  # interval of progress lines where there is no terminal


def say(text: str, err: bool = False) -> None:
    """Print lines to stdout, or to stderr."""
    print(printable(text), file=sys.stderr if err else sys.stdout, flush=True)


def table(*columns: str, left: Container[str] = (), title: str | None = None) -> Table:
    """A table without lines. The first column and those in `left` are text, which folds; numbers are never cut."""
    made = Table(
        box=None, pad_edge=False, padding=(0, BETWEEN, 0, 0), title=title, title_justify="left", title_style=""
    )
    for number, column in enumerate(columns):
        text = number == 0 or column in left
        made.add_column(column, justify="left" if text else "right", no_wrap=not text, overflow="fold")
    return made


class Console(rich.console.Console):
    """Rich's console without markup: [bold] and :smile: are plain words."""

    def __init__(self, *, stderr: bool = False, **settings: Any) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False, **settings)

    def print(self, *objects: Any, **settings: Any) -> None:
        """As in Rich; without a terminal, a table is wide enough for its longest words."""
        width = self.width
        for table in () if self.is_terminal else [table for table in objects if isinstance(table, Table)]:
            words = [f"{column.header} {' '.join(map(str, column.cells))}".split() for column in table.columns]
            if sum(BETWEEN + max(map(len, cells), default=0) for cells in words) > width:
                self.width = max(self.width, Measurement.get(self, self.options.update_width(WIDEST), table).maximum)
        super().print(*objects, **settings)
        self.width = width

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        """As in Rich; the last column of a table is padded only on a terminal."""
        text = super()._render_buffer(buffer)
        return text if self.is_terminal else re.sub(r" +$", "", text, flags=re.MULTILINE)

    def render(self, *args: Any, **settings: Any) -> Iterator[Segment]:
        """Rich's control codes are kept; those in text are escaped."""
        for segment in super().render(*args, **settings):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


class Bars(Progress):
    """Progress of long work, on stderr: on a terminal a bar that disappears at the end, elsewhere a plain line every
    LINE_S seconds. `in_bytes`: the total is in bytes."""

    def __init__(self, in_bytes: bool = False):
        console = Console(stderr=True, soft_wrap=True)
        # 16: the longest description (a search) leaves no more than that of 80 columns
        share: list[str | ProgressColumn] = [TextColumn("{task.description}"), BarColumn(16), TaskProgressColumn()]
        sizes: list[ProgressColumn] = [DownloadColumn()] if in_bytes else []
        times: list[ProgressColumn] = [TimeElapsedColumn(), TimeRemainingColumn()]
        disable, above = not console.is_terminal, sys.stdout.isatty()  # lines of stdout appear above the bar
        super().__init__(
            *share, *sizes, *times, console=console, disable=disable, redirect_stdout=above, transient=True
        )
        self._begin = time.monotonic()
        self._due = self._begin + LINE_S

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        self._report(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._report(task_id)

    def _report(self, task_id: TaskID) -> None:
        if not self.disable or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + LINE_S
        task = self._tasks[task_id]
        share = "" if task.total is None else f"{task.percentage:.0f} % done, "
        say(f"{task.description}: {share}{time.monotonic() - self._begin:.0f} s", err=True)
