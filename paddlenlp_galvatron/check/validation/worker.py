"""One rank of a validation: runs plan after plan in one world and writes each plan's measurements."""

import gc
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Any

import numpy as np

from ...measure.journal import Journal
from ...measure.launcher import report_progress
from ...measure.stopwatch import Stopwatch
from ...model.lora import Adapters
from ...plan import Plan, plan_from_dict
from ...report.measured import scalars_bytes
from ...runtime import device
from ...runtime.collectives import forget_traffic
from ...runtime.engine import Engine
from ...runtime.groups import Groups, run_as_rank, start_world
from ...runtime.paddle_private import next_rate
from ...runtime.setup import ModelSetup
from ...runtime.trace import span, traced
from ...training.recipe import Recipe
from .accuracy import TERMS, measured_ms
from .work import JOURNAL, Step, Visit, Work, key_of, visit_of

LEAST_STEPS = 3
VISIT_S = 1.5  # target length of a visit; timed and traced steps, LEAST_STEPS to `steps` of each, fill it


def main() -> None:
    """Run every plan that is not in the journal."""
    work, idle_mib = Work.model_validate_json(Path(sys.argv[1]).read_text()), device.beside_mib()
    rank, world_size = start_world()
    journal = Journal.open(work.output, JOURNAL, work.identity, rank, world_size, fresh=False)
    stopwatch = Stopwatch(world_size, work.ranks_per_node, budget_ms=0, time_budget_s=work.seconds)
    groups, plans = Groups(rank), [plan_from_dict(fields) for fields in work.plans]
    gc.freeze()  # otherwise a collection after a plan also scans all imports, which takes 0.2 s
    for done, (number, plan) in enumerate(product(range(work.visits), plans)):
        if stopwatch.is_late():
            break
        report_progress(done, work.visits * len(plans))
        if not any(visit["failed"] for _, visit in journal.items(key_of(plan))):
            journal.get(visit_of(plan, number), partial(_visit, work, plan, groups, idle_mib))


def _visit(work: Work, plan: Plan, groups: Groups, idle_mib: float | None) -> dict[str, Any]:
    """Run steps as training does, including their data. Returns a Visit for the journal. `idle_mib`: memory of others
    on this GPU."""
    gc.collect()
    device.release()
    allocated_mib = device.allocated_mib()
    adapters = Adapters(work.adapter_rank, 2.0 * work.adapter_rank) if work.adapter_rank else None
    length = plan.assumed.seq_length or 0
    engine = Engine(ModelSetup.of(plan, work.shape, length, adapters=adapters), groups=groups)
    recipe = Recipe()
    optimizer = recipe.build(engine.tensors, engine.decaying)
    batches = _batches(work, plan)
    _seconds_of_step(engine, optimizer, recipe, batches)  # makes the optimizer's states, allocates and connects
    forget_traffic()
    steps: list[Step] = []
    peaks: list[tuple[float, ...]] = []
    traffic: dict[str, int] = {}
    while len(steps) < work.steps and (len(steps) < LEAST_STEPS or 2 * sum(step.seconds for step in steps) < VISIT_S):
        device.reset_peak()
        seconds = _seconds_of_step(engine, optimizer, recipe, batches)
        peak_mib = device.peak_mib() - allocated_mib
        traffic = traffic or engine.traffic()["bytes"]
        events: list[dict[str, Any]] = []
        with traced(engine.rank, events):
            traced_s = _seconds_of_step(engine, optimizer, recipe, batches)
        terms = measured_ms(events, 1000 * traced_s)
        every, peak, *columns = engine.gather(seconds, peak_mib, *terms.values())
        ranks = tuple(dict(zip(TERMS, row, strict=True)) for row in zip(*columns, strict=True))
        steps.append(Step(seconds=max(every), terms_ms=ranks))
        peaks.append(peak)
    traffic["all_reduce"] -= scalars_bytes(plan, work.shape)
    beside_mib = device.beside_mib()
    is_measured = beside_mib is not None and idle_mib is not None
    reserved, grown_mib = engine.gather(device.reserved_peak_mib(), (beside_mib or 0.0) - (idle_mib or 0.0))
    return Visit(
        steps=tuple(steps),
        peaks_mib=tuple(map(max, zip(*peaks, strict=True))),
        reserved_mib=reserved,
        beside_mib=grown_mib if is_measured else (),
        communicators=1 + max(engine.traffic()["groups"]),
        bytes={kind: int(size) for kind, size in traffic.items() if size},
    ).model_dump()


def _seconds_of_step(engine: Engine, optimizer: Any, recipe: Recipe, batches: Iterator[Any]) -> float:
    """Seconds of one step of training."""
    began, batch = time.perf_counter(), next(batches)
    engine.forward_backward(batch)
    with span("optimizer", "optimizer"):
        engine.update(optimizer, recipe.max_grad_norm)
    next_rate(optimizer)
    device.synchronize()
    return time.perf_counter() - began


def _batches(work: Work, plan: Plan) -> Iterator[Any]:
    """Global batches [G, S + 1] of random tokens, the same on every rank."""
    size = (plan.global_batch, (plan.assumed.seq_length or 0) + 1)
    for number in count():
        yield np.random.default_rng([work.seed, number]).integers(0, work.shape.vocab_size, size)


if __name__ == "__main__":
    run_as_rank(main)
