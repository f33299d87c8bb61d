"""Whole searches: llama2-7b on measured profiles, and the Llama-3.1-405B shape on clusters of any size.

    python benchmarks/search_whole.py [--profiles FOLDER] [--scale]

Prints the search time (loading files and Python's start apart), the gap, and the process's peak memory. `--scale` grows
layers and devices.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from search_profiles import cost_model

from paddlenlp_galvatron.cost_model import load
from paddlenlp_galvatron.plan import load_model
from paddlenlp_galvatron.search import SearchOptions, SearchResult, search


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def report(name: str, result: SearchResult) -> None:
    step = f"{result.time_s:8.3f} s" if result.best else "no plan"
    print(f"{name:36} {step:>10}  gap {result.gap:.1e}  in {result.search_time_s:6.3f} s  {peak_mib():4.0f} MiB")


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
                report(f"llama2-7b, {memory} GB, batch {batch}, {sp_space}", result)
                slowest = max(slowest, result.search_time_s)
    print(f"slowest search: {slowest:.3f} s; peak memory {peak_mib():.0f} MiB")


def scaled(layers: int, nodes: int, *, parallel: bool = False) -> None:
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--profiles", type=Path, help="folder with profiles of llama2-7b on 8 devices, bf16, 2048 tokens"
    )
    parser.add_argument("--scale", action="store_true")
    arguments = parser.parse_args()
    if arguments.profiles:
        llama2_7b(arguments.profiles)
    if arguments.scale:
        for layers in (32, 64, 126, 250, 500, 1000):
            scaled(layers, 128)
        for nodes in (2, 8, 32, 128, 512, 1250):
            scaled(126, nodes)
        scaled(126, 128, parallel=True)
        scaled(1000, 1250)
    return 0


if __name__ == "__main__":
    sys.exit(main())
