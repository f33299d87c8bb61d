"""Converts prices of the cost model to the arrays that the C++ core searches, for one family of plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeVar

import galvatron_dp_core
import numpy as np
from numpy.typing import NDArray

from ..cost_model import CostModel
from ..cost_model.collectives import MTP_CHANGES
from ..plan import ByKind, DataParallel, LayerStrategy, PassKind, Strategy, VocabStrategy
from ..plan.layout import TokenLayout, token_layout
from ..plan.schedule import arrays, chunks_in_flight
from ..profiles.memory import Role
from .space import LayerRun, PlanFamily, Strategies, cost_numbers, suited, unbeaten


class TooWide(galvatron_dp_core.TooHard):
    """A family has more strategies of layers than the core takes."""


MOST_LAYOUTS = 64  # the core's sets of them are bits of a word
PASS_KINDS = len(PassKind)
NUMBERS, SUMMED = PASS_KINDS + 7, PASS_KINDS + 3  # numbers of a cost, and those that a stage sums over its parts


CostArrays = dict[str, Any]  # arguments of the core
Core = galvatron_dp_core.Pipeline
Choice = TypeVar("Choice", LayerStrategy, VocabStrategy)


def without_beaten(family: PlanFamily, strategies: Strategies, cost: CostModel) -> Strategies:
    """Strategies without those that another strategy of the same token layout dominates in all numbers of the core."""
    of_runs = zip(strategies.layers, _layer_rows(strategies.layers, family, strategies, cost), strict=True)
    layers = [_unbeaten(choices, rows, family, cost) for choices, rows in of_runs]
    rows = [(*first, *last) for first, last in _vocab_rows(family, strategies, cost)]
    vocabularies = _unbeaten(strategies.vocabularies, rows, family, cost)
    return replace(strategies, layers=layers, vocabularies=vocabularies)


def _unbeaten(
    choices: Sequence[Choice], rows: Sequence[tuple[float, ...]], family: PlanFamily, cost: CostModel
) -> list[Choice]:
    places: dict[TokenLayout, list[int]] = {}
    for number, choice in enumerate(choices):
        layout = token_layout(choice, family.stage_size, cost.assumed.sequence_parallel)
        places.setdefault(layout, []).append(number)
    left = (unbeaten(group, np.array([rows[number] for number in group])) for group in places.values())
    return [choices[number] for number in sorted(number for group in left for number in group)]


def layer_arrays(family: PlanFamily, strategies: Strategies, cost: CostModel) -> CostArrays:
    """The costs of layers, zero for the rest; independent of schedule and chunks. Raises UserError if a profile lacks
    an entry for a strategy."""
    rows = _layer_rows(strategies.layers, family, strategies, cost)
    prefix = least_prefix(family, strategies, cost)
    return _layers_alone(rows, _runs(strategies, cost), prefix) | {"most_first": strategies.most_first}


def cost_arrays(family: PlanFamily, strategies: Strategies, cost: CostModel) -> CostArrays:
    """All costs in the family, in the form of `layer_arrays`."""
    middle = [cost.middle_cost(family.setting, later) for later in (False, True)]
    rows = _layer_rows(strategies.layers, family, strategies, cost)
    prefixes = prefix_rows(family, strategies, cost)
    kind, vocabs = cost.layer_types[-1], []
    suffixes = [[_layer_row(layer, kind, family, cost) for layer in suffix] for suffix in strategies.suffixes]
    for vocab, (first, last) in zip(strategies.vocabularies, _vocab_rows(family, strategies, cost), strict=True):
        for prefix, row in zip(strategies.prefixes, prefixes, strict=True):
            begin = _together([first, row, _passing(_changes_ms([vocab, *prefix[:1]], family, cost))])
            vocabs += [(begin, _together([last, *suffix])) for suffix in suffixes]
    return {
        **_resharding(family, strategies, cost),
        "layers": _counts(_runs(strategies, cost)),
        "most_first": strategies.most_first,
        "strategies": _array([row for run_rows in rows for row in run_rows]),
        "vocabs": _array(vocabs),
        "middle": _array([cost_numbers(input_cost, cost.options.freed) for input_cost in middle]),
    }


def prefix_rows(family: PlanFamily, strategies: Strategies, cost: CostModel) -> list[tuple[float, ...]]:
    """Total costs of the dense prefix under each of its strategies, including resharding."""
    rows = []
    for prefix in strategies.prefixes:
        layers = [_layer_row(layer, kind, family, cost) for layer, kind in zip(prefix, cost.layer_types, strict=False)]
        rows.append(_together([*layers, _passing(_changes_ms(prefix, family, cost))]))
    return rows


def least_prefix(family: PlanFamily, strategies: Strategies, cost: CostModel) -> NDArray[np.float64]:
    """Componentwise minimum over all prefix costs."""
    return np.asarray(_array(prefix_rows(family, strategies, cost)).min(axis=0))


def _layer_row(layer: LayerStrategy, kind: int, family: PlanFamily, cost: CostModel) -> tuple[float, ...]:
    return cost_numbers(cost.layer_cost(layer, family.setting, kind), cost.options.freed)


def _passing(passes_ms: Sequence[float]) -> tuple[float, ...]:
    """The cost numbers of a part that takes time in passes, but no memory."""
    return *passes_ms, *[0.0] * (NUMBERS - PASS_KINDS)


def _together(rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Numbers of several parts of a stage: each term of the workspace counts once, for the part that needs most."""
    numbers = np.array(rows)
    return *numbers[:, :SUMMED].sum(axis=0), *numbers[:, SUMMED:].max(axis=0)


