"""The findings about one subject."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    OK = "ok"
    WARNING = "warning"  # works, but may be slow or fail later
    FAULT = "fault"  # something will not work


@dataclass(frozen=True, slots=True)
class Finding:
    subject: str
    found: str
    state: State = State.OK
    remedy: str = ""  # advice, unless all is well
