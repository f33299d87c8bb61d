"""GLOBAL mode by Galvatron's training options."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from ..base.errors import UserError
from ..base.limits import MOST_RANKS, Ranks, Samples
from ..plan.strategy import Assumptions, Plan
from ..plan.uniform import uniform_plan
from .group import Options


def _degree(value: int) -> int:
    if value == -1 or 0 < value <= MOST_RANKS:
        return value
    raise ValueError(f"must be a number from 1 to {MOST_RANKS}, or -1 for none")


Degree = Annotated[int, AfterValidator(_degree)]


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
    virtual_pp_deg: Degree | None = Field(None, description="chunks of layers a stage has: interleaved 1F1B")

    @property
    def given(self) -> list[str]:
        """Names of those that say something. Stock files have one chunk a stage beside any strategy."""
        idle = {"global_cp_deg", "virtual_pp_deg"}
        said = self.model_dump(exclude_unset=True, exclude_none=True)
        return [name for name, value in said.items() if name not in idle or value not in (-1, 1)]

    def plan(self, layers: int, world_size: int, assumed: Assumptions) -> Plan:
        """The plan that the options stand for. Raises UserError."""
        given = {name: value for name, value in self.model_dump(exclude_none=True).items() if value != -1}
        if "global_train_batch_size" not in given:
            raise UserError("global_train_batch_size: missing; say how many samples an optimizer step takes")
        return uniform_plan(layers=layers, world_size=world_size, assumed=assumed, **given)
