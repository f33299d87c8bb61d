"""The stage solver beside a tuned dynamic program over 1-MiB units, on the same tables.

    python benchmarks/search_solver.py [--instances 200]

Prints medians of both times, how many times faster, and by how much the program in whole MiB is worse.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pybind11

from paddlenlp_galvatron.search import solve

Instance = tuple[Any, Any, Any, float]


def instance(seed: int, layers: int, strategies: int, gb: int, *, alike: bool) -> Instance:
    """Realistic tables: time falls with memory, noisily; five token layouts, switching between which costs."""
    random = np.random.default_rng(seed)
    budget = gb * 1024.0
    memory = budget / layers * 4 ** (2 * random.random(strategies) - 1)
    time_s = 0.01 * (budget / layers / memory) ** 0.3 * (1 + 0.3 * random.random(strategies))
    memory, time_s = np.tile(memory, (layers, 1)), np.tile(time_s, (layers, 1))
    if not alike:
        memory *= 1 + 0.2 * random.random(memory.shape)
        time_s *= 1 + 0.2 * random.random(time_s.shape)
    layout = np.arange(strategies) % 5
    distance = np.abs(layout[:, None] - layout[None])
    return memory, time_s, (distance > 0) * 2e-4 + distance * 1e-4, budget


def build_peer(folder: Path) -> Callable[..., float]:
    """Compile the peer with the flags of its makers' users and more."""
    source = Path(__file__).with_name("peer_dp.cpp")
    target = folder / f"peer_dp{sysconfig.get_config_var('EXT_SUFFIX')}"
    includes = [f"-I{sysconfig.get_paths()['include']}", f"-I{pybind11.get_include()}"]
    flags = ["-O3", "-march=native", "-ffast-math", "-fno-finite-math-only", "-shared", "-std=c++17", "-fPIC"]
    subprocess.run(["c++", *flags, *includes, str(source), "-o", str(target)], check=True)
    spec = importlib.util.spec_from_file_location("peer_dp", target)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    result: Callable[..., float] = module.solve
    return result


def timed(call: Callable[[], Any], times: int) -> tuple[Any, float]:
    """Result, and median seconds of some calls."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - start)
    return result, median(seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=200, help="for the comparison of optima")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        peer = build_peer(Path(folder))
        print("layers  strategies  GB  kind     peer ms   ours ms  times faster  gap asked")
        for layers, strategies, gb in ((32, 32, 16), (32, 32, 80), (32, 50, 16), (32, 50, 40), (32, 50, 80)):
            for alike, gap in ((True, 0.0), (False, 1e-4), (False, 0.0)):
                tables = [instance(seed, layers, strategies, gb, alike=alike) for seed in range(3)]
                theirs = median(timed(partial(peer, *t), 1)[1] for t in tables)
                ours = median(timed(partial(solve, *t, gap), 9)[1] for t in tables)
                kind = "alike " if alike else "differ"
                print(
                    f"{layers:6} {strategies:11} {gb:3}  {kind} {theirs * 1e3:9.1f} {ours * 1e3:9.3f} "
                    f"{theirs / ours:13,.0f}  {gap:g}"
                )
        worse = []
        for seed in range(arguments.instances):
            random = np.random.default_rng(seed)
            layers, strategies = int(random.integers(4, 33)), int(random.integers(4, 33))
            table = instance(seed, layers, strategies, int(random.integers(2, 9)), alike=bool(seed % 2))
            theirs, ours = peer(*table), solve(*table).time_s
            assert ours <= theirs * (1 + 1e-9), f"instance {seed}: the peer found {theirs}, we {ours}"
            worse.append(theirs / ours - 1 if theirs < np.inf else 0.0)
        print(f"{len(worse)} instances: never worse than the peer; the peer is worse by up to {max(worse):.3%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
