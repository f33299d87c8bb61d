"""Profile of the model's compute time: reads and writes its file. `profiles.compute_time` interpolates it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from ..base.text import Note, no_note
from ..model import APART, ModelShape, Recompute
from ..plan.mesh import Axis
from . import dialects as foreign
from .files import Meta, ProfileFile, computation_name, read_profile, write_profile
from .schema import INDEX, WHOLE, Content, Keys, NumberField, Part, Record, TableField, one_of

EMBEDDING, HEAD = "embedding", "head"


def layer_part(layer_type: int = 0) -> str:
    """Name of a layer type in keys."""
    return f"layertype_{layer_type}"


class Shape(NamedTuple):
    """Samples and tokens of a measurement."""

    batch: int  # samples
    seq: int  # sequence length


class LayerPoint(NamedTuple):
    """A layer type at a measured shape."""

    layer_type: int
    batch: int
    seq: int


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
    """Additional compute time of a rank at the communication points of a split layer."""

    forward_ms: float = 0.0
    backward_ms: float = 0.0


class ExpertPass(NamedTuple):
    """Times in ms of one pass of a layer's experts on one rank: a fixed part, one for each expert of the rank, and one
    for each row, a token that is sent to one of its experts. An expert takes at least `least_ms`, for any number of
    rows."""

    call_ms: float = 0.0
    expert_ms: float = 0.0
    row_ms: float = 0.0
    least_ms: float = 0.0

    def of(self, experts: int, rows: float) -> float:
        """The time with `experts` experts and `rows` rows on a rank."""
        return self.call_ms + max(experts * self.expert_ms + rows * self.row_ms, experts * self.least_ms)


@dataclass(frozen=True, slots=True)
class ExpertTimes:
    """Times of experts at one degree of tensor parallelism inside experts."""

    forward: ExpertPass
    backward: ExpertPass
    launch: ExpertPass  # the host's time in each pass


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Compute alone, no communication, for all samples of the key, of one layer, in ms."""

    forward_ms: float
    backward_ms: float
    recompute_ms: float | None = None  # forward inside backward; None: equal to forward
    shares: Mapping[Recompute, float] = field(default_factory=dict)  # its shares for recomputing single parts

    def launched(self, launch: PassTimes, messages_ms: float) -> PassTimes:
        """These times, and the time that a GPU waits for its host to launch a layer. Hosts run ahead, so this applies
        to all passes of a layer and its messages together: a shortfall is added where the layer is launched."""
        recompute, recompute_host = self.recompute_ms or 0.0, 0.0
        if launch.recompute_ms and recompute:
            recompute_host = launch.recompute_ms * min(recompute / self.forward_ms, 1.0)
        host_ms = launch.forward_ms + launch.backward_ms + recompute_host
        lacking = host_ms - (self.forward_ms + self.backward_ms + recompute + messages_ms)
        if lacking <= 0:
            return self
        return replace(
            self,
            forward_ms=self.forward_ms + lacking * launch.forward_ms / host_ms,
            backward_ms=self.backward_ms + lacking * launch.backward_ms / host_ms,
            recompute_ms=recompute + lacking * recompute_host / host_ms if recompute else self.recompute_ms,
        )

    def slowed(self, factor: float) -> PassTimes:
        """Each pass `factor` times as long."""
        recompute_ms = None if self.recompute_ms is None else factor * self.recompute_ms
        forward_ms, backward_ms = factor * self.forward_ms, factor * self.backward_ms
        return replace(self, forward_ms=forward_ms, backward_ms=backward_ms, recompute_ms=recompute_ms)

    def with_points(self, points: CommPointTimes) -> PassTimes:
        """Adds the work at the communication points of a shared layer; recomputing all repeats forward's."""
        recompute_ms = None if self.recompute_ms is None else self.recompute_ms + points.forward_ms
        return replace(
            self,
            forward_ms=self.forward_ms + points.forward_ms,
            backward_ms=self.backward_ms + points.backward_ms,
            recompute_ms=recompute_ms,
        )


NOTHING = PassTimes(0.0, 0.0, 0.0)

