"""From the cost model to the arrays that the C++ core searches, for one family of plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import galvatron_dp_core
import numpy as np
from numpy.typing import NDArray

from ..cost_model import CostModel, LayerCost
from ..plan import LayerStrategy, Plan, UserError, VocabStrategy
from ..plan.layout import TokenLayout, token_layout
from ..plan.schedule import arrays, chunks_in_flight
from ..plan.strategy import Strategy
from ..profiles.memory import Role
from .space import PlanFamily, price_numbers

MOST_LAYOUTS = 64  # the core's sets of them are bits of a word
NUMBERS = 9  # of a price


@dataclass(frozen=True)
class Tables:
    """A family's search problem: the core's object, and what its numbers stand for."""

    family: PlanFamily
    strategies: Sequence[LayerStrategy]  # of all layer types, one type after the other
    vocabularies: Sequence[VocabStrategy]
    core: Core

    def plan(self, vocab: int, division: Sequence[int], choice: Sequence[int], bare: Plan) -> Plan:
        """The plan that numbers of the core stand for; `bare` gives what is the same for all plans of a search."""
        return replace(
            bare,
            global_batch=self.family.global_batch,
            micro_batches=self.family.micro_batches,
            stages=tuple(division),
            layers=tuple(self.strategies[k] for k in choice),
            vocab=self.vocabularies[vocab],
            schedule=self.family.schedule,
            chunks=self.family.chunks,
        )


@dataclass(frozen=True, eq=False)
class Choices:
    """The strategies of a family's plans. Families share them, so each is only equal to itself."""

    layers: Sequence[Sequence[LayerStrategy]]  # of each layer type
    vocabularies: Sequence[VocabStrategy]

    def have(self, plan: Plan, layer_types: Sequence[int]) -> bool:
        """Whether a plan's strategies are among them."""
        used = set(zip(plan.layers, layer_types, strict=True))
        return plan.vocab in self.vocabularies and all(layer in self.layers[kind] for layer, kind in used)


Priced = dict[str, Any]  # arguments of the core
Core = galvatron_dp_core.Pipeline


def priced_layers(family: PlanFamily, choices: Choices, cost: CostModel) -> Priced:
    """The prices of layers, and nothing for all else; schedule and chunks change none. Raises UserError where a profile
    lacks what a strategy needs."""
    prices = [_prices(some, kind, family, cost) for kind, some in enumerate(choices.layers)]
    return _alone([list(map(price_numbers, some)) for some in prices])


def priced(family: PlanFamily, choices: Choices, cost: CostModel) -> Priced:
    """Every price in the family, as `priced_layers` gives some."""
    where = {"stage_size": family.stage_size, "micro_batch": family.micro_batch}

    def vocab_row(vocab: VocabStrategy, role: Role) -> tuple[float, ...]:
        return price_numbers(cost.vocab_cost(vocab, role=role, **_where(family)))

    middle = [
        price_numbers(cost.middle_cost(later=later, micro_batches=family.micro_batches, **where))
        for later in (False, True)
    ]
    return {
        **_resharding_prices(family, choices.layers, choices.vocabularies, cost),
        "strategies": _array(
            [
                price_numbers(price)
                for kind, some in enumerate(choices.layers)
                for price in _prices(some, kind, family, cost)
            ]
        ),
        "vocabs": _array(
            [
                (vocab_row(vocab, "first"), vocab_row(vocab, "last"))
                if family.stages > 1
                else (vocab_row(vocab, "only"), (0.0,) * NUMBERS)
                for vocab in choices.vocabularies
            ]
        ),
        "middle": _array(middle),
    }


def build(family: PlanFamily, choices: Choices, prices: Priced, cost: CostModel, budget_mib: float) -> Tables:
    """Hand a family's prices (`priced`) to the core. `budget_mib` is what a plan may use on a device, the cost model's
    reserve already taken off."""
    strategies = [layer for some in choices.layers for layer in some]
    return Tables(family, strategies, choices.vocabularies, core_of(family, prices, cost, budget_mib))


def core_of(family: PlanFamily, prices: Priced, cost: CostModel, budget_mib: float) -> Core:
    """The core's object of a family's prices."""
    return Core(**_shape(family, cost), **prices, budget_mib=budget_mib)


