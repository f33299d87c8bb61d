"""Common to all profile files: names, the object "galvatron" in each, and reading with errors for people."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..base.errors import UserError
from ..base.reading import digest, read_json
from ..base.writing import write_text
from ..interop.raw_runs import LARGEST, Dialect

META_KEY = "galvatron"
LARGEST_BYTES = 16 * 2**20  # of a profile file; the largest known has 100 kB
MOST_FILES = 32  # of which a plan tells that it was searched from them
Note = Callable[[str], None]  # takes a line on what was assumed or left out
MOST_FAULTS = 20  # of files that are refused together
SMALLEST = 1e-9  # ms, MiB or MiB/ms: less was never measured


class Fingerprint(BaseModel):
    """Where a profile comes from. None: not known."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: str | None = Field(None, description="name of the device, as the driver or the CPU gives it")
    device_count: int | None = Field(None, description="devices that took part")
    driver: str | None = Field(None, description="driver and communication library versions")
    paddle: str | None = Field(None, description="version of PaddlePaddle")
    model: str | None = Field(None, description="model.measured_fingerprint")
    dtype: str | None = Field(None, description="fp32, bf16 or fp16")


class Meta(BaseModel):
    """The object "galvatron" of a profile file. Further keys (extra measurements, raw points) are kept as they are."""

    model_config = ConfigDict(extra="allow", frozen=True)

    format_version: Literal[1] = 1
    dialect: Dialect = Field("galvatron", description="whose units the file is in")
    units: dict[str, str] = Field(default_factory=dict, description="unit of each kind of number in the file")
    analytic: bool = Field(False, description="derived from data sheets, not measured")
    fingerprint: Fingerprint = Field(default_factory=lambda: Fingerprint())
    spread: dict[str, float] = Field(
        default_factory=dict, description="per key of the file: interquartile range / median of its repetitions"
    )
    flags: dict[str, str] = Field(default_factory=dict, description="keys of the file whose number cannot be, and why")

    @property
    def extra(self) -> dict[str, Any]:
        """Keys beside the known ones."""
        return dict(self.model_extra or {})

    def with_extra(self, units: Mapping[str, str], **extra: Any) -> Meta:
        """This meta with units and extra keys added; empty extras are left out."""
        kept = {key: value for key, value in extra.items() if value}
        return Meta.model_validate({**self.model_dump(), "units": {**self.units, **units}, **kept})

    def about(self, keys: Iterable[str]) -> Meta:
        """This meta with the spreads and flags of these keys alone."""
        wanted = set(keys)
        return self.model_copy(
            update={
                "spread": {key: value for key, value in self.spread.items() if key in wanted},
                "flags": {key: reason for key, reason in self.flags.items() if key in wanted},
            }
        )


@dataclass(frozen=True, slots=True)
class ProfileFile:
    """A file that a profile was read from, so that a plan can tell what it was searched from."""

    path: str
    sha256: str  # of the file's bytes
    fingerprint: Fingerprint

    @classmethod
    def of(cls, path: str | Path) -> ProfileFile:
        """Raises UserError as `read_profile` does."""
        _, meta = read_profile(path)
        return cls(str(path), digest(path, LARGEST_BYTES), (meta or Meta()).fingerprint)

    @staticmethod
    def changed(summaries: object) -> list[str]:
        """Paths of files that are there, but not as they were when their summaries were written."""
        files = [file for file in summaries if isinstance(file, dict)] if isinstance(summaries, list) else []
        before = {path: file.get("sha256") for file in files[:MOST_FILES] if isinstance(path := file.get("path"), str)}
        return [path for path, sha256 in before.items() if _digest_if_there(path) not in (None, sha256)]

    def summary(self) -> dict[str, Any]:
        """As it stands in a plan's file."""
        known = self.fingerprint.model_dump(exclude_none=True)
        return {"path": self.path, "sha256": self.sha256} | ({"fingerprint": known} if known else {})


def _digest_if_there(path: str) -> str | None:
    """SHA-256 of a profile file; of what cannot be one, none that any file has."""
    try:
        return digest(path, LARGEST_BYTES) if Path(path).is_file() else None
    except UserError:
        return ""


class Faults:
    """Faults of files, gathered so that they are refused once, with all reasons."""

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


def no_note(_: str) -> None:
    """The reader who wants no notes."""


def place(path: str | Path | None, folder: str | Path | None, name: str) -> Path | None:
    """Where a file is to be found: at its path, which may be its folder, or under its documented name in `folder`."""
    if path is not None and not Path(path).is_dir():
        return Path(path)
    found = path if path is not None else folder
    return None if found is None else Path(found) / name


def allreduce_name(num_nodes: int, gpus_per_node: int) -> str:
    return f"allreduce_bandwidth_{num_nodes}nodes_{gpus_per_node}gpus_per_node.json"


def p2p_name(num_nodes: int, gpus_per_node: int) -> str:
    return f"p2p_bandwidth_{num_nodes}nodes_{gpus_per_node}gpus_per_node.json"


def sp_time_name(num_nodes: int, gpus_per_node: int) -> str:
    return f"sp_time_{num_nodes}nodes_{gpus_per_node}gpus_per_node.json"


OVERLAP_NAME = "overlap_coefficient.json"


def computation_name(dtype: str, hidden_size: int, heads: int) -> str:
    return f"computation_profiling_{dtype}_hidden_{hidden_size}_head_{heads}.json"


def memory_name(dtype: str, hidden_size: int, heads: int) -> str:
    return f"memory_profiling_{dtype}_hidden_{hidden_size}_head_{heads}.json"


