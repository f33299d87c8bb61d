"""Profile of the model's compute time: one file in, one file out. Curves over it are `profiles.compute_time`'s."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ..base.errors import UserError
from ..interop.raw_runs import SEQ, TIME_RUN, derived_times, kind_of
from ..model import ModelShape, Recompute
from ..model.layer import APART
from ..plan.mesh import Axis
from .experts import ExpertPass, ExpertTimes
from .files import (
    Faults,
    Lengths,
    Meta,
    Note,
    ProfileFile,
    computation_name,
    field_of,
    holds_no,
    no_note,
    not_negative,
    objects,
    positive,
    read_profile,
    section,
    skipped,
    unknown_key,
    whole_number,
    write_profile,
)

EMBEDDING, HEAD = "embedding", "head"


def layer_part(layer_type: int = 0) -> str:
    """Name of a layer type in keys."""
    return f"layertype_{layer_type}"


class Shape(NamedTuple):
    """Samples and tokens of a measurement."""

    batch: int  # samples
    seq: int  # sequence length


class PassKey(NamedTuple):
    """A part of the model (`layer_part(i)`, EMBEDDING or HEAD, which has norm and loss) as run by one of `tp` ranks."""

    part: str
    batch: int  # samples of the whole tp group
    seq: int  # sequence length
    tp: int = 1


class CommPointKey(NamedTuple):
    """A layer whose samples ranks share along an axis (Ulysses, context parallel)."""

    part: str
    batch: int  # samples' worth of tokens of one rank
    seq: int  # sequence length
    axis: Axis


class CommPointTimes(NamedTuple):
    """Computation of a rank at a shared layer's communication points, on top of an unshared layer of as many tokens."""

    forward_ms: float = 0.0
    backward_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Compute alone, no communication, for all samples of the key, of one layer, in ms."""

    forward_ms: float
    backward_ms: float
    recompute_ms: float | None = None  # the forward inside backward; None: as long as forward
    shares: Mapping[Recompute, float] = field(default_factory=dict)  # of it, that recomputing parts alone takes

    def launched(self, launch: PassTimes, messages_ms: float) -> PassTimes:
        """These, and the time that a GPU waits for its host to launch a layer. Hosts run ahead, so that this counts
        over all passes of a layer and its messages together: what they lack is added where it is launched."""
        again = self.recompute_ms or 0.0
        again_host = launch.recompute_ms * min(again / self.forward_ms, 1.0) if launch.recompute_ms and again else 0.0
        host_ms = launch.forward_ms + launch.backward_ms + again_host
        lacking = host_ms - (self.forward_ms + self.backward_ms + again + messages_ms)
        if lacking <= 0:
            return self
        return replace(
            self,
            forward_ms=self.forward_ms + lacking * launch.forward_ms / host_ms,
            backward_ms=self.backward_ms + lacking * launch.backward_ms / host_ms,
            recompute_ms=again + lacking * again_host / host_ms if again else self.recompute_ms,
        )

    def slowed(self, factor: float) -> PassTimes:
        """Each pass so many times as long."""
        again = None if self.recompute_ms is None else factor * self.recompute_ms
        forward_ms, backward_ms = factor * self.forward_ms, factor * self.backward_ms
        return replace(self, forward_ms=forward_ms, backward_ms=backward_ms, recompute_ms=again)

    def beside(self, points: CommPointTimes) -> PassTimes:
        """Adds the work at the communication points of a shared layer; recomputing all repeats forward's."""
        again = None if self.recompute_ms is None else self.recompute_ms + points.forward_ms
        return replace(
            self,
            forward_ms=self.forward_ms + points.forward_ms,
            backward_ms=self.backward_ms + points.backward_ms,
            recompute_ms=again,
        )


