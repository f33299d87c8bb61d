"""Profile of the model's compute time: one file in, one file out. Curves over it are `profiles.compute_time`'s."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..base.errors import UserError
from .files import (
    Meta,
    ProfileFile,
    computation_name,
    field_of,
    not_negative,
    objects,
    positive,
    read_profile,
    unknown_key,
    whole_number,
    write_profile,
)

EMBEDDING, HEAD = "embedding", "head"


def layer_part(layer_type: int = 0) -> str:
    """Name of a layer type in keys."""
    return f"layertype_{layer_type}"


class Shape(NamedTuple):
    """What one layer was run on."""

    batch: int  # samples
    seq: int  # tokens of a sample


class PassKey(NamedTuple):
    """A part of the model (`layer_part(i)`, EMBEDDING or HEAD, which has norm and loss) as run by one of `tp` ranks."""

    part: str
    batch: int  # samples of the whole tp group
    seq: int  # tokens of a sample
    tp: int = 1


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Compute alone, no communication, for all samples of the key, of one layer, in ms."""

    forward_ms: float
    backward_ms: float
    recompute_ms: float | None = None  # the forward inside backward; None: as long as forward


_TIME = re.compile(r"layertype_(\d+|other)_bsz(\d+)_seq(\d+)")
_RAW = re.compile(r"layernum\[\d+(?:,\s*\d+)*\]_bsz\d+_seq\d+(?:_.*)?")
_PASS = re.compile(r"(layertype_\d+|embedding|head)_bsz(\d+)_seq(\d+)_tp(\d+)")
UNITS = {"layertype": "ms per layer per sample, forward, tp 1", "passes_ms": "ms per layer, all samples of the key"}


@dataclass(frozen=True)
class ComputationProfile:
    """Measured compute time of one model in one dtype."""

    dtype: str  # fp32, bf16, fp16
    hidden_size: int
    heads: int
    layer_ms: Mapping[int, Mapping[Shape, float]]  # layer type -> forward ms per layer per sample, tp 1
    other_ms: Mapping[Shape, float] = field(default_factory=dict)  # all but the layers: forward ms per sample
    passes: Mapping[PassKey, PassTimes] = field(default_factory=dict)  # finer measurements, where there are
    optimizer_ms_per_million: float = 0.0  # optimizer step, ms per million parameters that a rank updates
    raw: Mapping[str, Any] = field(default_factory=dict)  # runs that the values were derived from, kept as they are
    meta: Meta = field(default_factory=Meta)
    files: tuple[ProfileFile, ...] = field(default=(), compare=False)  # that it was read from

    def save(self, folder: str | Path) -> Path:
        """Write the file under its documented name, whole or not at all; returns its path."""
        content: dict[str, Any] = dict(self.raw)
        for layer_type, times in sorted(self.layer_ms.items()):
            content |= {f"layertype_{layer_type}_bsz{b}_seq{s}": ms for (b, s), ms in sorted(times.items())}
        content |= {f"layertype_other_bsz{b}_seq{s}": ms for (b, s), ms in sorted(self.other_ms.items())}
        passes = {
            f"{key.part}_bsz{key.batch}_seq{key.seq}_tp{key.tp}": {
                "forward": times.forward_ms,
                "backward": times.backward_ms,
                **({} if times.recompute_ms is None else {"recompute": times.recompute_ms}),
            }
            for key, times in sorted(self.passes.items())
        }
        meta = self.meta.with_extra(UNITS, passes_ms=passes, optimizer_ms_per_million=self.optimizer_ms_per_million)
        return write_profile(Path(folder) / computation_name(self.dtype, self.hidden_size, self.heads), content, meta)

    @classmethod
    def load(cls, path: str | Path, dtype: str, hidden_size: int, heads: int) -> ComputationProfile:
        """Read a file, whatever its name. Raises UserError."""
        content, meta = read_profile(path)
        layers: dict[int, dict[Shape, float]] = {}
        other: dict[Shape, float] = {}
        raw: dict[str, Any] = {}
        for key, value in content.items():
            match = _TIME.fullmatch(key)
            if match:
                shape = Shape(whole_number(path, key, match[2]), whole_number(path, key, match[3]))
                if match[1] == "other":
                    other[shape] = not_negative(path, key, value, "ms per sample")
                else:
                    times = layers.setdefault(_layer_type(path, key, match[1]), {})
                    times[shape] = positive(path, key, value, "ms per layer per sample")
            elif _RAW.fullmatch(key):
                raw[key] = value
            else:
                raise unknown_key(path, key, "layertype_{type|other}_bsz{samples}_seq{tokens}")
        if not layers:
            raise UserError(
                f"{path}: holds {'raw runs, but ' if raw else ''}no layertype_…_bsz…_seq… time; Galvatron's "
                "profile_computation.sh derives these when all its runs are done, or measure with "
                "`galvatron profile computation`"
            )
        extra = meta.extra if meta else {}
        return cls(
            dtype,
            hidden_size,
            heads,
            layers,
            other,
            _read_passes(path, extra.get("passes_ms")),
            not_negative(
                path, "galvatron.optimizer_ms_per_million", extra.get("optimizer_ms_per_million", 0.0), "ms per million"
            ),
            raw,
            meta or Meta(),
            (ProfileFile.of(path),),
        )


def _layer_type(path: str | Path, key: str, text: str) -> int:
    return 0 if text == "0" else whole_number(path, key, text)


def _read_passes(path: str | Path, value: object) -> dict[PassKey, PassTimes]:
    if value is None:
        return {}
    result = {}
    for key, times in objects(path, "galvatron.passes_ms", value):
        match = _PASS.fullmatch(key)
        where = f"galvatron.passes_ms.{key}"
        if not match:
            raise unknown_key(path, where, "{layertype_0|embedding|head}_bsz{samples}_seq{tokens}_tp{degree}")
        forward, backward = (
            not_negative(path, where, field_of(path, where, times, n), "ms") for n in ("forward", "backward")
        )
        recompute = not_negative(path, where, times["recompute"], "ms") if "recompute" in times else None
        batch, seq, tp = (whole_number(path, where, match[i]) for i in (2, 3, 4))
        result[PassKey(match[1], batch, seq, tp)] = PassTimes(forward, backward, recompute)
    return result