def _resharding_prices(
    family: PlanFamily,
    layers: Sequence[Sequence[LayerStrategy]],
    vocabularies: Sequence[VocabStrategy],
    cost: CostModel,
) -> dict[str, Any]:
    """Groups, and what it costs to hand tokens on between them and at the edges of stages.

    Strategies of one layer type and one token layout are a group: they follow each other for nothing. Prices end in two
    numbers, forward and backward. `enter`, `leave` and `send` come twice: between layers of a type, and where a type
    begins (`leave`: ends).
    """
    numbers: dict[tuple[int, TokenLayout], int] = {}  # of groups, type by type
    size, sharded = family.stage_size, cost.assumed.sequence_parallel
    places = [(kind, token_layout(layer, size, sharded)) for kind, some in enumerate(layers) for layer in some]
    groups = [numbers.setdefault(place, len(numbers)) for place in places]
    if len(numbers) > MOST_LAYOUTS:
        raise UserError(
            f"max_tp_deg: {len(numbers)} token layouts in stages of {family.stage_size} devices are more than "
            f"{MOST_LAYOUTS}; lower it, or leave tp_consec at 1"
        )
    samples = dict(zip(groups, (layer for some in layers for layer in some), strict=True))
    types = np.array([kind for kind, _ in numbers], dtype=np.int32)
    starts = [*(cost.layer_types.index(kind) for kind in range(len(layers))), len(cost.layer_types)]
    where = {"stage_size": family.stage_size, "micro_batch": family.micro_batch}

    layouts: dict[TokenLayout, int] = {}  # numbered as they come
    known: dict[tuple[int, int, int], tuple[float, float]] = {}  # by layer type and numbers of layouts

    def numbered(strategies: Sequence[Strategy | None]) -> list[int]:
        return [layouts.setdefault(token_layout(some, size, sharded), len(layouts)) for some in strategies]

    def prices(before: Sequence[Strategy | None], after: Sequence[Strategy | None], kind: int) -> NDArray[np.float64]:
        """Prices of redistribution for a layer type; [before, after, 2]. Strategies of one layout are priced once."""
        rows, columns = numbered(before), numbered(after)
        for row, source in dict(zip(rows, before, strict=True)).items():
            for column, target in dict(zip(columns, after, strict=True)).items():
                if (kind, row, column) not in known:
                    known[kind, row, column] = cost.switch_cost(source, target, layer_type=kind, **where)
        return _array([[known[kind, row, column] for column in columns] for row in rows])

    count = len(types)
    change, enter, leave = np.zeros((count, count, 2)), np.zeros((2, count, 2)), np.zeros((2, count, 2))
    vocab_enter, vocab_leave = np.zeros((2, len(vocabularies), count, 2))
    send = np.zeros((2, len(layers)))
    for kind in range(len(layers)):
        own = np.flatnonzero(types == kind)
        some = [samples[group] for group in own]
        mine = _shortest(prices(some, some, kind))
        change[np.ix_(own, own)] = mine
        begins, ends = (cost.crossing_type(layer) for layer in starts[kind : kind + 2])
        for boundary, (first, last) in enumerate(((kind, kind), (begins, ends))):
            enter[boundary, own] = _through(prices([None], some, first), mine)[0]
            leave[boundary, own] = _through(mine, prices(some, [None], last))[:, 0]
            if family.stages > 1:
                send[boundary, kind] = cost.boundary_cost(layer_type=first, pipeline=family.stages, **where)
        if kind == 0:
            vocab_enter[:, own] = _through(prices(vocabularies, some, kind), mine)
        else:
            others = np.flatnonzero(types == kind - 1)
            step = prices([samples[group] for group in others], some, begins)
            change[np.ix_(others, own)] = _through(_through(change[np.ix_(others, others)], step), mine)
        if kind == len(layers) - 1:
            vocab_leave[:, own] = _through(mine, prices(some, vocabularies, kind)).swapaxes(0, 1)
    return {
        "groups": np.array(groups, dtype=np.int32),
        "types": types,
        "change": change,
        "enter": enter,
        "leave": leave,
        "vocab_enter": vocab_enter,
        "vocab_leave": vocab_leave,
        "send": send,
    }


# The core takes prices of change that obey the triangle inequality. Measured ones may not; then the core is given the
# shortest ways, and the gap between its time and the predicted one stays in the certificate.


