"""How far a profile repeats itself: the same one several times, afresh, and how far its numbers differ.

    python benchmarks/profiler.py [--runs 3] [--nproc 2]

A deviation is |number / median of the runs - 1|. Of times over sizes the least-squares line through what the search
reads at each size is compared, whichever of them were measured: its slope, and what it says at the smallest size. Where
each process has a core of its own, every coefficient must stay within 10 %; where they share cores, within the spread
that the files record, if that is more. Memory must be the same to the byte. The last lines are how well each time is
told from the others (leave one out). Exit code 1: something deviates by more.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paddlenlp_galvatron.base.writing import write_text
from paddlenlp_galvatron.cli.profile import profile_hardware, profile_model
from paddlenlp_galvatron.cli.quickstart import CONFIG, SEQ_LENGTH
from paddlenlp_galvatron.model import shape_from_config
from paddlenlp_galvatron.options.model_options import ModelOptions
from paddlenlp_galvatron.profiler.options import HardwareOptions, PointOptions, ProfileMode
from paddlenlp_galvatron.profiles import (
    ComputationProfile,
    HardwareProfile,
    MemoryProfile,
    computation_name,
    memory_name,
)
from paddlenlp_galvatron.profiles.curves import Curve
from paddlenlp_galvatron.profiles.hardware import message_key

SHAPE = shape_from_config(CONFIG, "quickstart")
SIZE = ("fp32", SHAPE.hidden_size, SHAPE.heads)
END_MB = 8  # larger ones depend on how much of the last cache and of the heap other programs and blocks left
ALLOWED = 0.1


class Coefficient(NamedTuple):
    value: float
    spread: float  # recorded, of the number itself or of the points behind it (median)


def line(name: str, points: Mapping[float, float], spread: Sequence[float]) -> Iterator[tuple[str, Coefficient]]:
    """Slope of the least-squares line over sizes, errors taken relative, and its value at the smallest size."""
    x, y = np.array(list(points)), np.array(list(points.values()))
    slope, start = np.polyfit(x, y, 1, w=1 / y)
    yield f"{name}, slope", Coefficient(float(slope), float(np.median(spread)))
    yield f"{name}, start", Coefficient(float(start + slope * min(x)), float(np.median(spread)))


def metas(folder: Path) -> list[dict[str, Any]]:
    """What the files say of their numbers."""
    return [json.loads(path.read_text()).get("galvatron", {}) for path in folder.glob("*.json")]


def recorded_spread(folder: Path) -> dict[str, float]:
    """Of every number of every file."""
    return {key: spread for meta in metas(folder) for key, spread in meta.get("spread", {}).items()}


def run(folder: Path, nproc: int) -> tuple[dict[str, Coefficient], MemoryProfile, Mapping[str, float]]:
    """One profile, afresh: its coefficients by name, its memory, and its fit errors."""
    write_text(folder / "config.json", json.dumps(CONFIG))
    options = HardwareOptions(output=folder, nproc=nproc, end_mb=END_MB, fresh=True)
    profile_hardware(options)
    hardware = HardwareProfile.load(1, nproc, folder=folder)
    points = PointOptions(output=folder, nproc=nproc, profile_mode=ProfileMode.BATCH, max_tp_deg=nproc)
    profile_model(points, ModelOptions(model_size=str(folder), seq_length=SEQ_LENGTH))
    spread = recorded_spread(folder)
    found = {
        f"bandwidth, all-reduce {size}{'' if consecutive else ' strided'}": Coefficient(
            value, spread[f"allreduce_size_{size}_consec_{int(consecutive)}"]
        )
        for (size, consecutive), value in hardware.allreduce_mib_per_ms.items()
    }
    for stages, value in hardware.p2p_mib_per_ms.items():
        found[f"bandwidth, {stages} stages"] = Coefficient(value, spread[f"pp_size_{stages}"])
    found["overlap"] = Coefficient(hardware.overlap_coe, spread["overlap_coe"])
    for group, times in hardware.messages_ms.items():
        name = f"messages, {group.kind} {group.size}{'' if group.consecutive else ' strided'}"
        read = Curve.rising(times.items())
        found |= line(
            name, {mib: read(mib) for mib in options.sizes_mib}, [spread[message_key(group, mib)] for mib in times]
        )
    computation = ComputationProfile.load(folder / computation_name(*SIZE), *SIZE)
    for part, tp in sorted({(key.part, key.tp) for key in computation.passes}):
        passes = {key.batch: t for key, t in computation.passes.items() if (key.part, key.tp) == (part, tp)}
        spreads = [
            spread[f"{part}_bsz{b}_seq{SEQ_LENGTH}_tp{tp}.{way}"] for b in passes for way in ("forward", "backward")
        ]
        whole = {float(batch): t.forward_ms + t.backward_ms for batch, t in passes.items()}
        found |= line(f"time, {part} tp {tp}", whole, spreads)
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
    shared = arguments.nproc > len(os.sched_getaffinity(0))
    names = sorted(set.intersection(*(set(found) for found, _, _ in results)))
    worst: dict[str, list[float]] = {}
    beyond = 0
    for name in names:
        values = np.array([found[name].value for found, _, _ in results])
        spread = float(np.median([found[name].spread for found, _, _ in results]))
        allowed = max(ALLOWED, spread) if shared else ALLOWED
        deviation = float(np.abs(values / np.median(values) - 1).max())
        worst.setdefault(name.partition(",")[0], []).append(deviation)
        beyond += deviation > allowed
        told = f"{deviation:6.1%} of {allowed:4.0%}{'' if deviation <= allowed else '  BEYOND'}"
        print(f"{name:42} {'  '.join(f'{value:9.4g}' for value in values)}  {told}")
    print(f"{len(names) - beyond} of {len(names)} coefficients repeat")
    for kind, deviations in worst.items():
        middle, most = np.median(deviations), max(deviations)
        print(f"{kind}: {len(deviations)} numbers differ by {middle:.1%} (median), {most:.1%} at most")
    same = all(
        memory.layers == results[0][1].layers and memory.vocab == results[0][1].vocab for _, memory, _ in results
    )
    print(f"memory: {'the same to the byte' if same else 'DIFFERS'}")
    for number, (_, _, errors) in enumerate(results):
        print(f"run {number}: leave one out, median: {', '.join(f'{k} {v:.1%}' for k, v in errors.items())}")
    sys.exit(0 if same and not beyond else 1)


if __name__ == "__main__":
    main()
