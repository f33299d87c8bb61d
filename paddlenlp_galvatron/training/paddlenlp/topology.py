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
from collections.abc import Callable, Iterator, Sequence
from math import gcd
from typing import Any

import paddle.distributed as dist
from paddle.distributed.communication.group import Group
from paddle.distributed.fleet.base.topology import CommunicateTopology, HybridCommunicateGroup

from ...base.errors import UserError
from ...plan import DataParallel, LayerStrategy, Plan
from ...plan.communicators import Ranks
from ...plan.mesh import OF_A_SAMPLE
from ...plan.strategy import runs
from ...runtime.groups import Groups
from ...runtime.paddle_private import groups_along, install_group, uninstall_group

DATA = ("data", "sharding")
SPLIT = ("sep", "model")
DEGREE = {"world", "degree"}  # words of questions whose answer is the same on every rank
WORDS = {  # of questions about an axis
    "pipe": {"pipe", "stage", "pp"},
    "data": {"data", "dp", "check"},
    "sharding": {"sharding", "check"},
    "sep": {"sep"},
    "model": {"model", "mp"},
}
FUSED = (["data", "sep"], ["pipe", "model"])  # axes that Paddle joins where there is sep


def axes_of(plan: Plan, strategy: LayerStrategy) -> CommunicateTopology:
    """The grid of ranks of a layer with this strategy, the last axis over neighbouring ranks."""
    dp, sep = plan.dp(strategy), strategy.mesh(plan.stage_size).degree(*OF_A_SAMPLE)
    shards = strategy.shards(plan.stage_size)
    sharding = 1 if strategy.dp_type is DataParallel.DDP else shards // gcd(shards, sep)
    degrees = {
        "pipe": plan.pipeline,
        "data": dp // sharding,
        "sharding": sharding,
        "sep": sep,
        "model": strategy.tp,
    }
    names = ["pipe", *DATA, *SPLIT] if strategy.consecutive else ["pipe", *SPLIT, *DATA]
    return CommunicateTopology(names, [degrees[name] for name in names])


class LayerGroup(HybridCommunicateGroup):  # type: ignore[misc]
    """One layer's answers: all of Paddle's methods, of which each is true of this layer.

    A rank outside the layer's stage reports the groups that its own stage would form.
    """

    def __init__(self, axes: CommunicateTopology, groups: Groups):
        self._groups = groups
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Paddle warns of the collective over one stage that it makes itself
            super().__init__(axes)

    def _set_comm_group(self, parallel_method: str = "data", *_: Any, **__: Any) -> tuple[list[int], Group]:
        return self._own(self._topo.get_comm_list(parallel_method))

    def _set_check_group(self, parallel_method: str = "data", *_: Any, **__: Any) -> tuple[list[int], Group]:
        return self._own(_slices(self._topo, parallel_method))

    def create_fuse_group(self, fused_strategy_list: list[str], *rest: Any, **named: Any) -> Any:
        ranks = self._topo.get_fused_ranks(fused_strategy_list)
        if fused_strategy_list in FUSED:
            return self._own(ranks)
        return super().create_fuse_group(fused_strategy_list, *rest, **named)

    def _own(self, groups: Sequence[list[int]]) -> tuple[list[int], Group]:
        """This rank's group among those that partition the world."""
        [mine] = [ranks for ranks in groups if self.global_rank in ranks]
        if len(mine) == 1:
            return mine, Group(-1, -1, mine)  # as Paddle makes them: no member of anything
        return mine, dist.get_group(0) if len(mine) == self.nranks else self._groups.get(tuple(sorted(mine)))