def _changes_ms(chain: Sequence[Strategy], family: PlanFamily, cost: CostModel) -> ByKind[float]:
    """Resharding in ms along these strategies of the first layers' type."""
    setting, layer_type = family.setting, cost.layer_types[0]
    changes = [cost.switch_cost(source, target, setting, layer_type) for source, target in pairwise(chain)]
    return ByKind(*(sum(change.of(kind) for change in changes) for kind in PassKind))


def _runs(strategies: Strategies, cost: CostModel) -> tuple[LayerRun, ...]:
    return strategies.runs(cost.layer_types)


def _counts(runs: Sequence[LayerRun]) -> NDArray[np.int32]:
    return np.array([run.units for run in runs], dtype=np.int32)


def core_of(family: PlanFamily, arrays: CostArrays, budget_mib: float) -> Core:
    """The core's object of a family. `budget_mib` is the memory that a plan may use on a device, the cost model's
    reserve already taken off."""
    return Core(**_shape(family), **arrays, budget_mib=budget_mib)


def _switch_costs(
    family: PlanFamily, cost: CostModel
) -> Callable[[Sequence[Strategy | None], Sequence[Strategy | None], int], NDArray[np.float64]]:
    """A function for the costs of redistribution for a layer type; [before, after, kinds]. Strategies of one layout are
    priced once."""
    setting, sharded = family.setting, cost.assumed.sequence_parallel
    layouts: dict[TokenLayout, int] = {}  # numbered in order of appearance
    cached: dict[tuple[int, int, int], tuple[float, float]] = {}  # keyed by layer type and layout numbers

    def numbered(strategies: Sequence[Strategy | None]) -> list[int]:
        placed = (token_layout(strategy, family.stage_size, sharded) for strategy in strategies)
        return [layouts.setdefault(layout, len(layouts)) for layout in placed]

    def costs(sources: Sequence[Strategy | None], targets: Sequence[Strategy | None], kind: int) -> NDArray[np.float64]:
        rows, columns = numbered(sources), numbered(targets)
        for row, source in dict(zip(rows, sources, strict=True)).items():
            for column, target in dict(zip(columns, targets, strict=True)).items():
                if (kind, row, column) not in cached:
                    cached[kind, row, column] = cost.switch_cost(source, target, setting, kind)
        return _array([[cached[kind, row, column] for column in columns] for row in rows])

    return costs


