"""Descriptions of profile files: the form of keys, and the numbers under them with units.

`computation`, `memory` and `hardware` have the descriptions (`Content`) of their files, from which reading, writing,
errors with file and key, units in a file, and the documentation's table are derived.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from ..base import Faults, Note, UserError, shortened
from .dialects import Entries
from .raw_runs import LARGEST

SMALLEST = 1e-9  # ms, MiB or MiB/ms: below any measurement
META_KEY = "galvatron"  # the object in each file that is ours

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Key = TypeVar("Key")


class FilePlace(NamedTuple):
    """A place in a file."""

    path: str
    key: str = ""  # all keys of its path, joined by dots
    origins: Mapping[str, str] = {}  # entries of another dialect: our key -> key in the file

    def at(self, key: str) -> FilePlace:
        """The place under a key of the object here."""
        return self._replace(key=f"{self.key}.{key}" if self.key else key)

    @property
    def own_key(self) -> str:
        """The place by the keys of the file."""
        for derived, origin in self.origins.items():
            if self.key == derived or self.key.startswith(f"{derived}."):
                return origin + self.key[len(derived) :]
        return self.key

    def __str__(self) -> str:
        return f"{self.path}: {self.own_key}"

    def unknown(self, expected: str) -> UserError:
        """The error for an unknown key."""
        return UserError(f"{self.path}: {shown(self.own_key)}: unknown key; expected {expected}; correct or remove it")


class Values(Protocol[T_co]):
    """Reads and writes the values of one kind."""

    def read(self, at: FilePlace, value: object) -> T_co:
        """Parse the value of a field; `at` names it in a UserError."""

    def write(self, value: Any) -> Any:
        """Convert a value for a file."""


@dataclass(frozen=True)
class NumberField:
    """A finite, nonnegative number; smaller numbers than any measurement become zero."""

    unit: str
    above_zero: bool = False

    def read(self, at: FilePlace, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UserError(f"{at}: must be a number ({self.unit}), not {shown(value)}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not 0 <= number <= LARGEST:
            raise UserError(f"{at}: {shown(value)} is no possible value ({self.unit}): measure it again")
        if number < SMALLEST and self.above_zero:
            raise UserError(f"{at}: is {shown(value)}; it must be above zero ({self.unit}): measure it again")
        return number if number >= SMALLEST else 0.0

    def write(self, value: float) -> float:
        return value


@dataclass(frozen=True)
class Part(Generic[T]):
    """A variable part of a key."""

    pattern: str  # regular expression without groups
    read: Callable[[FilePlace, str], T]
    write: Callable[[Any], str] = str


def _whole(at: FilePlace, text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 9 and int(text) > 0:
        return int(text)
    raise UserError(f"{at}: {shown(text)} must be a whole number from 1 to 999999999")


WHOLE = Part(r"\d+", _whole)  # a positive whole number
ALONE = Part(r".*", _whole)  # the same as a whole key
INDEX = Part(r"\d+", lambda place, text: 0 if text == "0" else _whole(place, text))  # counted from 0


def one_of(values: Mapping[str, T]) -> Part[T]:
    """One of some words, each with its value."""
    words = {value: word for word, value in values.items()}
    return Part("|".join(map(re.escape, values)), lambda _, text: values[text], lambda value: words[value])


class Keys(Generic[Key]):
    """Keys of a form, such as `pp_size_{stages}`."""

    def __init__(self, form: str, made: Callable[..., Key], *parts: Part[Any]):
        """`parts`: the fields {…} and […] of the form; `made(*fields)` builds the key, a tuple or the only field."""
        self.form, self._made, self._parts = form, made, parts
        self._fixed = re.split(r"\{[^}]*\}|\[[^]]*\]", form)
        groups = (f"({field.pattern})" for field in parts)
        pattern = "".join(re.escape(text) + next(groups, "") for text in self._fixed)
        self._pattern = re.compile(pattern, re.DOTALL)

    def match(self, key: str) -> bool:
        """Whether a key is of this form."""
        return bool(self._pattern.fullmatch(key))

    def read(self, at: FilePlace, key: str) -> Key:
        """A key of the object at a place. Raises UserError."""
        match = self._pattern.fullmatch(key)
        if not match:
            raise at.at(key).unknown(self.form)
        where = at if self._fixed == ["", ""] else at.at(key)
        return self._made(*(field.read(where, text) for field, text in zip(self._parts, match.groups(), strict=True)))

    def write(self, key: Key) -> str:
        """The key's text."""
        values: Sequence[Any] = key if isinstance(key, tuple) else (key,)
        texts = (field.write(value) for field, value in zip(self._parts, values, strict=True))
        return "".join(text + next(texts, "") for text in self._fixed)


