"""Answers `fleet.get_hybrid_communicate_group()` while a plan is trained, by Paddle's own class.

Paddle's group knows one degree of each kind for the whole model. Here each layer has a view of its own, a real
`HybridCommunicateGroup` over the plan's communicators; a question to the whole is answered where the views of all
layers agree, and refused where they do not. Axes, of which the product is the world:

    pipe      stages
    model     tensor parallel
    sep       context parallel and Ulysses
    sharding  ranks with other samples, where ZeRO shards model states over them
    data      ranks with other samples, where it does not, or the parts in which it does
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from math import gcd
from typing import Any

import paddle.distributed as dist
from paddle.distributed.communication.group import Group
from paddle.distributed.fleet.base.topology import CommunicateTopology, HybridCommunicateGroup

from ...base.errors import UserError
from ...plan import DataParallel, LayerStrategy, Plan, runs
from ...plan.mesh import OF_A_SAMPLE
from ...runtime.groups import Groups
from ...runtime.paddle_private import groups_along

DATA = ("data", "sharding")
SPLIT = ("sep", "model")
OF_THE_WORLD = {"nranks", "global"}  # words of questions whose answer is the same for all layers
DEGREE = {"world", "degree"}  # of those that ask for no ranks
WORDS = {  # of questions about an axis; others are about all axes
    "pipe": {"pipe", "stage", "pp", "p2p"},
    "data": {"data", "dp", "check"},
    "sharding": {"sharding", "check"},
    "sep": {"sep"},
    "model": {"model", "mp"},
}
Grid = tuple[tuple[str, int], ...]  # axes and their degrees, the last over neighbouring ranks


def grid_of(plan: Plan, strategy: LayerStrategy) -> Grid:
    """The grid of ranks of a layer with this strategy."""
    dp, sep = plan.dp(strategy), strategy.mesh(plan.stage_size).degree(*OF_A_SAMPLE)
    shards = strategy.shards(plan.stage_size)
    sharding = 1 if strategy.dp_type is DataParallel.DDP else shards // gcd(shards, sep)
    degrees = {"pipe": plan.pipeline, "data": dp // sharding, "sharding": sharding, "sep": sep, "model": strategy.tp}
    names = ("pipe", *DATA, *SPLIT) if strategy.consecutive else ("pipe", *SPLIT, *DATA)
    return tuple((name, degrees[name]) for name in names)


class LayerGroup(HybridCommunicateGroup):  # type: ignore[misc]
    """One layer's answers: all of Paddle's methods, of which each is true of this layer.

    A rank outside the layer's stage reports the groups that its own stage would form.
    """

    def __init__(self, grid: Grid, groups: Groups):
        """Every rank of the world makes one."""
        self._groups = groups
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Paddle warns of the collective over one stage that it makes itself
            super().__init__(CommunicateTopology(*map(list, zip(*grid, strict=True))))

    def _set_comm_group(self, parallel_method: str = "data", *_: Any, **__: Any) -> tuple[list[int], Group]:
        # Paddle's constructor sums over the stages at once.
        return self._create(self._topo.get_comm_list(parallel_method), used=parallel_method == "pipe")

    def _set_check_group(self, parallel_method: str = "data", *_: Any, **__: Any) -> tuple[list[int], Group]:
        places = range(self._topo.get_dim(parallel_method))
        return self._create([self._topo.get_axis_list(parallel_method, coordinates) for coordinates in places])

    def create_fuse_group(self, fused_strategy_list: list[str], *_: Any, **__: Any) -> tuple[list[int], Group]:
        """Every rank of the world calls this."""
        return self._create(self._topo.get_fused_ranks(fused_strategy_list))

    def _create(self, groups: Sequence[list[int]], used: bool = False) -> tuple[list[int], Group]:
        """This rank's group among those that partition the world."""
        wanted = {(tuple(sorted(ranks)), "") for ranks in groups if len(ranks) < self.nranks}
        self._groups.create(wanted, used=used)
        [members] = [ranks for ranks in groups if self.global_rank in ranks]
        if len(members) == 1:
            return members, Group(-1, -1, members)  # as Paddle makes them: no member of anything
        return members, dist.get_group(0) if len(members) == self.nranks else self._groups.get(tuple(sorted(members)))


class PlanGroup:
    """Answers as Paddle's group does where a plan's decoder layers agree. Any other question is refused in one
    sentence, on every rank."""

    def __init__(self, plan: Plan, rank: int, groups: Groups):
        """Every rank of the world makes one, with the runtime's groups."""
        more = Groups(rank, fallback=groups)
        view = cache(lambda grid: LayerGroup(grid, more))
        strategies = (*plan.layers, plan.vocab.as_layer())
        *self._layers, self._vocabulary = [view(grid_of(plan, strategy)) for strategy in strategies]

    def of_layer(self, index: int) -> LayerGroup:
        """The answers of decoder layer `index`, counted from 0 over all stages. Raises UserError."""
        if not 0 <= index < len(self._layers):
            raise UserError(f"of_layer: there is no layer {index}; the model has layers 0-{len(self._layers) - 1}")
        return self._layers[index]

    def of_vocabulary(self) -> LayerGroup:
        """The answers of embedding and LM head."""
        return self._vocabulary

    def __getattr__(self, name: str) -> Any:
        """An attribute or method of all layers. Raises UserError: it depends on the layer."""
        if name.startswith("__"):
            raise AttributeError(name)
        answer, words = getattr(self._layers[0], name), set(name.split("_"))
        axes = [axis for axis, names in WORDS.items() if words & names] or [*WORDS]
        views = self._layers[:1] if words & OF_THE_WORLD else self._layers
        places = list(runs([", ".join(_place(view, axis, not words & DEGREE) for axis in axes) for view in views]))
        if len(places) == 1:
            return answer
        question = f"{name}()" if callable(answer) else name
        different = ", ".join(
            f"{place} in " + (f"layer {at[0]}" if len(at) == 1 else f"layers {at[0]}-{at[-1]}") for at, place in places
        )
        raise UserError(
            f"hybrid communicate group: {question} depends on the layer in this plan ({different}); ask for one layer, "
            f"such as fleet.get_hybrid_communicate_group().of_layer(0).{question}"
        )


def _place(view: LayerGroup, axis: str, with_ranks: bool) -> str:
    """An axis, its degree, and its first group, which determines the others."""
    first = min(groups_along(view, axis))
    return f"{axis} {len(first)}" + f" over ranks {tuple(first)}, …" * with_ranks
