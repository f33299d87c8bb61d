"""One rank of a validation: runs plan after plan in one world and writes down what each took."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from ..adapters import load_family
from ..plan import Plan
from ..profiler.journal import Journal
from ..profiler.launcher import report_progress
from ..profiler.layers.part import FEW_AND_MANY, MeasuredPart, of_one_layer
from ..profiler.stopwatch import Stopwatch, Timing
from ..runtime import device
from ..runtime.collectives import forget_traffic
from ..runtime.engine import Engine
from ..runtime.groups import Groups, run_as_rank, start_world
from ..runtime.paddle_private import next_rate
from ..runtime.trace import span, traced
from ..training.recipe import Recipe
from .terms import TERMS, measured_ms
from .work import JOURNAL, MeasuredRun, RankRun, Work, key_of

WARM_UP = 3  # steps: the first makes the optimizer's states, allocates and connects
LEAST_STEPS = 6
PLAN_S = 4.0  # that the timed steps of a plan take, within LEAST_STEPS and the wanted number
# Of the steps, from the quickest, which one counts: of 14 the third. What else a host does makes steps longer, never
# shorter: of one plan's steps on two shared processors the median moved by 6.9 % about its prediction, this one by 5 %.
QUICK = 0.18
SCALAR_BYTES = 2 * 4  # of each rank: loss and norm, which no prediction counts


def main() -> None:
    """Run every plan that the journal does not know."""
    work = Work.model_validate_json(Path(sys.argv[1]).read_text())
    rank, world_size = start_world()
    journal = Journal.open(work.output, JOURNAL, work.identity, rank, world_size, fresh=False)
    # The fewest laps: a layer is timed between any two steps.
    stopwatch = Stopwatch(world_size, work.ranks_per_node, budget_ms=0, time_budget_s=work.seconds)
    groups, plans = Groups(rank), work.read_plans()
    layer = Layer(work, plans[0], stopwatch)
    for number, plan in enumerate(plans):
        if stopwatch.is_late():
            break
        report_progress(number, len(plans))
        journal.get(key_of(plan), partial(_run, work, plan, groups, layer))


class Layer:
    """A layer with one sample as the profiler times it, on all ranks at once."""

    def __init__(self, work: Work, plan: Plan, stopwatch: Stopwatch):
        family, assumed = load_family(work.shape.family), plan.assumed
        how: dict[str, Any] = {"seq_length": assumed.seq_length or 0, "precision": assumed.mixed_precision}
        self._parts = [MeasuredPart(work.shape, family, layers=layers, samples=1, **how) for layers in FEW_AND_MANY]
        self._stopwatch = stopwatch

    def time_ms(self) -> float:
        steps = [step for part in self._parts for step in (part.forward, part.backward)]
        laps = self._stopwatch.apart(*steps)
        few, many = laps[:, :2].sum(axis=1), laps[:, 2:].sum(axis=1)
        return Timing.of_turns([of_one_layer(few, many).tolist()]).ms


def _run(work: Work, plan: Plan, groups: Groups, layer: Layer) -> dict[str, Any]:
    """Steps as training's, their data with them; between any two the layer is timed. A MeasuredRun, for the journal."""
    gc.collect()
    layer.time_ms()  # what it keeps is not the plan's
    before = device.allocated_mib()
    engine = Engine(plan, work.shape, load_family(work.shape.family), plan.assumed.seq_length or 0, groups=groups)
    recipe = Recipe()
    optimizer = recipe.build(engine.tensors, engine.decaying)
    batches = _batches(work, plan)
    for _ in range(WARM_UP):
        warm = _step(engine, optimizer, recipe, next(batches), time.perf_counter())
    (every,) = engine.gather(warm[0])
    steps = min(max(LEAST_STEPS, round(PLAN_S / max(every))), work.steps)
    rows: list[list[tuple[float, ...]]] = []
    traffic: dict[str, int] = {}
    layers_ms = [layer.time_ms()]
    for number in range(steps):
        device.reset_peak()
        forget_traffic()
        began = time.perf_counter()
        seconds, terms = _step(engine, optimizer, recipe, next(batches), began)
        if number == 0:
            traffic = engine.traffic()["bytes"]
            traffic["all_reduce"] -= SCALAR_BYTES * plan.world_size if plan.world_size > 1 else 0
        rows.append(engine.gather(seconds, device.peak_mib() - before, *terms.values()))
        layers_ms.append(layer.time_ms())
    counting = sorted(range(1, steps), key=lambda number: max(rows[number][0]))  # the first has the count of traffic
    number = counting[round(QUICK * (len(counting) - 1))]
    chosen = rows[number]
    peaks = [max(row[1][rank] for row in rows) for rank in range(plan.world_size)]
    run = MeasuredRun(
        step_s=max(chosen[0]),
        layer_ms=(layers_ms[number] + layers_ms[number + 1]) / 2,
        ranks=tuple(
            RankRun(terms_ms=dict(zip(TERMS, (column[rank] for column in chosen[2:]), strict=True)), peak_mib=peak)
            for rank, peak in enumerate(peaks)
        ),
        bytes={kind: int(size) for kind, size in traffic.items() if size},
    )
    return run.model_dump()


def _step(engine: Engine, optimizer: Any, recipe: Recipe, batch: Any, began: float) -> tuple[float, dict[str, float]]:
    """(seconds since `began`, terms in ms) of one step."""
    events: list[dict[str, Any]] = []
    with traced(engine.rank, events):
        engine.forward_backward(batch)
        with span("optimizer", "optimizer"):
            engine.update(optimizer, recipe.max_grad_norm)
        next_rate(optimizer)
        device.synchronize()
    seconds = time.perf_counter() - began
    return seconds, measured_ms(events, 1000 * seconds)


def _batches(work: Work, plan: Plan) -> Iterator[Any]:
    """Global batches [G, S + 1] of random tokens, the same on every rank."""
    size = (plan.global_batch, (plan.assumed.seq_length or 0) + 1)
    for number in count():
        yield np.random.default_rng([work.seed, number]).integers(0, work.shape.vocab_size, size)


if __name__ == "__main__":
    run_as_rank(main)
