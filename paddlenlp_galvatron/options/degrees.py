"""GLOBAL mode by PaddleNLP's names: its degrees, batch of a device and accumulation, as Galvatron's options."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from ..base.errors import UserError
from ..base.limits import Samples
from .group import Options
from .uniform import Degree, UniformOptions

NONE = (None, -1, 1)  # PaddleNLP's words for no degree


class DegreeOptions(Options):
    """One strategy for all layers, as PaddleNLP's own trainer is told it."""

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
        None, description="1: no sharding; else it must be the whole data-parallel degree"
    )
    per_device_train_batch_size: Samples | None = Field(
        None, description="samples per rank in a micro-batch; sets global_train_batch_size"
    )
    gradient_accumulation_steps: Samples | None = Field(None, description="PaddleNLP's name of chunks")
    recompute: bool | None = Field(None, description="PaddleNLP's name of global_checkpoint")

    @property
    def given(self) -> list[str]:
        """Names of those that say something."""
        return [name for name, value in self.model_dump().items() if value not in (*NONE, "", False) or value is True]

    @property
    def says_degrees(self) -> bool:
        """Whether a strategy is asked for, and not just a batch."""
        batch = {"per_device_train_batch_size", "gradient_accumulation_steps"}
        return any(getattr(self, name) not in (None, -1) for name in self.model_fields_set - batch)

    def onto(self, uniform: UniformOptions, world_size: int) -> UniformOptions:
        """Galvatron's options with what these say. Raises UserError: they contradict, or the ranks do not split so."""
        tp, sep, stages = (
            1 if value in NONE else value
            for value in (self.tensor_parallel_degree, self.sep_parallel_degree, self.pipeline_parallel_degree)
        )
        if tp > 1 and sep > 1:
            raise UserError(
                f"sep_parallel_degree: {sep} beside tensor_parallel_degree {tp}: a layer is split by one of the "
                "two; set the other to 1"
            )
        said: dict[str, Any] = {}
        if tp * sep > 1:
            said["global_tp_deg"] = tp * sep
            if uniform.vocab_tp is None:
                said["vocab_tp"] = tp * sep  # there the vocabulary is split as the layers are
        if sep > 1:
            said["use_ulysses"] = True
        if stages > 1:
            said["pp_deg"] = stages
        if self.expert_parallel_degree not in NONE:
            said["global_ep_deg"] = self.expert_parallel_degree
        if self.recompute is not None:
            said["global_checkpoint"] = self.recompute
        if self.gradient_accumulation_steps:
            said["chunks"] = self.gradient_accumulation_steps
        degree = (uniform.global_tp_deg or tp * sep) * (uniform.pp_deg or stages) * max(uniform.global_cp_deg or 1, 1)
        dp, rest = divmod(world_size, degree)
        if rest:
            raise UserError(
                f"tensor_parallel_degree: the degrees multiply to {degree}, which does not divide the {world_size} "
                "ranks; choose degrees whose product does"
            )
        said |= self._sharded(dp)
        if self.per_device_train_batch_size:
            chunks = self.gradient_accumulation_steps or uniform.chunks or 1
            said["global_train_batch_size"] = self.per_device_train_batch_size * chunks * dp
        own = uniform.model_dump(exclude_none=True)
        if faults := [
            f"{name}: is {own[name]}, but PaddleNLP's options say {value}; give one of both"
            for name, value in said.items()
            if own.get(name, value) != value
        ]:
            raise UserError(faults)
        return UniformOptions.from_values(own | said)

    def _sharded(self, dp: int) -> dict[str, Any]:
        """Data parallelism of the `dp` ranks that see other samples."""
        sharing = self.sharding_parallel_degree if self.sharding else None
        sharing = dp if sharing in (None, -1) else sharing
        if sharing not in (1, dp):
            raise UserError(
                f"sharding_parallel_degree: is {sharing}, but states are sharded over all {dp} data-parallel ranks "
                f"or none; give {dp} or 1"
            )
        if self.data_parallel_degree not in (*NONE, dp, dp // sharing):
            raise UserError(
                f"data_parallel_degree: is {self.data_parallel_degree}, but the other degrees leave {dp} ranks; "
                "leave it out"
            )
        if not self.sharding or (sharing == 1 and dp > 1):
            return {}
        return (
            {"sdp": True} if self.sharding == "stage3" else {"default_dp_type": "zero2"}
        )  # with whole gradients it is ZeRO-1