NOTHING = PassTimes(0.0, 0.0, 0.0)
_TIME = re.compile(rf"layertype_(?:(\d+)|(other)(?:_\d+)?)(?:_bsz(\d+))?(?:_seq({SEQ}|\d+))?")
_PART_TIME = re.compile(rf"{_TIME.pattern}_(attention|mlp)")
_RAW = re.compile(rf"{TIME_RUN.pattern}(?:_.*)?")
_COMM_POINTS = re.compile(rf"(layertype_\d+)_bsz(\d+)_seq(\d+)_({Axis.ULYSSES}|{Axis.CONTEXT})")
_PASS = re.compile(r"(layertype_\d+|embedding|head)_bsz(\d+)_seq(\d+)_tp(\d+)")
OF_EXPERTS = ("call", "expert", "row")  # fields of a pass of experts
UNITS = {
    "layertype": "ms per layer per sample, forward, tp 1",
    "passes_ms": "ms per layer, all samples of the key",
    "comm_points_ms": "ms per layer, on top of as many tokens of an unshared one",
    "experts_ms": "ms per layer, whatever its rows; per expert of a rank; per row that they get",
    "launch_ms": "ms per layer, whatever its tokens",
}


@dataclass(frozen=True)
class ComputationProfile:
    """Measured compute time of one model in one dtype."""

    dtype: str  # fp32, bf16, fp16
    hidden_size: int
    heads: int
    layer_ms: Mapping[int, Mapping[Shape, float]]  # layer type -> forward ms per layer per sample, tp 1
    other_ms: Mapping[Shape, float] = field(default_factory=dict)  # all but the layers: forward ms per sample
    passes: Mapping[PassKey, PassTimes] = field(default_factory=dict)  # finer measurements, where there are
    points: Mapping[CommPointKey, CommPointTimes] = field(default_factory=dict)
    launch: PassTimes = NOTHING  # host time to launch a layer's kernels: on a GPU its passes take no less
    optimizer_ms_per_million: float = 0.0  # optimizer step, ms per million parameters that a rank updates
    raw: Mapping[str, Any] = field(default_factory=dict)  # runs that the values were derived from, kept as they are
    meta: Meta = field(default_factory=Meta)
    files: tuple[ProfileFile, ...] = field(default=(), compare=False)  # the files it was read from
    experts: Mapping[int, ExpertTimes] = field(default_factory=dict)  # by the number of ranks that split each

    def save(self, folder: str | Path) -> Path:
        """Write the file under its documented name, whole or not at all; returns its path."""
        content: dict[str, Any] = dict(self.raw)
        for layer_type, times in sorted(self.layer_ms.items()):
            content |= {f"layertype_{layer_type}_bsz{b}_seq{s}": ms for (b, s), ms in sorted(times.items())}
        content |= {f"layertype_other_bsz{b}_seq{s}": ms for (b, s), ms in sorted(self.other_ms.items())}
        passes = {
            f"{key.part}_bsz{key.batch}_seq{key.seq}_tp{key.tp}": _written(times)
            for key, times in sorted(self.passes.items())
        }
        points = {
            f"{key.part}_bsz{key.batch}_seq{key.seq}_{key.axis}": {
                "forward": times.forward_ms,
                "backward": times.backward_ms,
            }
            for key, times in sorted(self.points.items())
        }
        meta = self.meta.with_extra(
            UNITS,
            passes_ms=passes,
            comm_points_ms=points,
            experts_ms={f"tp{degree}": _experts_written(times) for degree, times in sorted(self.experts.items())},
            launch_ms={} if self.launch == NOTHING else _written(self.launch),
            optimizer_ms_per_million=self.optimizer_ms_per_million,
        )
        return write_profile(Path(folder) / computation_name(self.dtype, self.hidden_size, self.heads), content, meta)

    @classmethod
    def load(
        cls,
        path: str | Path,
        dtype: str,
        hidden_size: int,
        heads: int,
        *,
        seqs: Sequence[int] = (),
        note: Note = no_note,
    ) -> ComputationProfile:
        """Read a file, whatever its name, of any version of Galvatron or its PaddleNLP port.

        `seqs`: sequence length of each layer type, for keys that tell none. `note` hears what was
        assumed, derived from raw runs or left out. Raises UserError with all that is wrong.
        """
        whole, meta = read_profile(path)
        content, beside = section(whole, "computation_profiling")
        skipped(path, beside, note)
        raw = {key: value for key, value in content.items() if _RAW.fullmatch(key)}
        derived, useless = derived_times(content)
        if derived:
            note(f"{path}: derived from raw runs: {', '.join(dict.fromkeys(map(kind_of, derived)))}")
        if useless and (derived or not any(map(_TIME.fullmatch, content))):
            note(f"{path}: left out, as more layers did not take longer or were not run: {', '.join(useless)}")
        layers, other = _read_times(path, {**content, **derived}, raw, Lengths(path, seqs, note), note)
        extra = meta.extra if meta else {}
        return cls(
            dtype,
            hidden_size,
            heads,
            layers,
            other,
            _read_passes(path, extra.get("passes_ms")),
            _read_comm_points(path, extra.get("comm_points_ms")),
            _read_times_of(path, "galvatron.launch_ms", extra["launch_ms"]) if "launch_ms" in extra else NOTHING,
            not_negative(
                path, "galvatron.optimizer_ms_per_million", extra.get("optimizer_ms_per_million", 0.0), "ms per million"
            ),
            raw,
            meta or Meta(),
            (ProfileFile.of(path),),
            _read_experts(path, extra.get("experts_ms")),
        )

    def with_assumed_head(self, model: ModelShape, note: Note = no_note) -> ComputationProfile:
        """Where nothing but layers was measured: the LM head takes what a layer (of the last type) takes for as many
        weights, since nearly all of both is matrix products."""
        if self.other_ms or any(key.part == HEAD for key in self.passes):
            return self
        share = model.embedding.parameters / model.layer_parameters
        times = self.layer_ms[max(self.layer_ms)]
        for file in self.files:
            note(
                f"{file.path}: no layertype_other; the LM head is taken to cost {share:.3g} of a layer, by its weights"
            )
        return replace(self, other_ms={shape: share * ms for shape, ms in times.items()})


