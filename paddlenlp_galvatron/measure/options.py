"""The options of the profilers, and the shapes and degrees of a model to measure. Needs no Paddle."""

import os
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from ..base.errors import UserError
from ..base.limits import Number, Port, Positive, Rank, Ranks, Samples, Size
from ..launch.nodes import FIELDS, environment_nodes
from ..model import kinds_of
from ..options.group import Options, Sizes
from ..options.model_options import SEQ, ModelOptions
from ..plan import Assumptions, LayerStrategy, ModelShape, Plan, Precision, VocabStrategy, require_valid
from ..profiles import Collective, Shape

MOST_TURNS = 1000
MOST_POINTS = 1000  # batch sizes or lengths of a profile
LATENCY_MIB = (1 / 64, 1 / 16, 1 / 4)  # messages that are measured for their latency


def thinned(sizes: Sequence[float], step: float) -> list[float]:
    """Returns the first and last of rising sizes, and between them sizes at least `step` times the previous."""
    kept = list(sizes[:1])
    for size in sizes[1:-1]:
        if size >= step * kept[-1] and size * step <= sizes[-1]:
            kept.append(size)
    return [*kept, *sizes[1:][-1:]]


def _words(value: Any) -> Any:
    return value.split() if isinstance(value, str) else value


def _from_environment(value: Any) -> Any:
    """Expand variables: Galvatron's scripts pass names such as $MASTER_ADDR, which each node looks up."""
    return os.environ.get(value[1:].strip("{}")) if isinstance(value, str) and value.startswith("$") else value


