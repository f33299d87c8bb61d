"""GLOBAL mode: one strategy for all layers, from Galvatron's or PaddleNLP's training options."""

from collections.abc import Collection
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from ..base.errors import UserError, member
from ..base.limits import MOST_RANKS, Layers, Ranks, Samples
from ..plan import Assumptions, DataParallel, LayerStrategy, Plan, Recompute, Schedule, VocabStrategy, require_valid
from ..plan.strategy import sharded_over_all
from ..plan.uniform import even_stages
from .group import Options

NONE = (None, -1, 1)  # PaddleNLP's words for no degree


def _degree(value: int) -> int:
    if value == -1 or 0 < value <= MOST_RANKS:
        return value
    raise ValueError(f"must be a number from 1 to {MOST_RANKS}, or -1 for none")


def _granularity(value: str) -> str:
    if value == "full":
        return value
    raise ValueError("must be full: one strategy recomputes whole layers; a plan file's recompute_enc names parts")


Degree = Annotated[int, AfterValidator(_degree)]
Granularity = Annotated[str, AfterValidator(_granularity)]


class UniformOptions(Options):
    """GLOBAL mode: one strategy for all layers. Unset, degrees are 1 and switches off, but for
    ranks of tp being neighbours."""

    panel = "One strategy for all layers"

    pp_deg: Ranks | None = None
    global_tp_deg: Ranks | None = None
    global_tp_consec: bool | None = None
    sdp: bool | None = None
    default_dp_type: str | None = None
    global_train_batch_size: Samples | None = None
    chunks: Samples | None = None
    global_checkpoint: bool | None = None
    pipeline_type: str | None = None
    vocab_tp: Ranks | None = None
    embed_sdp: bool | None = None
    use_ulysses: bool | None = None
    global_ep_deg: Degree | None = None
    global_tp_of_ep_deg: Degree | None = None
    global_cp_deg: Degree | None = None
    global_sharding_deg: Degree | None = None
    virtual_pp_deg: Degree | None = None
    num_layers_per_virtual_pipeline_stage: Layers | None = None

    @property
    def given(self) -> list[str]:
        """Names of the options that are set. Stock files set one chunk a stage with any strategy."""
        idle = {"global_cp_deg", "global_sharding_deg", "virtual_pp_deg"}
        named = self.model_dump(exclude_unset=True, exclude_none=True)
        return [name for name, value in named.items() if name not in idle or value not in (-1, 1)]

    def plan(
        self, layers: int, world_size: int, assumed: Assumptions = Assumptions(), dense_layers: Collection[int] = ()
    ) -> Plan:
        """The plan that the options stand for. `dense_layers` have no experts to share out or to split. Raises
        UserError."""
        if self.global_train_batch_size is None:
            raise UserError("global_train_batch_size: missing; say how many samples an optimizer step takes")
        degrees = (self.pp_deg, self.global_tp_deg, self.global_cp_deg, self.vocab_tp)
        stages, tp, cp, vocab_tp = (max(1, degree or 1) for degree in degrees)
        chunks, sharding = (None if value == -1 else value for value in (self.virtual_pp_deg, self.global_sharding_deg))
        if size := self.num_layers_per_virtual_pipeline_stage:
            count, rest = divmod(layers, stages * size)
            if rest or chunks not in (None, count):
                raise UserError(
                    f"num_layers_per_virtual_pipeline_stage: chunks of {size} do not make up the {layers} layers in "
                    f"{stages} stages of {chunks or 'equally many'} chunks; change one of them"
                )
            chunks = count
        chunks = chunks or 1
        if (parts := stages * chunks) > layers:
            name, words = ("pp_deg", "stages") if stages > layers else ("virtual_pp_deg", "chunks of stages")
            raise UserError(f"{name}: {parts} {words} are more than the {layers} layers; choose at most {layers}")
        ulysses, zero3 = bool(self.use_ulysses), DataParallel.ZERO3
        default = member(DataParallel, self.default_dp_type or "ddp", "default_dp_type")
        sdp = bool(self.sdp)
        vocab_sdp = sdp if self.embed_sdp is None else self.embed_sdp
        layer = LayerStrategy(
            *(tp, ulysses, self.global_tp_consec is not False, zero3 if sdp else default),
            recompute=Recompute(bool(self.global_checkpoint)),
            context=cp,
            sharding=sharding,
        )
        sparse = replace(layer, ep=max(1, self.global_ep_deg or 1), etp=max(1, self.global_tp_of_ep_deg or 1))
        plan = Plan(
            world_size=world_size,
            global_batch=self.global_train_batch_size,
            micro_batches=self.chunks or 1,
            stages=even_stages(layers, parts),
            layers=tuple(layer if index in dense_layers else sparse for index in range(layers)),
            vocab=VocabStrategy(vocab_tp, ulysses, zero3 if vocab_sdp else default, sharding, context=cp),
            schedule=member(Schedule, self.pipeline_type or "pipedream_flush", "pipeline_type"),
            chunks=chunks,
            default_dp_type=default,
            assumed=assumed,
        )
        plan = sharded_over_all(plan)
        require_valid(plan)
        return plan


def uniform_plan(
    layers: int,
    world_size: int,
    assumed: Assumptions = Assumptions(),
    dense_layers: Collection[int] = (),
    **options: Any,
) -> Plan:
    """The plan of `UniformOptions`, by their names. Raises UserError."""
    return UniformOptions.from_mapping(options).plan(layers, world_size, assumed, dense_layers)