class PlanGroup(HybridCommunicateGroup):  # type: ignore[misc]
    """The answers in which a plan's decoder layers agree. Any other question is refused in one sentence.

    `of_layer(index)` answers for one layer, `of_vocabulary()` for embedding and LM head.
    """

    def __init__(self, plan: Plan, rank: int, groups: Groups):
        """Every rank of the world makes one, with the runtime's groups."""
        strategies = (*plan.layers, plan.vocab.as_layer())
        axes = [axes_of(plan, strategy) for strategy in strategies]
        more = Groups(rank, fallback=groups)
        more.create({(ranks, "") for each in axes for ranks in _groups_of(each)}, used=False)
        made: dict[str, LayerGroup] = {}
        for each in axes:
            if _comparable(each) not in made:
                made[_comparable(each)] = LayerGroup(each, more)
        self._galvatron_views = [made[_comparable(each)] for each in axes]

    def of_layer(self, index: int) -> LayerGroup:
        """The answers of decoder layer `index`, counted from 0 over all stages. Raises UserError."""
        layers = object.__getattribute__(self, "_galvatron_views")[:-1]
        if not 0 <= index < len(layers):
            raise UserError(f"of_layer: there is no layer {index}; the model has layers 0-{len(layers) - 1}")
        view: LayerGroup = layers[index]
        return view

    def of_vocabulary(self) -> LayerGroup:
        """The answers of embedding and LM head."""
        view: LayerGroup = object.__getattribute__(self, "_galvatron_views")[-1]
        return view

    def install(self) -> None:
        """Let fleet give this group to any caller, in place of its own."""
        install_group(self)

    @staticmethod
    def uninstall() -> None:
        """Let fleet have no group: PaddleNLP's Trainer asks for a group while it is made, which a plan may refuse."""
        uninstall_group()

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__") or name in vars(PlanGroup) or name == "_galvatron_views":
            return object.__getattribute__(self, name)
        layers = object.__getattribute__(self, "_galvatron_views")[:-1]
        if not callable(getattr(layers[0], name)):
            return _agreed(name, layers, lambda view: getattr(view, name))

        def ask(*arguments: Any, **named: Any) -> Any:
            return _agreed(f"{name}()", layers, lambda view: getattr(view, name)(*arguments, **named))

        return ask


def _agreed(question: str, layers: list[LayerGroup], ask: Callable[[LayerGroup], Any]) -> Any:
    """The answer of all layers. Raises UserError where they differ on any rank, so that all ranks go the same way; or
    Paddle's AssertionError."""
    words = set(question.rstrip("()").split("_"))
    axes = [] if words & DEGREE else [axis for axis, names in WORDS.items() if words & names]
    views = dict.fromkeys(layers)
    answers = {layers[0]: _answer(ask, layers[0])} if axes else {view: _answer(ask, view) for view in views}
    keys = {view: tuple(_placement(view, axis) for axis in axes) or _comparable(answers[view]) for view in views}
    found = list(runs([keys[view] for view in layers]))
    if len(found) == 1 and isinstance(answers[layers[0]], AssertionError):
        raise answers[layers[0]]
    if len(found) == 1:
        return answers[layers[0]]
    named = ", ".join(f"{key if isinstance(key, str) else _names(key)} in {_layers(which)}" for which, key in found)
    raise UserError(
        f"hybrid communicate group: {question} depends on the layer in this plan ({named}); ask for one layer, such as "
        f"fleet.get_hybrid_communicate_group().of_layer(0).{question}"
    )


def _placement(view: LayerGroup, axis: str) -> tuple[str, tuple[Ranks, ...]]:
    """An axis and its groups of the whole world."""
    return axis, tuple(sorted(tuple(sorted(ranks)) for ranks in groups_along(view, axis)))


def _names(placed: Sequence[tuple[str, tuple[Ranks, ...]]]) -> str:
    return ", ".join(f"{axis} {len(groups[0])} over ranks {groups[0]}, …" for axis, groups in placed)


def _answer(ask: Callable[[LayerGroup], Any], view: LayerGroup) -> Any:
    """The answer of Paddle's method; its AssertionError is an answer, too."""
    try:
        return ask(view)
    except AssertionError as error:
        return error


def _layers(layers: range) -> str:
    return f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}-{layers[-1]}"


def _comparable(answer: Any) -> str:
    """An answer in words: equal where the answers are."""
    if isinstance(answer, Group):
        return f"ranks {answer.ranks}"
    if isinstance(answer, CommunicateTopology):
        degrees = ((name, answer.get_dim(name)) for name in answer.get_hybrid_group_names())
        return " x ".join(f"{name} {degree}" for name, degree in degrees)
    if isinstance(answer, tuple | list):
        return f"({', '.join(map(_comparable, answer))})"
    return str(answer)


def _slices(axes: CommunicateTopology, axis: str) -> list[list[int]]:
    """The ranks at each place of an axis."""
    return [axes.get_axis_list(axis, index) for index in range(axes.get_dim(axis))]


def _groups_of(axes: CommunicateTopology) -> Iterator[Ranks]:
    """Every group that Paddle's class has of these axes, but that of the world."""
    wanted = [ranks for axis in axes.get_hybrid_group_names() for ranks in axes.get_comm_list(axis)]
    wanted += [ranks for axis in DATA for ranks in _slices(axes, axis)]
    if axes.get_dim("sep") > 1:
        wanted += [ranks for fused in FUSED for ranks in axes.get_fused_ranks(fused)]
    return (tuple(sorted(ranks)) for ranks in wanted if len(ranks) < axes.world_size())
