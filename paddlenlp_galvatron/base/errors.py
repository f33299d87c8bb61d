"""The errors a user sees. Each carries the exit code of the command that it ends."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

E = TypeVar("E", bound=StrEnum)
MOST_FAULTS = 20  # faults listed in one message


class GalvatronError(Exception):
    """The command failed (exit code 1)."""

    exit_code = 1


class UserError(GalvatronError):
    """Bad input (exit code 2). Each line names one fault, its place and its remedy."""

    exit_code = 2

    def __init__(self, faults: str | Iterable[str]):
        faults = (faults,) if isinstance(faults, str) else faults
        lines = (" ".join(fault.splitlines()) for fault in faults)  # text quoted from the user may contain line ends
        self.faults = tuple(dict.fromkeys(lines))  # each once
        super().__init__("\n".join(self.faults))

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.faults,)  # sent between ranks line by line


# pydantic's error types and our messages for them; {} is a value from the error's context.
PLAIN: dict[str, str] = json.loads(Path(__file__).with_name("plain_errors.json").read_text())


def plain_fault(error: Mapping[str, Any]) -> str:
    """The message for an error of pydantic, without the field's name."""
    if plain := PLAIN.get(error["type"]):
        context = {name: re.sub("'", "", str(value)) for name, value in error.get("ctx", {}).items()}
        return plain.format(**context)
    message: str = error["msg"].removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def member(kind: type[E], value: str, name: str) -> E:
    """The member of an enumeration that the value of an option names. Raises UserError."""
    try:
        return kind(value)
    except ValueError:
        raise UserError(f"{name}: {value!r} is unknown; choose one of {', '.join(kind)}") from None


@contextmanager
def within(where: str) -> Iterator[None]:
    """Prefix the faults of a UserError raised inside with `where`."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {fault}" for fault in error.faults) from None


@contextmanager
def reported(what: str) -> Iterator[None]:
    """An OSError raised inside becomes a UserError: `what` happened, and the system's reason."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: {error.strerror or error}") from None


class Infeasible(GalvatronError):
    """No plan fits the memory budget (exit code 3)."""

    exit_code = 3


class Faults:
    """Gathers faults so that one UserError reports them all."""

    def __init__(self) -> None:
        self._found: list[str] = []

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather a UserError raised inside; `require_none` raises it later."""
        try:
            yield
        except UserError as error:
            self._found += error.faults

    def require_none(self) -> None:
        """Raise UserError if anything was gathered."""
        faults = list(dict.fromkeys(self._found))
        if len(faults) > MOST_FAULTS:
            source = faults[MOST_FAULTS].partition(": ")[0]
            faults[MOST_FAULTS:] = [f"{source}: and {len(faults) - MOST_FAULTS} more faults of these kinds"]
        if faults:
            raise UserError(faults)
