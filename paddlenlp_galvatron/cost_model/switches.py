"""Times of handing tokens on: between layers of unlike strategies, and between stages."""

from __future__ import annotations

from ..base.units import MIB
from ..plan.comm_points import Collective
from ..plan.layout import TokenLayout, redistribution, token_layout
from ..plan.mesh import Axis, Mesh
from ..plan.strategy import Strategy
from .collectives import place_of
from .costs import StageSetting
from .module import ModulePrices, once


class SwitchPrices:
    """Times of moving the hidden states of one model."""

    def __init__(self, modules: ModulePrices, world_size: int):
        self._modules, self._world_size = modules, world_size

    def switch_ms(
        self, before: Strategy | None, after: Strategy | None, stage: StageSetting, layer_type: int
    ) -> tuple[float, float]:
        """(forward, backward) of resharding, as `CostModel.switch_cost` has it."""
        sharded = self._modules.assumed.sequence_parallel
        source, target = (token_layout(strategy, stage.stage_size, sharded) for strategy in (before, after))
        moved = stage.micro_batch, layer_type
        return self._move_ms(source, target, *moved), self._move_ms(target, source, *moved)

    def send_ms(self, stage: StageSetting, layer_type: int) -> float:
        """Sending to the next stage, as `CostModel.boundary_cost` has it."""
        tokens = self._modules.token_bytes(stage.micro_batch, layer_type)
        return self._modules.network.send_ms(stage.pipeline, tokens / stage.stage_size / MIB)

    @once
    def _move_ms(self, source: TokenLayout, target: TokenLayout, micro_batch: int, layer_type: int) -> float:
        """Resharding takes as long as an all-to-all in which all receive as much as the rank with most."""
        tokens = micro_batch * self._modules.seqs[layer_type]
        change = redistribution(source, target, tokens, micro_batch)
        if not change.most_tokens:
            return 0.0
        mesh = Mesh.of(source.size, (Axis.TENSOR, change.span))
        place = place_of((Axis.TENSOR,), mesh, self._modules.profiles.gpus_per_node, self._world_size // source.size)
        received = change.most_tokens / tokens * self._modules.token_bytes(micro_batch, layer_type) / MIB
        return self._modules.network.collective_ms(
            Collective.ALL_TO_ALL, place, received * change.span / (change.span - 1)
        )