@dataclass(frozen=True)
class TableField(Generic[Key, T]):
    """An object whose keys are all of a form."""

    keys: Keys[Key]
    values: Values[T]
    needed: tuple[Key, ...] = ()

    def read(self, at: FilePlace, value: object) -> dict[Key, T]:
        """Raises UserError with every fault."""
        result: dict[Key, T] = {}
        faults = Faults()
        for key, entry in entries(at, value):
            with faults.gathered():
                result[self.keys.read(at, key)] = self.values.read(at.at(key), entry)
        faults.require_none()
        if missing := [key for key in self.needed if key not in result]:
            raise UserError(f"{at}: {self.keys.write(missing[0])} is missing; add it or profile again")
        return result

    def write(self, value: Mapping[Key, T]) -> dict[str, Any]:
        return {self.keys.write(key): self.values.write(entry) for key, entry in value.items()}


class Record(Generic[T]):
    """An object with fields of fixed names."""

    def __init__(
        self,
        made: Callable[..., T],
        fields: Mapping[str, tuple[str, Values[Any]]],
        optional: Mapping[str, tuple[str, Values[Any]]] = {},
    ):
        """`fields`: name in the file -> (attribute and argument of `made`, its values). An `optional` field
        that is None or empty is not written."""
        self._made, self._fields, self._optional = made, {**fields, **optional}, set(optional)

    def read(self, at: FilePlace, value: object) -> T:
        if not isinstance(value, dict):
            raise UserError(f"{at}: must be an object, not {shown(value)}")
        attributes = {}
        for name, (attribute, values) in self._fields.items():
            if name in value:
                attributes[attribute] = values.read(at.at(name), value[name])
            elif name not in self._optional:
                raise UserError(f"{at}: {name} is missing; add it or profile again")
        return self._made(**attributes)

    def write(self, value: T) -> dict[str, Any]:
        attributes = ((name, getattr(value, attribute), values) for name, (attribute, values) in self._fields.items())
        return {
            name: values.write(each)
            for name, each, values in attributes
            if name not in self._optional or each not in (None, {})
        }


@dataclass(frozen=True)
class Content:
    """The content of one kind of file."""

    command: str  # `galvatron profile …` that measures it
    entries: Mapping[str, tuple[TableField[Any, Any], str]]  # Galvatron's, by name: table, "unit: meaning"
    ours: Mapping[str, tuple[Values[Any], str]] = field(default_factory=dict)  # inside our `galvatron` object
    begins: tuple[str, ...] = ()  # prefixes: an unknown key with one of these is an error; others are skipped

    @property
    def units(self) -> dict[str, str]:
        """Name of each kind of number -> "unit: meaning", as in a file."""
        return {name: meaning for name, (_, meaning) in [*self.entries.items(), *self.ours.items()]}

    def read(self, path: str, read: Entries, ours: Mapping[str, Any], note: Note) -> dict[str, Any]:
        """Returns values by name: tables without entries are empty, names missing in our object are absent. Raises
        UserError with every fault."""
        result: dict[str, Any] = {name: {} for name in self.entries}
        faults, strange, file = Faults(), [], FilePlace(path, origins=read.origins)
        for key, value in read.content.items():
            with faults.gathered():
                name = next((name for name, (table, _) in self.entries.items() if table.keys.match(key)), None)
                if name:
                    table, _ = self.entries[name]
                    result[name][table.keys.read(file, key)] = table.values.read(file.at(key), value)
                elif key.startswith(self.begins):
                    raise file.at(key).unknown(" or ".join(table.keys.form for table, _ in self.entries.values()))
                else:
                    strange.append(key)
        at = FilePlace(path, META_KEY)
        for name, (values, _) in self.ours.items():
            if name in ours:
                with faults.gathered():
                    result[name] = values.read(at.at(name), ours[name])
        faults.require_none()
        if skipped := [*strange, *read.skipped]:
            note(f"{path}: skipped, as no measurements that are known here: {', '.join(map(shown, skipped))}")
        return result

    def lacking(self, path: str, read: Entries, wanted: str) -> UserError:
        """The error for a file without its expected content, which may be the wrong file."""
        first = [shown(key, 40) for key in read.keys][:3]
        has = f"; its keys are {', '.join(first)}, …" if first else ""
        wanted += " and no raw runs that contain one" if read.raw else ""
        return UserError(
            f"{path}: holds no {wanted}{has}; name the right file, or measure it with "
            f"`galvatron profile {self.command}`"
        )

    def write(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the content of the file and of our object in it, each without empty entries."""
        tables: dict[str, Any] = {}
        for name, (table, _) in self.entries.items():
            tables |= table.write(values.get(name, {}))
        ours = {name: kind.write(values[name]) for name, (kind, _) in self.ours.items() if values.get(name)}
        return tables, ours


def entries(at: FilePlace, value: object) -> Iterator[tuple[str, Any]]:
    """Items of the object at a place. Raises UserError when it is none or empty."""
    if not isinstance(value, dict) or not value:
        raise UserError(f"{at}: must be an object with at least one entry, not {shown(value)}")
    yield from value.items()


def shown(value: object, limit: int = 60) -> str:
    """A value for a message."""
    return shortened(json.dumps(value) if isinstance(value, (str, list, dict)) else repr(value), limit)
