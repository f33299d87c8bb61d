"""A generated case: files, and a command line that reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Case:
    """One try. File names are relative to an empty folder, in which the command is started."""

    words: tuple[str, ...]
    files: Mapping[str, bytes]
    writes: tuple[str, ...] = ()  # files that the command may leave when it ends well: names, or their beginnings
    says: str = ""  # expected text of its errors


Generator = Callable[[Random], Case]