def _resharding(family: PlanFamily, strategies: Strategies, cost: CostModel) -> CostArrays:
    """Layouts, and the costs of resharding between them and at the edges of stages.

    Strategies of one run of layers and one token layout need no resharding between them: the core sees one layout.
    Costs end in two numbers, forward and backward. `enter`, `leave` and `send` come twice: between layers of a run,
    and where a run begins (`leave`: ends).
    """
    layers, runs = strategies.layers, _runs(strategies, cost)
    numbers: dict[tuple[int, TokenLayout], int] = {}  # number of each layout, run by run
    size, sharded = family.stage_size, cost.assumed.sequence_parallel
    places = [(number, token_layout(layer, size, sharded)) for number, run in enumerate(layers) for layer in run]
    layout_of = [numbers.setdefault(place, len(numbers)) for place in places]
    if len(numbers) > MOST_LAYOUTS:
        raise TooWide(f"{len(numbers)} token layouts in {family} are more than {MOST_LAYOUTS}")
    samples = dict(zip(layout_of, (layer for run_layers in layers for layer in run_layers), strict=True))
    types = np.array([number for number, _ in numbers], dtype=np.int32)
    starts = [*(strategies.in_front + run.start for run in runs), len(cost.layer_types) - len(strategies.suffixes[0])]
    outer = strategies.ends
    behind = [prefix[-1] if prefix else vocab for vocab, prefix, _ in outer]
    costs = _switch_costs(family, cost)
    count = len(types)
    change, enter, leave = np.zeros((count, count, PASS_KINDS)), *np.zeros((2, 2, count, PASS_KINDS))
    vocab_enter, vocab_leave = np.zeros((2, len(outer), count, PASS_KINDS))
    send = np.zeros((2, len(layers)))
    for number, run in enumerate(runs):
        kind = run.types[0]  # all layers of a unit have the same token size
        indices = np.flatnonzero(types == number)
        run_layers = [samples[layout] for layout in indices]
        within = _shortest(costs(run_layers, run_layers, kind))
        change[np.ix_(indices, indices)] = within
        begins, ends = (cost.crossing_type(layer) for layer in starts[number : number + 2])
        for boundary, (first, last) in enumerate(((kind, kind), (begins, ends))):
            enter[boundary, indices] = _through(costs([None], run_layers, first), within)[0]
            leave[boundary, indices] = _through(within, costs(run_layers, [None], last))[:, 0]
            if family.stages > 1:
                send[boundary, number] = cost.boundary_cost(family.setting, first)
        if number == 0:
            vocab_enter[:, indices] = _through(costs(behind, run_layers, begins), within)
        else:
            others = np.flatnonzero(types == number - 1)
            step = costs([samples[layout] for layout in others], run_layers, begins)
            change[np.ix_(others, indices)] = _through(_through(change[np.ix_(others, others)], step), within)
        if number == len(layers) - 1:
            to_head = costs(run_layers, [vocab for vocab, *_ in outer], kind)
            if cost.models[kind].mtp_layers:
                to_head = MTP_CHANGES / 2 * (to_head + to_head[..., ::-1])
            vocab_leave[:, indices] = _through(within, to_head).swapaxes(0, 1)
    return {
        "layouts": np.array(layout_of, dtype=np.int32),
        "types": types,
        "change": change,
        "enter": enter,
        "leave": leave,
        "vocab_enter": vocab_enter,
        "vocab_leave": vocab_leave,
        "send": send,
    }


# The core requires resharding costs that obey the triangle inequality. Measured costs may not; the core then gets
# shortest paths, and the gap to the predicted time stays in the certificate.


def _shortest(change: NDArray[np.float64]) -> NDArray[np.float64]:
    """Cheapest ways between layouts through others, forward and backward apart; [layouts, layouts, kinds]."""
    for via in range(len(change)):
        change = np.minimum(change, change[:, via, None] + change[None, via])
    return change


def _through(first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.float64]:
    """Cheapest ways by a change of the first kind and one of the second; of [a, b, kinds] and [b, c, kinds]."""
    return np.asarray((first[:, :, None] + second[None]).min(axis=1))