def _read_times(
    path: str | Path, content: Mapping[str, Any], raw: Mapping[str, Any], lengths: Lengths, note: Note
) -> tuple[dict[int, dict[Shape, float]], dict[Shape, float]]:
    """Times of layers and of all else. Raises UserError with every fault."""
    layers: dict[int, dict[Shape, float]] = {}
    other: dict[Shape, float] = {}
    faults, strange, parts, whole = Faults(), [], set(), set()
    for key, value in content.items():
        match = _TIME.fullmatch(key)
        if match and not match[3]:
            whole.add(key)  # of no batch: below
        elif match:
            with faults.gathered():
                _add_time(path, key, match, value, lengths, layers, other)
        elif part := _PART_TIME.fullmatch(key):
            parts.add(part[part.lastindex or 0])
        elif key.startswith("layertype"):
            with faults.gathered():
                raise unknown_key(path, key, "layertype_{type|other}_bsz{samples}_seq{tokens}")
        elif key not in raw:
            strange.append(key)
    for key in sorted(whole):
        match = _TIME.fullmatch(key)
        known = match and (other if match[2] else layers.get(int(match[1])))
        if known:
            note(f"{path}: {key} left out: the file has times by batch")
        elif match:
            note(f"{path}: {key} tells no batch; a sample takes the same time in every batch")
            with faults.gathered():
                _add_time(path, key, match, content[key], lengths, layers, other)
    faults.require_none()
    if not layers and parts:
        raise UserError(
            f"{path}: holds times of {' and '.join(sorted(parts))} alone, not of whole layers; measure these with "
            "`galvatron profile computation`"
        )
    if not layers:
        wanted = "layertype_…_bsz…_seq… time" + (" and no raw runs that tell one" if raw else "")
        raise holds_no(path, wanted, content, "galvatron profile computation")
    skipped(path, [*strange, *sorted(f"…_{part}" for part in parts)], note)
    return layers, other


