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

MOST_SAMPLES = 4  # with which a layer is timed
WARM_UP = 3  # steps: the first makes the optimizer's states, allocates and connects
LEAST_STEPS = 6
PLAN_S = 4.0  # that the timed steps of a plan take, within LEAST_STEPS and the wanted number
SCALAR_BYTES = 2 * 4  # of each rank: loss and norm, which no prediction counts


def main() -> None:
    """Run every plan that the journal does not know."""
    work = Work.model_validate_json(Path(sys.argv[1]).read_text())
    rank, world_size = start_world()
    journal = Journal.open(work.output, JOURNAL, work.identity, rank, world_size, fresh=False)
    stopwatch = Stopwatch(world_size, work.ranks_per_node, time_budget_s=work.seconds)
    groups, plans = Groups(rank), work.read_plans()
    layer = Layer(work, plans[0], stopwatch)
    for number, plan in enumerate(plans):
        if stopwatch.is_late():
            break
        report_progress(number, len(plans))
        journal.get(key_of(plan), partial(_measure, work, plan, groups, stopwatch, layer))


def _measure(work: Work, plan: Plan, groups: Groups, stopwatch: Stopwatch, layer: Layer) -> dict[str, Any]:
    before_ms = layer.time_ms()
    run = _run(work, plan, groups)
    timed = {"layer_ms": (before_ms + layer.time_ms()) / 2, "layer_samples": layer.samples}
    return run.model_copy(update=timed).model_dump()


class Layer:
    """A layer as the profiler times it, on all ranks at once."""

    def __init__(self, work: Work, plan: Plan, stopwatch: Stopwatch):
        family, rows = load_family(work.shape.family), plan.global_batch // plan.world_size
        self.samples = min(max(rows, 1), MOST_SAMPLES)
        seq_length, precision = plan.assumed.seq_length or 0, plan.assumed.mixed_precision
        self._parts = [
            MeasuredPart(
                work.shape, family, layers=layers, samples=self.samples, seq_length=seq_length, precision=precision
            )
            for layers in FEW_AND_MANY
        ]
        self._stopwatch = stopwatch

    def time_ms(self) -> float:
        steps = [step for part in self._parts for step in (part.forward, part.backward)]
        laps = self._stopwatch.apart(*steps)
        few, many = laps[:, :2].sum(axis=1), laps[:, 2:].sum(axis=1)
        return Timing.of_turns([of_one_layer(few, many).tolist()]).ms


def _run(work: Work, plan: Plan, groups: Groups) -> MeasuredRun:
    """Steps as training's: their time is from the end of the one before to their own end."""
    gc.collect()
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
    began = time.perf_counter()
    for number in range(steps):
        device.reset_peak()
        forget_traffic()
        seconds, terms = _step(engine, optimizer, recipe, next(batches), began)
        began += seconds
        if number == 0:
            traffic = engine.traffic()["bytes"]
            traffic["all_reduce"] -= SCALAR_BYTES * plan.world_size if plan.world_size > 1 else 0
        rows.append(engine.gather(seconds, device.peak_mib() - before, *terms.values()))
    counting = sorted(rows[1:], key=lambda row: max(row[0]))  # the first one has the count of traffic
    chosen = counting[len(counting) // 2]
    peaks = [max(row[1][rank] for row in rows) for rank in range(plan.world_size)]
    return MeasuredRun(
        step_s=max(chosen[0]),
        ranks=tuple(
            RankRun(terms_ms=dict(zip(TERMS, (column[rank] for column in chosen[2:]), strict=True)), peak_mib=peak)
            for rank, peak in enumerate(peaks)
        ),
        bytes={kind: int(size) for kind, size in traffic.items() if size},
    )


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