def compute_bound_ms(family: PlanFamily, strategies: Strategies, cost: CostModel) -> float:
    """A lower bound, in ms, of the step time of every plan of the family, that needs only a few price look-ups.

    Memory, vocabulary, gradient sums and switches are free. Stages of several chunks share all work evenly, and each
    waits until a micro-batch has passed a layer of every stage before it, forward and at the end backward; nor is a
    step shorter than one micro-batch's path through all layers. Recompute only adds to a layer's passes, so it is
    skipped. So is ZeRO-3, unless gradients are reduced within the passes, where it is cheaper. If all layers have
    ZeRO-3, each sharding size is priced.
    """
    plain_layers = []
    for choices in strategies.layers:
        plain = [layer for layer in choices if not (layer.recompute or layer.offload)] or list(choices)
        if cost.assumed.async_grad_reduce:  # the first strategy of each degree, which has the default dp type
            plain = list(
                {
                    (layer.axes, layer.consecutive, *_parts(layer, plain[0].dp_type), *layer.experts[:2]): layer
                    for layer in reversed(plain)
                }.values()
            )
        plain_layers.append(plain)
    rows = [
        [_passing(numbers[:PASS_KINDS]) for numbers in choices]
        for choices in _layer_rows(plain_layers, family, strategies, cost)
    ]
    prefix = least_prefix(family, strategies, cost)
    prefix[PASS_KINDS:] = 0.0
    shared = family.stages if family.chunks > 1 else 1  # stages treated as one
    whole = replace(family, stages=family.stages // shared, chunks=1)
    alone_ms = core_of(whole, _layers_alone(rows, _runs(strategies, cost), prefix), budget_mib=0.0).bound()
    if shared == 1:
        return alone_ms
    way_ms = alone_ms / family.micro_batches
    layer_ms = min(forward + backward for choices in rows for forward, backward, *_ in choices)
    return max(alone_ms / shared + (shared - 1) / 2 * layer_ms, way_ms)


def _parts(layer: LayerStrategy, default: DataParallel) -> tuple[int | None, ...]:
    """ZeRO-3 sharding sizes of a layer and its experts; empty if ZeRO-3 is not the default."""
    return (layer.sharding, layer.experts_sharding) if default is DataParallel.ZERO3 else ()


def _layers_alone(
    rows: Sequence[Sequence[tuple[float, ...]]], runs: Sequence[LayerRun], prefix: NDArray[np.float64]
) -> CostArrays:
    """Arrays with the costs of each run's strategies and of the dense prefix; vocabulary and switches cost nothing."""
    count = len(rows)
    free = np.zeros((2, count, PASS_KINDS))
    return {
        "layers": _counts(runs),
        "strategies": _array([row for run_rows in rows for row in run_rows]),
        "layouts": np.repeat(np.arange(count, dtype=np.int32), [len(run_rows) for run_rows in rows]),
        "types": np.arange(count, dtype=np.int32),
        "change": np.zeros((count, count, PASS_KINDS)),
        "enter": free,
        "leave": free,
        "vocabs": np.stack((prefix, np.zeros(NUMBERS)))[None],
        "vocab_enter": free[:1],
        "vocab_leave": free[:1],
        "middle": np.zeros((2, NUMBERS)),
        "send": np.zeros((2, count)),
    }


def _shape(family: PlanFamily) -> dict[str, Any]:
    """Size and schedule of the family's pipelines, as arguments of the core."""
    size = family.stages, family.micro_batches, family.chunks
    passes, runs = arrays(family.schedule, *size)
    held = [(stage, *at) for stage in range(family.stages) for at in chunks_in_flight(family.schedule, stage, *size)]
    in_flight = np.array(held, dtype=np.int32)
    return {"micro_batches": family.micro_batches, "passes": passes, "runs": runs, "in_flight": in_flight}


def _layer_rows(
    layers: Sequence[Sequence[LayerStrategy]], family: PlanFamily, strategies: Strategies, cost: CostModel
) -> list[list[tuple[float, ...]]]:
    """Costs of some strategies of each run of layers, in the core's order: of a layer, or of all layers of a period."""

    def row(layer: LayerStrategy, kinds: Sequence[int]) -> tuple[float, ...]:
        if kinds[1:]:
            return _together([row(suited(layer, cost.models[kind]), (kind,)) for kind in kinds])
        return _layer_row(layer, kinds[0], family, cost)

    of_runs = zip(_runs(strategies, cost), layers, strict=True)
    return [[row(layer, run.types) for layer in choices] for run, choices in of_runs]


def _vocab_rows(
    family: PlanFamily, strategies: Strategies, cost: CostModel
) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    """Costs of the vocabulary's strategies on the first stage and on the last, in the core's order."""
    setting = family.setting

    def row(vocab: VocabStrategy, role: Role) -> tuple[float, ...]:
        return cost_numbers(cost.vocab_cost(vocab, setting, role), cost.options.freed)

    if family.stages == 1:
        return [(row(vocab, "only"), (0.0,) * NUMBERS) for vocab in strategies.vocabularies]
    return [(row(vocab, "first"), row(vocab, "last")) for vocab in strategies.vocabularies]


def _array(rows: object) -> NDArray[np.float64]:
    return np.array(rows, dtype=np.float64)
