"""How far a profile repeats itself: the same one several times, afresh, and how far its numbers differ.

    python benchmarks/profiler.py [--runs 3] [--nproc 2]

Processes are pinned to cores of their own where there are enough. A deviation is |number / median of the runs - 1|. Of
times over sizes the least-squares line is compared: its slope, and what it says in the middle. Memory must be the same
to the byte. The last lines are how well each time is told from the others (leave one out).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from paddlenlp_galvatron.cli.profile import profile_hardware, profile_model
from paddlenlp_galvatron.cli.quickstart import CONFIG, SEQ_LENGTH
from paddlenlp_galvatron.plan.files import write_text
from paddlenlp_galvatron.plan.model import shape_from_config
from paddlenlp_galvatron.plan.model_options import ModelOptions
from paddlenlp_galvatron.profiler.options import HardwareOptions, PointOptions, ProfileMode
from paddlenlp_galvatron.profiles import (
    ComputationProfile,
    HardwareProfile,
    MemoryProfile,
    computation_name,
    memory_name,
)

SHAPE = shape_from_config(CONFIG, "quickstart")
SIZE = ("fp32", SHAPE.hidden_size, SHAPE.heads)
END_MB = 16


def line(name: str, points: Mapping[float, float]) -> Iterator[tuple[str, float]]:
    """Slope of the least-squares line over sizes, errors taken relative, and its value at the smallest size."""
    x, y = np.array(list(points)), np.array(list(points.values()))
    slope, start = np.polyfit(x, y, 1, w=1 / y)
    yield f"{name}, slope", float(slope)
    yield f"{name}, start", float(start + slope * min(x))


def run(folder: Path, nproc: int) -> tuple[dict[str, float], MemoryProfile, Mapping[str, float]]:
    """One profile, afresh: its coefficients by name, its memory, and its fit errors."""
    write_text(folder / "config.json", json.dumps(CONFIG))
    profile_hardware(HardwareOptions(output=folder, nproc=nproc, end_mb=END_MB))
    points = PointOptions(output=folder, nproc=nproc, profile_mode=ProfileMode.BATCH, max_tp_deg=nproc)
    profile_model(points, ModelOptions(model_size=str(folder), seq_length=SEQ_LENGTH))
    hardware = HardwareProfile.load(1, nproc, folder=folder)
    found = {f"bandwidth, all-reduce {group}": value for group, value in hardware.allreduce_mib_per_ms.items()}
    found |= {f"bandwidth, {stages} stages": value for stages, value in hardware.p2p_mib_per_ms.items()}
    found["overlap"] = hardware.overlap_coe
    for group, times in hardware.messages_ms.items():
        found |= line(f"messages, {group.kind} {group.size} {'' if group.consecutive else 'strided'}", times)
    computation = ComputationProfile.load(folder / computation_name(*SIZE), *SIZE)
    for part, tp in sorted({(key.part, key.tp) for key in computation.passes}):
        passes = {key.batch: t for key, t in computation.passes.items() if (key.part, key.tp) == (part, tp)}
        found |= line(f"time, {part} tp {tp}", {batch: t.forward_ms + t.backward_ms for batch, t in passes.items()})
    memory = MemoryProfile.load(folder / memory_name(*SIZE), *SIZE)
    return found, memory, computation.meta.extra["fit_error"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--nproc", type=int, default=2)
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory(prefix="galvatron-profiles-") as folder:
        for number in range(arguments.runs):
            begin = time.monotonic()
            results.append(run(Path(folder, str(number)), arguments.nproc))
            print(f"run {number}: {time.monotonic() - begin:.0f} s")
    names = sorted(set.intersection(*(set(found) for found, _, _ in results)))
    worst: dict[str, list[float]] = {}
    for name in names:
        values = np.array([found[name] for found, _, _ in results])
        deviation = float(np.abs(values / np.median(values) - 1).max())
        worst.setdefault(name.partition(",")[0], []).append(deviation)
        print(f"{name:42} {'  '.join(f'{value:9.4g}' for value in values)}  {deviation:6.1%}")
    for kind, deviations in worst.items():
        middle, most = np.median(deviations), max(deviations)
        print(f"{kind}: {len(deviations)} numbers differ by {middle:.1%} (median), {most:.1%} at most")
    same = all(
        memory.layers == results[0][1].layers and memory.vocab == results[0][1].vocab for _, memory, _ in results
    )
    print(f"memory: {'the same to the byte' if same else 'DIFFERS'}")
    for number, (_, _, errors) in enumerate(results):
        print(f"run {number}: leave one out, median: {', '.join(f'{k} {v:.1%}' for k, v in errors.items())}")


if __name__ == "__main__":
    main()
