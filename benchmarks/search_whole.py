"""Whole searches: llama2-7b on measured profiles, and the Llama-3.1-405B shape on clusters of any size.

    python benchmarks/search_whole.py [--profiles FOLDER] [--scale] [--svg FILE]

Prints the search time (loading files and Python's start apart), the gap, and the process's peak memory. `--scale` grows
layers and devices; `--svg` draws that.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from math import log10
from pathlib import Path

from search_profiles import cost_model

from paddlenlp_galvatron.cost_model import load
from paddlenlp_galvatron.plan import load_model
from paddlenlp_galvatron.search import SearchOptions, SearchResult, search


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def report(name: str, result: SearchResult) -> None:
    step = f"{result.time_s:9.3f} s a step" if result.best else "     does not fit"
    print(f"{name:44} {step}  gap {result.gap:.1e}  search {result.search_time_s:6.3f} s  {peak_mib():4.0f} MiB")


def llama2_7b(folder: Path) -> None:
    model, slowest = load_model("llama2-7b"), 0.0
    for memory in (16, 24, 40, 80):
        for batch in (8, 16, 32, 64, 128):
            for sp_space in ("tp", "tp+sp"):
                options = SearchOptions(
                    memory_constraint=memory, settle_bsz=batch, sp_space=sp_space, seq_length=2048, max_tp_deg=8
                )
                cost = load(model, 1, 8, options.assumptions, folder=folder, options=options.cost_options)
                result = search(model, cost, options)
                report(f"llama2-7b, 8 devices, {memory} GB, batch {batch}, {sp_space}", result)
                slowest = max(slowest, result.search_time_s)
    print(f"slowest search: {slowest:.3f} s; peak memory {peak_mib():.0f} MiB")


def scaled(layers: int, nodes: int, *, parallel: bool = False) -> SearchResult:
    """The 405B shape with so many layers, on nodes of eight; every divisor, one or two samples a device."""
    model = replace(load_model("llama3-405b"), layers=layers)
    options = SearchOptions(
        num_nodes=nodes,
        memory_constraint=80,
        settle_bsz=16 * nodes if nodes < 1000 else 8 * nodes,
        seq_length=8192,
        sp_space="tp+sp",
        max_tp_deg=8 * nodes,
        max_pp_deg=8 * nodes,
        parallel_search=parallel,
        worker=2,
    )
    with tempfile.TemporaryDirectory() as folder:
        cost = cost_model(model, options, Path(folder))
    result = search(model, cost, options)
    report(f"{layers} layers, {8 * nodes} devices" + (", two threads" if parallel else ""), result)
    return result


def draw(file: Path, curves: dict[str, Sequence[tuple[float, float]]]) -> None:
    """Seconds of search over each size, side by side over logarithmic axes, as SVG."""
    width, height, left, top = 330, 220, 50, 40
    total = len(curves) * (left + width)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="{top + height + 40}">',
        '<rect width="100%" height="100%" fill="white"/>',
        '<g font-family="sans-serif" font-size="11" fill="#333">',
    ]
    for number, (name, points) in enumerate(curves.items()):
        x0 = left + number * (left + width)
        low, high = log10(points[0][0]), log10(points[-1][0])

        def place(x: float, y: float, x0: int = x0, low: float = low, high: float = high) -> tuple[float, float]:
            return x0 + (log10(x) - low) / (high - low) * (width - 40), top + (1 - log10(y)) / 3 * height

        parts.append(f'<text x="{x0}" y="20" font-size="13">search time (s) over {name}</text>')
        for seconds in (0.01, 0.1, 1, 10):
            _, y = place(points[0][0], seconds)
            parts.append(f'<path d="M{x0} {y:.1f}h{width - 40}" stroke="#ddd"/>')
            parts.append(f'<text x="{x0 - 8}" y="{y + 4:.1f}" text-anchor="end">{seconds:g}</text>')
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        parts.append(f'<polyline fill="none" stroke="#1f77b4" stroke-width="2" points="{path}"/>')
        for size, seconds in points:
            x, y = place(size, seconds)
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#1f77b4"/>')
            parts.append(f'<text x="{x:.1f}" y="{top + height + 20}" text-anchor="middle">{size:g}</text>')
            parts.append(f'<text x="{x:.1f}" y="{y - 8:.1f}" text-anchor="middle">{seconds:.2g}</text>')
    file.write_text("\n".join([*parts, "</g></svg>"]) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--profiles", type=Path, help="folder with profiles of llama2-7b on 8 devices, bf16, 2048 tokens"
    )
    parser.add_argument("--scale", action="store_true")
    parser.add_argument("--svg", type=Path)
    arguments = parser.parse_args()
    if arguments.profiles:
        llama2_7b(arguments.profiles)
    if arguments.scale or arguments.svg:
        over_layers = [(layers, scaled(layers, 128).search_time_s) for layers in (32, 64, 126, 250, 500, 1000)]
        over_devices = [(8 * nodes, scaled(126, nodes).search_time_s) for nodes in (2, 8, 32, 128, 512, 1250)]
        scaled(126, 128, parallel=True)
        scaled(1000, 1250)
        if arguments.svg:
            draw(arguments.svg, {"layers (1024 devices)": over_layers, "devices (126 layers)": over_devices})
    return 0


if __name__ == "__main__":
    sys.exit(main())
