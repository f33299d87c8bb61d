"""A generated case: files, and a command line that reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random

VICTIM = "victim.txt"  # a file next to that folder, which is the user's


@dataclass(frozen=True)
class Case:
    """One try. File names are relative to an empty folder, in which the command is started."""

    words: tuple[str, ...]
    files: Mapping[str, bytes]
    writes: tuple[str, ...] = ()  # files that the command may leave when it ends well: names, or their beginnings
    says: str = ""  # expected text of its errors
    links: Mapping[str, str] = field(default_factory=dict)  # where they lead; nowhere: a pipe


Generator = Callable[[Random], Case]