class ProfileRunOptions(Options):
    """Options of every profile."""

    output: Path = Path("configs")
    num_nodes: Ranks = 1
    num_gpus_per_node: Ranks | None = None
    nproc: Ranks | None = None
    node_rank: Annotated[Rank, BeforeValidator(lambda value: _from_environment(value) or 0)] = 0
    master_addr: Annotated[str | None, BeforeValidator(_from_environment)] = None
    master_port: Annotated[Port | None, BeforeValidator(_from_environment)] = None
    hostfile: Path | None = None
    launch: str | None = None
    time_budget_s: Positive | None = None
    adaptive: bool = True
    turns: int | None = Field(None, ge=1, le=MOST_TURNS)
    fresh: bool = False
    budget_ms: Number = 150
    mixed_precision: Precision | None = None
    bf16: bool = False
    fp16: bool = False
    analytic: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _nodes_of_the_launcher(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Reads the nodes from environment variables where options do not give them."""
        if {"hostfile", "launch", "analytic"} & values.keys():
            return values
        return environment_nodes(options={name: _from_environment(values.get(name)) for name in FIELDS}) | values

    @model_validator(mode="after")
    def _one_precision(self) -> Self:
        if len(self._precisions) > 1:
            raise ValueError("bf16, fp16, mixed_precision: contradict each other; give one")
        return self

    @property
    def _precisions(self) -> set[Precision]:
        switches = {"bf16": self.bf16, "fp16": self.fp16, str(self.mixed_precision): bool(self.mixed_precision)}
        return {Precision(name) for name, holds in switches.items() if holds}

    @property
    def precision(self) -> Precision:
        return next(iter(self._precisions), None) or (Precision.BF16 if self.analytic else Precision.FP32)

    def for_device(self, on_gpus: bool) -> Self:
        """The options with the device's settings: GPUs are measured in the dtype of training."""
        if self._precisions or self.analytic or not on_gpus:
            return self
        return self.model_copy(update={"mixed_precision": Precision.BF16})

    @property
    def ranks_per_node(self) -> int:
        return self.nproc or self.num_gpus_per_node or 1

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.ranks_per_node


class HardwarePart(StrEnum):
    """The subject of one of Galvatron's five hardware scripts."""

    ALL_REDUCE = "allreduce"  # bandwidth of every kind of group
    P2P = "p2p"  # bandwidth between pipeline stages
    ALL_REDUCE_SP = "allreduce_sp"  # times by message size; of all-gather and reduce-scatter too
    ALL_TO_ALL = "all2all"  # times by message size
    OVERLAP = "overlap"  # the overlap coefficient


KINDS: dict[HardwarePart, tuple[Collective, ...]] = {
    HardwarePart.ALL_REDUCE: (Collective.ALL_REDUCE,),
    HardwarePart.P2P: (Collective.SEND,),
    HardwarePart.ALL_REDUCE_SP: (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER),
    HardwarePart.ALL_TO_ALL: (Collective.ALL_TO_ALL,),
    HardwarePart.OVERLAP: (),
}


class HardwareOptions(ProfileRunOptions):
    """Options of a hardware profile."""

    parts: tuple[HardwarePart, ...] = tuple(HardwarePart)
    start_mb: Positive = 1
    end_mb: Positive = 1024
    scale: int = Field(2, ge=2, le=1024)
    max_tp_deg: Ranks | None = None
    max_pp_deg: Ranks | None = None
    link_gb_per_s: Positive | None = None
    envs: Annotated[tuple[str, ...], BeforeValidator(_words)] = ()

    @field_validator("parts", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return value.replace(" ", "").split(",") if isinstance(value, str) else value

    @field_validator("envs")
    @classmethod
    def _pairs(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pair in value:
            if not pair.partition("=")[0] or "=" not in pair:
                raise ValueError(f"{pair!r} is no variable; give NAME=VALUE")
        return value

    @model_validator(mode="after")
    def _rising(self) -> Self:
        if self.end_mb < self.start_mb:
            raise ValueError(f"end_mb: {self.end_mb:g} is below start_mb {self.start_mb:g}")
        return self

    @property
    def sizes_mib(self) -> list[float]:
        """Message sizes, rising."""
        sizes = [self.start_mb]
        while sizes[-1] * self.scale <= self.end_mb:
            sizes.append(sizes[-1] * self.scale)
        return [size for size in LATENCY_MIB if size < self.start_mb] + sizes


class ProfileMode(StrEnum):
    """The varied size."""

    STATIC = "static"  # nothing: profile_batch_size samples of each length of profile_seq_length_list
    BATCH = "batch"  # the batch size, at each length of profile_seq_length_list
    SEQUENCE = "sequence"  # the length, at profile_batch_size samples


class PointOptions(ProfileRunOptions):
    """Options of a model's profile."""

    profile_mode: ProfileMode = ProfileMode.STATIC
    profile_batch_size: Samples = 1
    profile_min_batch_size: Samples = 1
    profile_max_batch_size: Samples = 8
    profile_batch_size_step: Samples = 1
    profile_seq_length_list: Sizes | None = None
    profile_min_seq_length: Size = 512
    profile_max_seq_length: Size = 2048
    profile_seq_length_step: Size = 512
    profile_for: Literal["galvatron"] | None = None
    max_tp_deg: Ranks = 8
    sequence_parallel: bool = False
    use_flash_attention: bool | None = None

    @model_validator(mode="after")
    def _agreed(self) -> Self:
        if self.profile_for and self.time_budget_s is not None:
            raise ValueError("time_budget_s: leaves sizes out, and profile_for galvatron wants every one")
        return self

    @property
    def every_size(self) -> bool:
        """Whether to measure every size, also sizes that could be interpolated."""
        return self.profile_for is not None or not self.adaptive

    @property
    def batch_sizes(self) -> list[int]:
        """Numbers of samples. Raises UserError."""
        if self.profile_mode is not ProfileMode.BATCH:
            return [self.profile_batch_size]
        return _steps(
            "batch_size", self.profile_min_batch_size, self.profile_max_batch_size, self.profile_batch_size_step
        )

    def lengths(self, default: int) -> list[int]:
        """Sequence lengths, `default` where none is given. Raises UserError."""
        if self.profile_mode is ProfileMode.SEQUENCE:
            limits = self.profile_min_seq_length, self.profile_max_seq_length, self.profile_seq_length_step
            return _steps("seq_length", *limits)
        return sorted(set(self.profile_seq_length_list or [default]))


def _steps(name: str, first: int, last: int, step: int) -> list[int]:
    if last < first:
        raise UserError(f"profile_max_{name}: {last} is below profile_min_{name} {first}")
    if (last - first) // step >= MOST_POINTS:
        raise UserError(f"profile_{name}_step: {step} makes more than {MOST_POINTS} points; take a wider step")
    return list(range(first, last + 1, step))


class ModelRun(BaseModel):
    """The model to measure, sent to the ranks as JSON."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    options: PointOptions
    shapes: tuple[ModelShape, ...]  # one a layer type
    points: tuple[Shape, ...]
    degrees: tuple[int, ...]  # degrees of tensor parallelism
    computation: bool = True
    memory: bool = True


def measured_model(options: PointOptions, model: ModelOptions) -> tuple[tuple[ModelShape, ...], list[Shape]]:
    """The shape of each kind of layer, and every (samples, sequence length) to measure. Raises UserError."""
    own_lengths = model.seq_length or model.seqlen_list or model.set_seqlen_manually is not None
    resolved = model.model_copy(update={} if own_lengths else {"set_seqlen_manually": False}).resolve()
    shape = resolved.shapes[0].trained()
    if len(resolved.shapes) > 1 and any(each.experts for each in resolved.shapes):
        raise UserError(
            f"model_size: {shape.name} has experts; several types of layers are not planned for such models"
        )
    lengths = options.lengths(resolved.seq_length if own_lengths else min(resolved.seq_length, SEQ))
    if max(lengths) > shape.max_position_embeddings:
        raise UserError(
            f"profile_seq_length_list: {max(lengths)} tokens are beyond the {shape.max_position_embeddings} positions "
            f"of {shape.name}; measure shorter samples"
        )
    return kinds_of(resolved.shapes), [Shape(batch, seq) for seq in lengths for batch in options.batch_sizes]


def runnable_degrees(shape: ModelShape, world_size: int, largest: int, lengths: Sequence[int]) -> list[int]:
    """Tensor-parallel degrees up to `largest` that divide the world and the model.

    A single process stands for a rank of any world, so then degrees divide `largest`.
    """
    world_size = largest if world_size == 1 else world_size
    return [
        degree
        for degree in range(1, min(world_size, largest) + 1)
        if world_size % degree == 0 and all(_is_runnable(shape, degree, length) for length in lengths)
    ]


def _is_runnable(shape: ModelShape, degree: int, seq_length: int) -> bool:
    layers, stricter = (LayerStrategy(degree),) * shape.layers, Assumptions(True, seq_length=seq_length)
    plan = Plan(degree, 1, 1, (shape.layers,), layers, VocabStrategy(degree), assumed=stricter)
    try:
        require_valid(plan, shape)
    except UserError:
        if degree == 1:
            raise  # a model that cannot run at all: say why
        return False
    return True
