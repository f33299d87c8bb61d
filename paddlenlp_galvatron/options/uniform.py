"""GLOBAL mode, one strategy for all layers, by Galvatron's training options and by PaddleNLP's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from ..base.errors import UserError
from ..base.limits import MOST_RANKS, Layers, Ranks, Samples
from ..model import ModelShape
from ..plan.strategy import Assumptions, Plan
from ..plan.uniform import uniform_plan
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
    """GLOBAL mode: one strategy for all layers. Unset options have `uniform_plan`'s defaults."""

    panel = "One strategy for all layers"

    pp_deg: Ranks | None = Field(None, description="number of pipeline stages")
    global_tp_deg: Ranks | None = Field(None, description="tensor-parallel degree of all layers")
    global_tp_consec: bool | None = Field(
        None, description="1: a tensor-parallel group consists of neighbouring ranks; 0: of strided ranks"
    )
    sdp: bool | None = Field(None, description="1: zero3 instead of default_dp_type")
    default_dp_type: str | None = Field(None, description="ddp, zero2 or zero3")
    global_train_batch_size: Samples | None = Field(None, description="samples of an optimizer step, over all ranks")
    chunks: Samples | None = Field(None, description="number of micro-batches")
    global_checkpoint: bool | None = Field(None, description="1: recompute activations of all layers")
    pipeline_type: str | None = Field(None, description="pipedream_flush (1F1B) or gpipe")
    vocab_tp: Ranks | None = Field(None, description="tensor-parallel degree of embedding and LM head")
    embed_sdp: bool | None = Field(
        None, description="1: zero3 for embedding and LM head; 0: default_dp_type; unset: as sdp"
    )
    use_ulysses: bool | None = Field(None, description="1: the degrees split the sequence instead of the weights")
    global_ep_deg: Degree | None = Field(None, description="ranks that share a layer's experts out among them")
    global_tp_of_ep_deg: Degree | None = Field(None, description="ranks that split each expert")
    global_cp_deg: Degree | None = Field(None, description="ranks that share a sample's tokens, vocabulary layers too")
    global_sharding_deg: Degree | None = Field(
        None, description="ranks over which ZeRO shards; unset: all that have the same weights"
    )
    virtual_pp_deg: Degree | None = Field(None, description="chunks of layers a stage has: interleaved 1F1B")
    num_layers_per_virtual_pipeline_stage: Layers | None = Field(
        None, description="layers of a chunk, as in Megatron-LM; sets virtual_pp_deg"
    )

    @property
    def given(self) -> list[str]:
        """Names of those that say something. Stock files have one chunk a stage with any strategy."""
        idle = {"global_cp_deg", "global_sharding_deg", "virtual_pp_deg"}
        named = self.model_dump(exclude_unset=True, exclude_none=True)
        return [name for name, value in named.items() if name not in idle or value not in (-1, 1)]

    def plan(self, shape: ModelShape, world_size: int, assumed: Assumptions) -> Plan:
        """The plan that the options stand for, for a model of this shape. Raises UserError."""
        given = {name: value for name, value in self.model_dump(exclude_none=True).items() if value != -1}
        if "global_train_batch_size" not in given:
            raise UserError("global_train_batch_size: missing; say how many samples an optimizer step takes")
        layers, dense = shape.layers, shape.dense_layers
        if size := given.pop("num_layers_per_virtual_pipeline_stage", None):
            stages = given.get("pp_deg", 1)
            chunks, rest = divmod(layers, stages * size)
            if rest or given.setdefault("virtual_pp_deg", chunks) != chunks:
                raise UserError(
                    f"num_layers_per_virtual_pipeline_stage: chunks of {size} do not make up the {layers} layers in "
                    f"{stages} stages of {given.get('virtual_pp_deg', 'equally many')} chunks; change one of them"
                )
        return uniform_plan(layers=layers, dense_layers=dense, world_size=world_size, assumed=assumed, **given)


class DegreeOptions(Options):
    """One strategy for all layers, as PaddleNLP's own trainer takes it."""

    panel = "One strategy, as PaddleNLP says it"

    tensor_parallel_degree: Degree | None = Field(
        None, description="PaddleNLP's name of global_tp_deg; also sets vocab_tp"
    )
    sep_parallel_degree: Degree | None = Field(None, description="PaddleNLP's name of global_tp_deg with use_ulysses")
    pipeline_parallel_degree: Degree | None = Field(None, description="PaddleNLP's name of pp_deg")
    data_parallel_degree: Degree | None = Field(
        None,
        description="not needed; must be 1, or the ranks divided by the other degrees",
    )
    expert_parallel_degree: Degree | None = Field(None, description="PaddleNLP's name of global_ep_deg")
    sharding: Literal["", "stage1", "stage2", "stage3"] | None = Field(
        None, description="stage1, stage2: default_dp_type zero2; stage3: sdp"
    )
    sharding_parallel_degree: Degree | None = Field(
        None, description="PaddleNLP's name of global_sharding_deg; 1: no sharding"
    )
    per_device_train_batch_size: Samples | None = Field(
        None, description="samples per rank in a micro-batch; sets global_train_batch_size"
    )
    gradient_accumulation_steps: Samples | None = Field(None, description="PaddleNLP's name of chunks")
    recompute: bool | None = Field(None, description="PaddleNLP's name of global_checkpoint")
    recompute_granularity: Granularity | None = Field(
        None, description="full: whole layers; without recompute it switches recompute on, as in Megatron-LM"
    )

    @property
    def given(self) -> list[str]:
        """Names of those that say something."""
        return [name for name, value in self.model_dump().items() if value not in (*NONE, "", False) or value is True]

    @property
    def recomputes(self) -> bool | None:
        """Whether layers recompute, by both options; None: neither says. PaddleNLP's files have a granularity with
        recompute false; in Megatron-LM, which has no recompute, the granularity switches it on."""
        return True if self.recompute is None and self.recompute_granularity else self.recompute

    @property
    def says_degrees(self) -> bool:
        """Whether a strategy is requested, and not just a batch."""
        batch = {"per_device_train_batch_size", "gradient_accumulation_steps"}
        return any(getattr(self, name) not in (None, -1) for name in self.model_fields_set - batch)

    def onto(self, uniform: UniformOptions, world_size: int) -> UniformOptions:
        """Galvatron's options from these. Raises UserError: they contradict, or the ranks do not split so."""
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
        own = uniform.model_dump(exclude_none=True)
        if faults := [
            f"{name}: is {own[name]}, but PaddleNLP's options say {value}; give one of both"
            for name, value in named.items()
            if own.get(name, value) != value
        ]:
            raise UserError(faults)
        return UniformOptions.from_values(own | named)

    def _batch(self, uniform: UniformOptions, dp: int) -> dict[str, int]:
        """The global batch by the micro-batches, or, as Megatron-LM has it, these by the global batch."""
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
        """Data parallelism of the `dp` ranks that see other samples."""
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
        part = {"global_sharding_deg": sharing} if sharing < dp else {}
        stage = {"sdp": True} if self.sharding == "stage3" else {"default_dp_type": "zero2"}
        return stage | part  # with whole gradients it is ZeRO-1