class DegreeOptions(Options):
    """One strategy for all layers, as PaddleNLP's own trainer takes it."""

    panel = "One strategy, as PaddleNLP says it"

    tensor_parallel_degree: Degree | None = None
    sep_parallel_degree: Degree | None = None
    pipeline_parallel_degree: Degree | None = None
    data_parallel_degree: Degree | None = None
    expert_parallel_degree: Degree | None = None
    sharding: Literal["", "stage1", "stage2", "stage3"] | None = None
    sharding_parallel_degree: Degree | None = None
    per_device_train_batch_size: Samples | None = None
    gradient_accumulation_steps: Samples | None = None
    recompute: bool | None = None
    recompute_granularity: Granularity | None = None

    @property
    def given(self) -> list[str]:
        """Names of the options that are set."""
        return [name for name, value in self.model_dump().items() if value not in (*NONE, "", False) or value is True]

    @property
    def recomputes(self) -> bool | None:
        """Whether layers recompute, by both options; None: neither is set. PaddleNLP's files have a granularity with
        recompute false; Megatron-LM has no `recompute`, so there the granularity turns it on."""
        return True if self.recompute is None and self.recompute_granularity else self.recompute

    @property
    def says_degrees(self) -> bool:
        """Whether a strategy is requested, and not just a batch."""
        batch = {"per_device_train_batch_size", "gradient_accumulation_steps"}
        return any(getattr(self, name) not in (None, -1) for name in self.model_fields_set - batch)

    def onto(self, uniform: UniformOptions, world_size: int) -> UniformOptions:
        """Galvatron's options from these. Raises UserError if they contradict each other or the ranks."""
        tp, sep, stages = (
            1 if value in NONE else value
            for value in (self.tensor_parallel_degree, self.sep_parallel_degree, self.pipeline_parallel_degree)
        )
        if tp > 1 and sep > 1:
            raise UserError(
                f"sep_parallel_degree: {sep} with tensor_parallel_degree {tp}: a layer is split by one of the "
                "two; set the other to 1"
            )
        named: dict[str, Any] = {}
        if tp * sep > 1:
            named["global_tp_deg"] = tp * sep
            if uniform.vocab_tp is None:
                named["vocab_tp"] = tp * sep  # there the vocabulary is split as the layers are
        if sep > 1:
            named["use_ulysses"] = True
        if stages > 1:
            named["pp_deg"] = stages
        if self.expert_parallel_degree not in NONE:
            named["global_ep_deg"] = self.expert_parallel_degree
        if self.recomputes is not None:
            named["global_checkpoint"] = self.recomputes
        if self.gradient_accumulation_steps:
            named["chunks"] = self.gradient_accumulation_steps
        degree = (uniform.global_tp_deg or tp * sep) * (uniform.pp_deg or stages) * max(uniform.global_cp_deg or 1, 1)
        dp, rest = divmod(world_size, degree)
        if rest:
            raise UserError(
                f"tensor_parallel_degree: the degrees multiply to {degree}, which does not divide the {world_size} "
                "ranks; choose degrees whose product does"
            )
        named |= self._sharded(dp)
        if self.per_device_train_batch_size:
            named |= self._batch(uniform, dp)
        degrees = uniform.model_dump(exclude_none=True)
        if faults := [
            f"{name}: is {degrees[name]}, but PaddleNLP's options say {value}; give one of both"
            for name, value in named.items()
            if degrees.get(name, value) != value
        ]:
            raise UserError(faults)
        return UniformOptions.from_values(degrees | named)

    def _batch(self, uniform: UniformOptions, dp: int) -> dict[str, int]:
        """The global batch from the micro-batches, or the micro-batches from the global batch, as in Megatron-LM."""
        assert self.per_device_train_batch_size
        chunks, samples = self.gradient_accumulation_steps or uniform.chunks, self.per_device_train_batch_size * dp
        if chunks is None and uniform.global_train_batch_size:
            chunks, rest = divmod(uniform.global_train_batch_size, samples)
            if rest:
                raise UserError(
                    f"global_train_batch_size: {uniform.global_train_batch_size} samples are no multiple of a "
                    f"micro-batch's {samples}, {self.per_device_train_batch_size} on each of {dp} data-parallel ranks; "
                    "change one of them"
                )
            return {"chunks": chunks}
        return {"global_train_batch_size": samples * (chunks or 1)}

    def _sharded(self, dp: int) -> dict[str, Any]:
        """Kind of data parallelism of the `dp` ranks with different samples."""
        if not self.sharding and self.sharding_parallel_degree not in NONE:
            raise UserError("sharding_parallel_degree: needs a stage; name one: sharding stage2")
        sharing = self.sharding_parallel_degree if self.sharding else None
        sharing = dp if sharing in (None, -1) else sharing
        if dp % sharing:
            raise UserError(
                f"sharding_parallel_degree: {sharing} does not divide the {dp} data-parallel ranks; choose a divisor"
            )
        if self.data_parallel_degree not in (*NONE, dp, dp // sharing):
            raise UserError(
                f"data_parallel_degree: is {self.data_parallel_degree}, but the other degrees leave {dp} ranks; "
                "leave it out"
            )
        if not self.sharding or (sharing == 1 and dp > 1):
            return {}
        sharded = {"global_sharding_deg": sharing} if sharing < dp else {}
        stage = {"sdp": True} if self.sharding == "stage3" else {"default_dp_type": "zero2"}
        return stage | sharded  # whole gradients make it ZeRO-1
