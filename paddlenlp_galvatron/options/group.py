"""Groups of options that flags and config files give, each under one canonical name, checked field by field."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from ..base.errors import UserError
from ..base.limits import Size
from ..base.text import shortened
from .aliases import BEATEN, canonical_name, canonical_value, did_you_mean, plain_name
from .foreign import Fate, fate_of, idle_note

UNSET = "None"  # a script's word for an option that it leaves alone
BOOLEAN_WORDS = ("0", "1", "false", "true")


def _split(value: object) -> object:
    if isinstance(value, str):
        return value.replace(" ", "").split(",")
    return [value] if isinstance(value, int) else value


def _listed(value: object) -> object:
    return [word for word in value.split(",") if word] if isinstance(value, str) else value


Paths = Annotated[tuple[Path, ...], BeforeValidator(_listed)]  # a.json,b.json or a list
Sizes = Annotated[tuple[Size, ...], BeforeValidator(_split), Field(min_length=1)]  # 4096,8192 or a list of numbers


def is_boolean(field: FieldInfo) -> bool:
    """Whether an option is a switch, which may be unset."""
    return field.annotation in (bool, bool | None)


class Options(BaseModel):
    """Frozen; build one from loose values with `from_mapping`."""

    panel: ClassVar[str] = "Options"  # of a command's help, in which they stand
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _in_utf8(cls, values: Any) -> Any:
        """Files and other programs are told of paths, which Linux lets be any bytes."""
        for name, value in values.items() if isinstance(values, Mapping) else ():
            if isinstance(value, str | Path) and any("\ud800" <= char <= "\udfff" for char in str(value)):
                raise ValueError(f"{name}: {str(value)!a} is not UTF-8; rename it, or set LC_ALL=C.UTF-8")
        return values

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """From values by canonical name or alias, as flags and config files give them. Raises UserError."""
        return cls.among(canonical_options(values, cls.model_fields))

    @classmethod
    def among(cls, values: Mapping[str, Any]) -> Self:
        """From those of the canonical options that are this group's. Raises UserError."""
        try:
            return cls.model_validate({name: value for name, value in values.items() if name in cls.model_fields})
        except ValidationError as error:
            raise UserError(_fault(item) for item in error.errors()) from None


def canonical_options(
    values: Mapping[str, Any], known: Iterable[str], say: Callable[[str], None] = lambda note: None
) -> dict[str, Any]:
    """Values by canonical name, without those that are unset. `say` is told which have no effect.

    Raises UserError: an option is unknown, or given by two names.
    """
    pairs = canonical_pairs(values.items(), dict.fromkeys(known, False), say)
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [(given, canonical_name(given, result)) for given in values]
        twice = {name for name in result if [own for _, own in names].count(name) > 1}
        raise UserError(f"{given}: given twice, also as {own}" for given, own in names if own in twice and own != given)
    return result


def canonical_pairs(
    given: Iterable[tuple[str, Any]],
    known: Mapping[str, bool],
    say: Callable[[str], None] = lambda note: None,
    beside: Mapping[str, str] = {},
    dashes: str = "",
) -> list[tuple[str, Any]]:
    """(canonical name, value) of options under any of their names, without those that are unset or have no effect.

    `known`: every option of the command -> whether it is a boolean whose word is checked here. `beside`: options of
    another command, which scripts give to all -> why they mean nothing to this one. `dashes` stand in front of names in
    messages. `say` is told which options have no effect. Raises UserError with one line a fault.
    """
    pairs = list(given)
    plain = {plain_name(name) for name, _ in pairs}
    result: list[tuple[str, Any]] = []
    faults: list[str] = []
    idle: dict[str, str] = {}
    for word, value in pairs:
        name = canonical_name(word, known)
        value = canonical_value(word, value) if isinstance(value, str) else value
        if BEATEN.get(plain_name(word)) in plain:
            idle[word] = f"{dashes}{name} holds"
        elif name not in known:
            fate = Fate(idle=beside[name]) if name in beside else fate_of(name, value)
            if fate is None:
                faults.append(f"{word}: unknown option; {did_you_mean(word, known, dashes)}")
            elif fate.fault:
                faults.append(f"{word}: {fate.fault}")
            elif fate.idle:
                idle[word] = fate.idle
        elif value is None or value == UNSET:
            continue
        elif known[name] and not is_boolean_word(value):
            faults.append(f"{word}: {value!r} is no boolean; give 0, 1, true or false, or nothing for true")
        else:
            result.append((name, value))
    if faults:
        raise UserError(faults)
    if idle:
        say(idle_note(idle))
    return result


def is_boolean_word(value: object) -> bool:
    """Whether a word is a value of a switch."""
    return str(value).lower() in BOOLEAN_WORDS or value == UNSET


def _fault(error: Any) -> str:
    name = ".".join(str(part) for part in error["loc"])
    message = error["msg"].removeprefix("Value error, ")
    if not name:
        return str(message)
    if error["type"] == "missing":
        return f"{name}: missing; give --{name}"
    return f"{name}: {message[0].lower()}{message[1:]} (it is {shortened(repr(error['input']))})"
