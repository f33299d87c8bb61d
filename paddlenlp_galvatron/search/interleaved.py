"""Plans whose stages have several chunks of layers: a lower bound of a family's step times, and a good plan of it.

The core searches stages of one chunk. Its best division and strategies for what the chunks hold together are cut into
chunks here and improved a layer at a time; every plan is simulated as it will run. Nothing proves such a plan the best
of its family: what the lower bound leaves open stays in the search's certificate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ..cost_model import CostModel, Prediction
from ..plan import LayerStrategy, Plan, VocabStrategy
from ..plan.schedules import chunks_in_flight
from .space import PlanFamily
from .tables import Tables, build, relaxed_ms

EFFORT = 1_000_000  # passes simulated to find where to begin
MOST_PRICED = 200  # plans of a family that are priced to improve it
NEAR = 1.1  # improving seldom gains more


def bound_ms(
    family: PlanFamily,
    layers: Sequence[Sequence[LayerStrategy]],
    vocabularies: Sequence[VocabStrategy],
    cost: CostModel,
    budget_mib: float,
) -> float:
    """A lower bound of the step time, in ms, of every plan of the family; infinite where none fits.

    Some stage works as long as the mean of all. Together they hold all layers, within their memory together, each of at
    least as many micro-batches as some moment of its stage's list of passes has of every chunk in flight.
    """
    held = min(max(map(min, _peaks(family, stage))) for stage in range(family.stages))
    return relaxed_ms(family, layers, vocabularies, cost, family.stages * budget_mib, held) / family.stages


def start(
    family: PlanFamily,
    layers: Sequence[Sequence[LayerStrategy]],
    vocabularies: Sequence[VocabStrategy],
    cost: CostModel,
    budget_mib: float,
) -> Tables:
    """The core's tables of stages of one chunk, which holds as much as equal chunks of a stage would."""
    held = [max(-(-sum(peak) // family.chunks) for peak in _peaks(family, stage)) for stage in range(family.stages)]
    return build(replace(family, chunks=1), layers, vocabularies, cost, budget_mib, held)


def cut(plan: Plan, chunks: int) -> Plan | None:
    """A plan of one chunk a stage with each stage's layers cut into chunks, as evenly as may be; None: too few."""
    stages = [[plan.layers[layer] for layer in plan.stage_layers(stage)] for stage in range(plan.pipeline)]
    while len(smallest := min(stages, key=len)) < chunks:
        largest = max(stages, key=len)
        if len(largest) <= chunks:
            return None
        largest.pop()
        smallest.append(smallest[-1])
    pieces: list[list[LayerStrategy]] = []
    for chunk in range(chunks):
        for own in stages:
            first, last = (-(-len(own) * edge // chunks) for edge in (chunk, chunk + 1))
            pieces.append(own[first:last])
    return _joined(plan, pieces, chunks)


def improved(
    plan: Plan,
    strategies: Sequence[LayerStrategy],
    cost: CostModel,
    budget_mib: float,
    limit_s: float,
    cancelled: Callable[[], bool],
) -> tuple[Plan, Prediction] | None:
    """The best plan that is found from this one by changing a layer at a time; None: none of them fits.

    Nothing is changed where this one takes much longer than the limit.
    """

    def order(prediction: Prediction) -> tuple[float, float]:
        most = max(stage.memory.total_mib - stage.memory.context_mib for stage in prediction.stages)
        return max(0.0, most - budget_mib), prediction.time_s

    best, prediction = plan, cost.predict(plan)
    left, better = MOST_PRICED, prediction.time_s < NEAR * limit_s
    while better:
        better = False
        for other in _neighbours(best, strategies):
            if left == 0 or cancelled():
                break
            left -= 1
            priced = cost.predict(other)
            if order(priced) < order(prediction):
                best, prediction, better = other, priced, True
                break
    return (best, prediction) if order(prediction)[0] == 0.0 else None


def _neighbours(plan: Plan, strategies: Sequence[LayerStrategy]) -> Iterator[Plan]:
    """Plans with one layer of one chunk in another chunk, or under another strategy."""
    pieces = [
        [plan.layers[layer] for layer in plan.chunk_layers(stage, chunk)]
        for chunk in range(plan.chunks)
        for stage in range(plan.pipeline)
    ]
    for source, own in enumerate(pieces):
        for target, its in enumerate(pieces):
            if source != target and len(own) > 1:
                changed = [*pieces]
                changed[source], changed[target] = own[:-1], [*its, its[-1]]
                yield _joined(plan, changed, plan.chunks)
    for place, own in enumerate(pieces):
        for strategy in strategies:
            for layer in {0, len(own) - 1}:
                if strategy != own[layer]:
                    changed = [*pieces]
                    changed[place] = [*own[:layer], strategy, *own[layer + 1 :]]
                    yield _joined(plan, changed, plan.chunks)


def _joined(plan: Plan, pieces: Sequence[Sequence[LayerStrategy]], chunks: int) -> Plan:
    stages, layers = tuple(map(len, pieces)), tuple(layer for piece in pieces for layer in piece)
    return replace(plan, stages=stages, layers=layers, chunks=chunks)


def _peaks(family: PlanFamily, stage: int) -> tuple[tuple[int, ...], ...]:
    return chunks_in_flight(family.schedule, stage, family.stages, family.micro_batches, family.chunks)