def _shortest(change: NDArray[np.float64]) -> NDArray[np.float64]:
    """Cheapest ways between layouts through others, forward and backward apart; [layouts, layouts, 2]."""
    for via in range(len(change)):
        change = np.minimum(change, change[:, via, None] + change[None, via])
    return change


def _through(first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.float64]:
    """Cheapest ways by a change of the first kind and one of the second; [a, b, 2] and [b, c, 2] make [a, c, 2]."""
    return np.asarray((first[:, :, None] + second[None]).min(axis=1))


def sketch_ms(family: PlanFamily, layers: Sequence[Sequence[LayerStrategy]], cost: CostModel) -> float:
    """A lower bound, in ms, of the step time of every plan of the family, for a few prices.

    Memory, vocabulary, gradient sums and switches are free. Stages of several chunks share all work evenly, and each
    waits until a micro-batch has passed a layer of every stage before it, forward and at the end backward; nor is a
    step shorter than one micro-batch's way through all layers. Recompute only adds to a layer's passes, so it is left
    out, and so is ZeRO-3, unless gradients are reduced within the passes: then it reduces them cheaper.
    """
    rows = []
    for kind, some in enumerate(layers):
        plain = [layer for layer in some if not layer.recompute] or list(some)
        if cost.assumed.async_grad_reduce:  # of each degree the first, which has the default dp type
            plain = list(
                {(layer.axes, layer.consecutive, layer.ep, layer.etp): layer for layer in reversed(plain)}.values()
            )
        prices = _prices(plain, kind, family, cost)
        rows.append([(price.forward_ms, price.backward_ms, *[0.0] * (NUMBERS - 2)) for price in prices])
    shared = family.stages if family.chunks > 1 else 1  # stages taken for one
    core = core_of(replace(family, stages=family.stages // shared, chunks=1), _alone(rows), cost, budget_mib=0.0)
    alone_ms = core.bound()
    if shared == 1:
        return alone_ms
    way_ms = alone_ms / family.micro_batches
    return max(alone_ms / shared + (shared - 1) / 2 * way_ms / len(cost.layer_types), way_ms)


def _alone(rows: Sequence[Sequence[tuple[float, ...]]]) -> Priced:
    """Prices of the strategies of each layer type, and nothing for all else."""
    kinds = len(rows)
    free = np.zeros((2, kinds, 2))
    return {
        "strategies": _array([row for some in rows for row in some]),
        "groups": np.repeat(np.arange(kinds, dtype=np.int32), [len(some) for some in rows]),
        "types": np.arange(kinds, dtype=np.int32),
        "change": np.zeros((kinds, kinds, 2)),
        "enter": free,
        "leave": free,
        "vocabs": np.zeros((1, 2, NUMBERS)),
        "vocab_enter": free[:1],
        "vocab_leave": free[:1],
        "middle": np.zeros((2, NUMBERS)),
        "send": np.zeros((2, kinds)),
    }


def _where(family: PlanFamily) -> dict[str, int]:
    """Arguments of the cost model that all prices of the family share."""
    return {
        "stage_size": family.stage_size,
        "micro_batch": family.micro_batch,
        "micro_batches": family.micro_batches,
        "pipeline": family.stages,
    }


def _shape(family: PlanFamily, cost: CostModel) -> dict[str, Any]:
    """Size and schedule of the family's pipelines, as arguments of the core."""
    size = family.stages, family.micro_batches, family.chunks
    passes, runs = arrays(family.schedule, *size)
    held = [
        (stage, *moment) for stage in range(family.stages) for moment in chunks_in_flight(family.schedule, stage, *size)
    ]
    return {
        "layers": np.bincount(cost.layer_types).astype(np.int32),
        "micro_batches": family.micro_batches,
        "passes": passes,
        "runs": runs,
        "in_flight": np.array(held, dtype=np.int32),
    }


def _prices(layers: Sequence[LayerStrategy], kind: int, family: PlanFamily, cost: CostModel) -> list[LayerCost]:
    where = _where(family)
    return [cost.layer_cost(layer, layer_type=kind, **where) for layer in layers]


def _array(rows: object) -> NDArray[np.float64]:
    return np.array(rows, dtype=np.float64)