def read_profile(path: str | Path) -> tuple[dict[str, Any], Meta | None]:
    """Content of a profile file without its object "galvatron", and that object. Raises UserError."""
    content = read_json(path, LARGEST_BYTES, comments=True)
    if not isinstance(content, dict):
        raise UserError(f"{path}: a profile file holds one JSON object; this one does not")
    meta = content.pop(META_KEY, None)
    if meta is None:
        return content, None
    try:
        return content, Meta.model_validate(meta)
    except ValidationError as error:
        raise UserError(
            f"{path}: {META_KEY}.{'.'.join(map(str, item['loc']))}: {item['msg']}; profile again or remove the object"
            for item in error.errors()
        ) from None


def write_profile(path: Path, content: Mapping[str, Any], meta: Meta) -> Path:
    """Write a profile file whole or not at all; returns its path."""
    whole = {**content, META_KEY: meta.model_dump(exclude_defaults=False, exclude_none=True)}
    write_text(path, json.dumps(whole, indent=4) + "\n")
    return path


def positive(path: str | Path, key: str, value: object, unit: str) -> float:
    """The number under a key of a file. Raises UserError unless it is finite and above zero."""
    number = not_negative(path, key, value, unit)
    if number < SMALLEST:
        raise UserError(f"{path}: {key}: is {shorten(value)}; it must be above zero ({unit}): measure it again")
    return number


def not_negative(path: str | Path, key: str, value: object, unit: str) -> float:
    """As `positive`, but zero may stand, and what is too small to have been measured is zero."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UserError(f"{path}: {key}: must be a number ({unit}), not {shorten(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not 0 <= number <= LARGEST:
        raise UserError(f"{path}: {key}: {shorten(value)} is no possible value ({unit}): measure it again")
    return number if number >= SMALLEST else 0.0


def whole_number(path: str | Path, key: str, text: object) -> int:
    """A positive whole number that stands in (or as) a key. Raises UserError."""
    if isinstance(text, str) and text.isascii() and text.isdigit() and len(text) <= 9 and int(text) > 0:
        return int(text)
    raise UserError(f"{path}: {key}: {shorten(text)} must be a whole number from 1 to 999999999")


def objects(path: str | Path, key: str, value: object) -> Iterator[tuple[str, Any]]:
    """Items of an object under a key. Raises UserError when it is none or empty."""
    if not isinstance(value, dict) or not value:
        raise UserError(f"{path}: {key}: must be an object with at least one entry, not {shorten(value)}")
    yield from value.items()


def field_of(path: str | Path, key: str, value: object, name: str) -> Any:
    """One field of the object under a key. Raises UserError when either is missing."""
    if not isinstance(value, dict):
        raise UserError(f"{path}: {key}: must be an object, not {shorten(value)}")
    if name not in value:
        raise UserError(f"{path}: {key}: {name} is missing; add it or profile again")
    return value[name]


def unknown_key(path: str | Path, key: str, expected: str) -> UserError:
    """The error for a key that no rule knows."""
    return UserError(f"{path}: {shorten(key)}: unknown key; expected {expected}; correct or remove it")


SECTIONS = ("computation_profiling", "memory_profiling")  # of a file that holds a model's times and memory together


def section(content: dict[str, Any], name: str) -> tuple[dict[str, Any], list[str]]:
    """One of SECTIONS where the content has it, else all of it; and the keys beside the sections."""
    if not isinstance(content.get(name), dict):
        return content, []
    return content[name], [key for key in content if key not in SECTIONS]


def skipped(path: str | Path, keys: Sequence[str], note: Note) -> None:
    """Tell of a file's keys that are no measurements, such as the model's own numbers."""
    if keys:
        note(f"{path}: skipped, as no measurements that are known here: {', '.join(map(shorten, keys))}")


def holds_no(path: str | Path, wanted: str, keys: Iterable[str], command: str) -> UserError:
    """The error for a file without what it should hold, which may be another file than was meant."""
    first = [shorten(key, 40) for key in keys][:3]
    has = f"; its keys are {', '.join(first)}, …" if first else ""
    return UserError(f"{path}: holds no {wanted}{has}; name the right file, or measure it with `{command}`")


_LENGTH_IN_NAME = re.compile(r"_seqlen_?(\d{1,9})")


class Lengths:
    """Which sequence lengths, one a layer type, a key means: a number, a list, or nothing (Galvatron 1)."""

    def __init__(self, path: str | Path, seqs: Sequence[int], note: Note):
        self._path, self._note = path, note
        named = _LENGTH_IN_NAME.search(Path(path).name)
        self._untold = (int(named[1]),) if named else tuple(seqs)
        self._why = "the file's name" if named else "this search's"

    def of(self, key: str, text: str | None) -> tuple[int, ...]:
        """Raises UserError for a text that tells none, or where nothing does."""
        if text:
            return tuple(whole_number(self._path, key, number) for number in re.findall(r"[^,\s\[\]]+", text))
        if not self._untold:
            raise UserError(f"{self._path}: {key}: tells no sequence length; write it as _seq… into the key")
        tokens = ", ".join(map(str, dict.fromkeys(self._untold)))
        self._note(f"{self._path}: keys without a sequence length are taken as of {tokens} tokens ({self._why})")
        return self._untold


def shorten(value: object, limit: int = 60) -> str:
    """A value as it may stand in a message."""
    text = json.dumps(value) if isinstance(value, (str, list, dict)) else repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