def _add_time(
    path: str | Path,
    key: str,
    match: re.Match[str],
    value: object,
    lengths: Lengths,
    layers: dict[int, dict[Shape, float]],
    other: dict[Shape, float],
) -> None:
    """Put one time where it belongs. All but the layers, in a file of several lengths, is told for each of them."""
    batch = whole_number(path, key, match[3]) if match[3] else 1
    seqs = lengths.of(key, match[4])
    if match[2]:
        ms = not_negative(path, key, value, "ms per sample")
        for seq in seqs:
            # Galvatron 2.0 writes one for each type, with the other types' layers in it: the least has least of them.
            other[Shape(batch, seq)] = min(ms, other.get(Shape(batch, seq), ms))
        return
    layer_type = _layer_type(path, key, match[1])
    seq = seqs[min(layer_type, len(seqs) - 1)]
    layers.setdefault(layer_type, {})[Shape(batch, seq)] = positive(path, key, value, "ms per layer per sample")


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
        batch, seq, tp = (whole_number(path, where, match[i]) for i in (2, 3, 4))
        result[PassKey(match[1], batch, seq, tp)] = _read_times_of(path, where, times)
    return result


def _read_times_of(path: str | Path, where: str, times: Mapping[str, object]) -> PassTimes:
    forward, backward = _both(path, where, times)
    recompute = not_negative(path, where, times["recompute"], "ms") if "recompute" in times else None
    told = "recompute_shares" in times
    shares = _read_shares(path, f"{where}.recompute_shares", times["recompute_shares"]) if told else {}
    return PassTimes(forward, backward, recompute, shares)


def _written(times: PassTimes) -> dict[str, Any]:
    return {
        "forward": times.forward_ms,
        "backward": times.backward_ms,
        **({} if times.recompute_ms is None else {"recompute": times.recompute_ms}),
        **({"recompute_shares": {p.words: share for p, share in times.shares.items()}} if times.shares else {}),
    }


def _read_comm_points(path: str | Path, value: object) -> dict[CommPointKey, CommPointTimes]:
    result = {}
    for key, times in objects(path, "galvatron.comm_points_ms", value) if value is not None else ():
        match = _COMM_POINTS.fullmatch(key)
        where = f"galvatron.comm_points_ms.{key}"
        if not match:
            raise unknown_key(path, where, "layertype_0_bsz{samples}_seq{tokens}_{sp|cp}")
        batch, seq = (whole_number(path, where, match[i]) for i in (2, 3))
        result[CommPointKey(match[1], batch, seq, Axis(match[4]))] = CommPointTimes(*_both(path, where, times))
    return result


def _experts_written(times: ExpertTimes) -> dict[str, Any]:
    return {
        way: dict(zip(OF_EXPERTS, each, strict=True))
        for way, each in (("forward", times.forward), ("backward", times.backward), ("launch", times.launch))
    }


def _read_experts(path: str | Path, value: object) -> dict[int, ExpertTimes]:
    result = {}
    for key, times in objects(path, "galvatron.experts_ms", value) if value is not None else ():
        where, match = f"galvatron.experts_ms.{key}", re.fullmatch(r"tp(\d+)", key)
        if not match:
            raise unknown_key(path, where, "tp{degree}")
        ways = []
        for way in ("forward", "backward", "launch"):
            [(_, told)] = objects(path, where, {way: field_of(path, where, times, way)})
            place = f"{where}.{way}"
            ways.append(
                ExpertPass(*(not_negative(path, place, field_of(path, place, told, n), "ms") for n in OF_EXPERTS))
            )
        result[whole_number(path, where, match[1])] = ExpertTimes(*ways)
    return result


def _both(path: str | Path, where: str, times: Mapping[str, object]) -> tuple[float, float]:
    forward, backward = (
        not_negative(path, where, field_of(path, where, times, name), "ms") for name in ("forward", "backward")
    )
    return forward, backward


def _read_shares(path: str | Path, where: str, value: object) -> dict[Recompute, float]:
    known = {parts.words: parts for parts in APART}
    shares = {}
    for words, share in objects(path, where, value):
        if words not in known:
            raise unknown_key(path, f"{where}.{words}", " or ".join(known))
        shares[known[words]] = not_negative(path, f"{where}.{words}", share, "of recomputing all of the layer")
    if missing := [words for words, parts in known.items() if parts not in shares]:
        raise UserError(f"{path}: {where}: {missing[0]} is missing; add it or profile again")
    return shares
