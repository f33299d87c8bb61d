"""Measures a model: what every rank of a launch runs."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from ..models import load_family
from ..plan import ModelShape
from ..profiles import Meta, Shape
from ..runtime.groups import run_as_rank, start_world
from .computation import ComputationProfiler
from .launcher import fingerprint, report_progress
from .memory import MemoryProfiler
from .stopwatch import Stopwatch


@dataclass(frozen=True)
class ModelOptions:
    """What a launch is asked for."""

    output: str  # folder of the files
    shape: ModelShape
    points: list[tuple[int, int]]  # (samples, tokens of a sample) to time
    degrees: list[int]  # of tensor parallelism
    sequence_parallel: bool = False  # of the timed layers; memory is measured with and without
    computation: bool = True
    memory: bool = True
    budget_ms: float = 250  # spent on each set of laps

    @classmethod
    def from_json(cls, text: str) -> ModelOptions:
        content = json.loads(text)
        return cls(**{**content, "shape": ModelShape(**content["shape"])})


def main() -> None:
    """Measure, and write the files on the first rank."""
    options = ModelOptions.from_json(sys.argv[1])
    rank, world_size = start_world()
    shape, family = options.shape, load_family(options.shape.family)
    points = [Shape(*point) for point in options.points]
    lengths = sorted({point.seq for point in points})
    total = options.computation * len(points) * len(options.degrees) + options.memory * 2 * len(lengths)
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        report_progress(done, total)

    report_progress(0, total)
    meta = Meta(fingerprint=fingerprint(world_size, model=shape.fingerprint, dtype="fp32"))
    if options.computation:
        stopwatch = Stopwatch(world_size, options.budget_ms)
        computation = ComputationProfiler(shape, family, stopwatch, options.sequence_parallel)
        times = computation.measure(points, options.degrees, meta, tick)
        if rank == 0:
            times.save(Path(options.output))
    if options.memory and rank == 0:
        largest = max(point.batch for point in points)
        MemoryProfiler(shape, family, largest).measure(lengths, options.degrees, meta, tick).save(Path(options.output))


if __name__ == "__main__":
    sys.exit(run_as_rank(main))