MS = NumberField("ms")
LAYER = Part(r"layertype_\d+", lambda _, text: text)
PART = Part(rf"{LAYER.pattern}|{EMBEDDING}|{HEAD}", lambda _, text: text)
SHARED_AXIS = one_of({axis.value: axis for axis in (Axis.ULYSSES, Axis.CONTEXT)})
RECOMPUTED = {parts.words: parts for parts in APART}
SHARES = TableField(
    Keys(f"{{{'|'.join(RECOMPUTED)}}}", Recompute, one_of(RECOMPUTED)),
    NumberField("of recomputing all of the layer"),
    APART,
)
BOTH = {"forward": ("forward_ms", MS), "backward": ("backward_ms", MS)}
PASS = Record(PassTimes, BOTH, {"recompute": ("recompute_ms", MS), "recompute_shares": ("shares", SHARES)})
POINT = Record(CommPointTimes, BOTH)
EXPERT_PASS = Record(
    ExpertPass, {name: (f"{name}_ms", MS) for name in ("call", "expert", "row")}, {"least": ("least_ms", MS)}
)
EXPERTS = Record(ExpertTimes, {name: (name, EXPERT_PASS) for name in ("forward", "backward", "launch")})
CONTENT = Content(
    "computation",
    {
        "layertype": (
            TableField(
                Keys("layertype_{type}_bsz{samples}_seq{tokens}", LayerPoint, INDEX, WHOLE, WHOLE),
                NumberField("ms per layer per sample", above_zero=True),
            ),
            "ms per sample: forward of one layer, tp 1",
        ),
        "layertype_other": (
            TableField(
                Keys("layertype_other_bsz{samples}_seq{tokens}", Shape, WHOLE, WHOLE), NumberField("ms per sample")
            ),
            "ms per sample: forward of all but the layers, tp 1",
        ),
    },
    {
        "passes_ms": (
            TableField(
                Keys("{layertype_0|embedding|head}_bsz{samples}_seq{tokens}_tp{degree}", PassKey, PART, *[WHOLE] * 3),
                PASS,
            ),
            "ms, all samples: forward, backward and recompute measured apart, per tp degree; `recompute_shares`: time "
            "of recomputing some parts / time of recomputing all",
        ),
        "comm_points_ms": (
            TableField(
                Keys("{layertype_0}_bsz{samples}_seq{tokens}_{sp|cp}", CommPointKey, LAYER, WHOLE, WHOLE, SHARED_AXIS),
                POINT,
            ),
            "ms, all samples: a rank's computation at the communication points of a layer (where tokens or heads are "
            "exchanged) under Ulysses (`sp`) or context parallelism (`cp`), in addition to the time of as many tokens "
            "in an unshared layer",
        ),
        "experts_ms": (
            TableField(Keys("tp{degree}", int, WHOLE), EXPERTS),
            "ms: time of a layer's experts per pass, by expert-tp degree: fixed (`call`), per local expert, per token "
            "row, and the least per expert; `launch`: of the host",
        ),
        "launch_ms": (PASS, "ms: time of the host to launch the kernels of one layer's passes, measured on GPUs"),
        "optimizer_ms_per_million": (NumberField("ms per million"), "ms per million weights of a rank: optimizer step"),
    },
    begins=("layertype",),
)


@dataclass(frozen=True)
class ComputationProfile:
    """Measured compute time of one model in one dtype."""

    dtype: str  # fp32, bf16, fp16
    hidden_size: int
    heads: int
    layer_ms: Mapping[int, Mapping[Shape, float]]  # layer type -> forward ms per layer per sample, tp 1
    other_ms: Mapping[Shape, float] = field(default_factory=dict)  # all but the layers: forward ms per sample
    passes: Mapping[PassKey, PassTimes] = field(default_factory=dict)  # finer measurements, if any
    points: Mapping[CommPointKey, CommPointTimes] = field(default_factory=dict)
    launch: PassTimes = NOTHING  # host time to launch a layer's kernels, a lower bound of its passes on a GPU
    optimizer_ms_per_million: float = 0.0  # optimizer step, ms per million parameters that a rank updates
    meta: Meta = field(default_factory=Meta)
    files: tuple[ProfileFile, ...] = field(default=(), compare=False)  # the files it was read from
    experts: Mapping[int, ExpertTimes] = field(default_factory=dict)  # keyed by the ranks that split each expert

    def save(self, folder: str | Path) -> Path:
        """Write the file atomically under its documented name; returns its path."""
        values = {
            "layertype": {
                LayerPoint(i, *at): ms for i, times in sorted(self.layer_ms.items()) for at, ms in sorted(times.items())
            },
            "layertype_other": dict(sorted(self.other_ms.items())),
            "passes_ms": dict(sorted(self.passes.items())),
            "comm_points_ms": dict(sorted(self.points.items())),
            "experts_ms": dict(sorted(self.experts.items())),
            "launch_ms": None if self.launch == NOTHING else self.launch,
            "optimizer_ms_per_million": self.optimizer_ms_per_million,
        }
        name = computation_name(self.dtype, self.hidden_size, self.heads)
        return write_profile(Path(folder) / name, CONTENT, values, self.meta)

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
        """Read a file, of any name and any version of Galvatron or its PaddleNLP port.

        `seqs`: sequence length of each layer type, for keys without one. `note` receives assumptions,
        entries derived from raw runs and omissions. Raises UserError with all that is wrong.
        """
        content, meta = read_profile(path)
        entries = foreign.times(str(path), content, seqs, note)
        read = CONTENT.read(str(path), entries, meta.extra if meta else {}, note)
        if not read["layertype"]:
            raise CONTENT.lacking(str(path), entries, "layertype_…_bsz…_seq… time")
        layers: dict[int, dict[Shape, float]] = {}
        for (layer_type, *at), ms in read["layertype"].items():
            layers.setdefault(layer_type, {})[Shape(*at)] = ms
        return cls(
            dtype,
            hidden_size,
            heads,
            layers,
            read["layertype_other"],
            read.get("passes_ms", {}),
            read.get("comm_points_ms", {}),
            read.get("launch_ms", NOTHING),
            read.get("optimizer_ms_per_million", 0.0),
            meta or Meta(),
            (ProfileFile.of(path),),
            read.get("experts_ms", {}),
        )

    def with_assumed_head(self, model: ModelShape, note: Note = no_note) -> ComputationProfile:
        """If only layers were measured, scale the LM head's time from a layer (of the last type) by weights, since
        nearly all of both is matrix products."""
        if self.other_ms or any(key.part == HEAD for key in self.passes):
            return self
        share = model.embedding.parameters / model.layer_parameters
        times = self.layer_ms[max(self.layer_ms)]
        for file in self.files:
            note(
                f"{file.path}: no layertype_other; the LM head is taken to cost {share:.3g} of a layer, by its weights"
            )
        return replace(self, other_ms={shape: share * ms for shape, ms in times.items()})
