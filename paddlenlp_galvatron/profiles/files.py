"""Profile files on disk: their names, reading and writing, and the object "galvatron" in each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..base import MIB, UserError
from ..base.reading import digest, read_json
from ..base.writing import write_text
from .data_sheet import DataSheet, Device, sheet_of_driver
from .raw_runs import Dialect
from .schema import META_KEY as META_KEY
from .schema import Content

LARGEST_BYTES = 16 * MIB  # of a profile file; the largest known has 100 kB
GPU_LIBRARIES = ("CUDA", "NCCL")  # prefixes of a fingerprint's driver for GPUs
MOST_FILES = 32  # sources that a plan names


class Fingerprint(BaseModel):
    """The origin of a profile. None: unknown."""

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
    device: Device | None = Field(None, description="the device, as its driver or its data sheet describes it")
    spread: dict[str, float] = Field(
        default_factory=dict, description="per key of the file: interquartile range / median of its repetitions"
    )
    flags: dict[str, str] = Field(default_factory=dict, description="keys of the file whose number cannot be, and why")

    @classmethod
    def derived(cls, sheet: DataSheet | None, **identity: Any) -> Meta:
        """The meta of a profile that comes from a data sheet, or from the model's shape alone."""
        device = Device.of(sheet) if sheet else None
        origin = Fingerprint(device=sheet.device if sheet else None, **identity)
        return cls(analytic=True, fingerprint=origin, device=device)

    @property
    def extra(self) -> dict[str, Any]:
        """The unknown keys."""
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


def device_of(*metas: Meta) -> Device:
    """The device of profiles: from their description, else by the driver's full name."""
    for meta in metas:
        if meta.device:
            return meta.device
    own_entries = next((meta.fingerprint for meta in metas if meta.fingerprint.device), Fingerprint())
    if own_entries.device is None:
        return Device()
    is_gpu = sheet_of_driver(own_entries.device) or (own_entries.driver or "").startswith(GPU_LIBRARIES)
    return Device.named(own_entries.device) if is_gpu else Device(name=own_entries.device)


@dataclass(frozen=True, slots=True)
class ProfileFile:
    """A file that a profile was read from, so that a plan can name its sources."""

    path: str
    sha256: str  # hash of the file's bytes
    fingerprint: Fingerprint

    @classmethod
    def of(cls, path: str | Path) -> ProfileFile:
        """Raises UserError as `read_profile` does."""
        _, meta = read_profile(path)
        return cls(str(path), digest(path, LARGEST_BYTES), (meta or Meta()).fingerprint)

    @staticmethod
    def changed(summaries: object) -> list[str]:
        """Paths of files that exist but have changed since their summaries were written."""
        files = [file for file in summaries if isinstance(file, dict)] if isinstance(summaries, list) else []
        hashes = {path: file.get("sha256") for file in files[:MOST_FILES] if isinstance(path := file.get("path"), str)}
        return [path for path, sha256 in hashes.items() if _digest_if_there(path) not in (None, sha256)]

    def summary(self) -> dict[str, Any]:
        """The entry in a plan's file."""
        fingerprint = self.fingerprint.model_dump(exclude_none=True)
        return {"path": self.path, "sha256": self.sha256} | ({"fingerprint": fingerprint} if fingerprint else {})


def _digest_if_there(path: str) -> str | None:
    """SHA-256 of a profile file; for an invalid path, a hash that no file has."""
    try:
        return digest(path, LARGEST_BYTES) if Path(path).is_file() else None
    except UserError:
        return ""


class ProfileSource(TypedDict, total=False):
    """Places of profiles, and reading modes: files named by a path (or its folder), and others by their documented
    names in `folder`."""

    folder: str | Path | None
    time_profiling_path: str | Path | None
    memory_profiling_path: str | Path | None
    allreduce_bandwidth_config_path: str | Path | None
    p2p_bandwidth_config_path: str | Path | None
    overlap_coe_path: str | Path | None
    sp_time_path: str | Path | None
    time_profile_mode: str  # a TimeMode; unset: static
    memory_profile_mode: str  # a MemoryMode; unset: static
    profile_dialect: Dialect | None
    allow_foreign_profiles: bool


def profile_path(path: str | Path | None, folder: str | Path | None, name: str) -> tuple[Path | None, bool]:
    """Path of a profile file: `path`, which may be its folder, else its documented name in `folder`; and whether to
    read it: it exists, or `path` names it."""
    if path is not None and not Path(path).is_dir():
        return Path(path), True
    base = path if path is not None else folder
    file = None if base is None else Path(base) / name
    return file, file is not None and file.exists()


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


def write_profile(path: Path, content: Content, values: Mapping[str, Any], meta: Meta) -> Path:
    """Write values, by the names of the content, to a file atomically; returns its path."""
    own_entries, ours = content.write(values)
    meta_fields = meta.model_dump(exclude=set(content.ours), exclude_none=True)
    whole = {**own_entries, META_KEY: meta_fields | {"units": meta.units | content.units} | ours}
    write_text(path, json.dumps(whole, indent=4) + "\n")
    return path
