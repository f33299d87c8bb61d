"""The errors a user sees. Each carries the exit code of the command that it ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TypeVar

E = TypeVar("E", bound=StrEnum)
MOST_FAULTS = 20  # refused together


class GalvatronError(Exception):
    """Something went wrong while doing what the user asked for (exit code 1)."""

    exit_code = 1


class UserError(GalvatronError):
    """Bad input: one line a fault, each saying what is wrong, where, and what to do (exit code 2)."""

    exit_code = 2

    def __init__(self, faults: str | Iterable[str]):
        faults = (faults,) if isinstance(faults, str) else faults
        lines = (" ".join(fault.splitlines()) for fault in faults)  # the user's own words may have line ends
        self.faults = tuple(dict.fromkeys(lines))  # each once
        super().__init__("\n".join(self.faults))

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.faults,)  # from rank to rank, line by line


def member(kind: type[E], value: str, name: str) -> E:
    """The member of an enumeration that the value of an option names. Raises UserError."""
    try:
        return kind(value)
    except ValueError:
        raise UserError(f"{name}: {value!r} is unknown; choose one of {', '.join(kind)}") from None


class Infeasible(GalvatronError):
    """No plan fits the memory budget (exit code 3)."""

    exit_code = 3


class Faults:
    """Faults gathered so that they are refused once, with all reasons."""

    def __init__(self) -> None:
        self._found: list[str] = []

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """A UserError raised inside waits for `require_none`."""
        try:
            yield
        except UserError as error:
            self._found += error.faults

    def require_none(self) -> None:
        """Raise UserError if anything was gathered."""
        found = list(dict.fromkeys(self._found))
        if len(found) > MOST_FAULTS:
            source = found[MOST_FAULTS].partition(": ")[0]
            found[MOST_FAULTS:] = [f"{source}: and {len(found) - MOST_FAULTS} more faults of these kinds"]
        if found:
            raise UserError(found)
