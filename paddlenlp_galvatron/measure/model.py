"""Measures a model: the program of every rank of `galvatron profile model`."""

import sys

from ..model import measured_fingerprint
from ..runtime.device import on_gpu
from ..runtime.groups import run_as_rank, start_world
from .computation import ComputationProfiler, computation_profile
from .journal import Journal, Used
from .launcher import meta_of_rank, report_note, report_progress, spread_notes
from .memory import MemoryProfiler
from .options import ModelRun
from .stopwatch import Stopwatch

CHANGING = {"sequence_parallel", "budget_ms", "use_flash_attention"}  # options that change numbers


def main() -> None:
    """Measure, and write the files on the first rank."""
    run = ModelRun.model_validate_json(sys.argv[1])
    options, shapes, points = run.options, run.shapes, run.points
    rank, world_size = start_world()
    used = Used()
    per_node, precision = options.ranks_per_node, options.precision
    meta = meta_of_rank(world_size, model=measured_fingerprint(shapes), dtype=precision.value)
    identity = meta.fingerprint.model_dump() | options.model_dump(include=CHANGING)
    journal = Journal.open(options.output, "model", identity, rank, world_size, options.fresh)
    report_note(*journal.kept_note)
    flash = options.use_flash_attention
    if flash is None:  # training's default
        flash = on_gpu() and precision.mixed
    lengths = sorted({point.seq for point in points})
    timed, measured = run.computation * len(points) * len(run.degrees), run.memory * 2 * len(lengths)
    if run.computation:
        stopwatch = Stopwatch(world_size, per_node, options.budget_ms, options.time_budget_s)
        computation = ComputationProfiler(
            shapes,
            stopwatch,
            journal,
            precision,
            options.sequence_parallel,
            not options.every_size,
            flash,
            options.turns,
        )
        computation.measure(points, run.degrees, lambda done: report_progress(done, timed + measured))
        if rank == 0:
            profile = computation_profile(journal, shapes, precision, meta)
            report_note(*spread_notes(profile.meta))
            profile.save(options.output)
    if run.memory and rank == 0:
        samples = max(point.batch for point in points)
        memory = MemoryProfiler(shapes, journal, samples, precision, flash, used)
        file = memory.measure(lengths, run.degrees, meta, lambda done: report_progress(timed + done, timed + measured))
        file.save(options.output)


if __name__ == "__main__":
    run_as_rank(main)
