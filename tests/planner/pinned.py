"""Searches whose plans, gaps and processor times are pinned.

    python tests/planner/pinned.py            # writes pinned.json again from the core that is installed

Run it after a change of prices, and look at the differences: a change of the search alone must not make plans slower.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[1]))

from paddlenlp_galvatron.cost_model import derive
from paddlenlp_galvatron.plan import load_model
from paddlenlp_galvatron.planner import SearchOptions, SearchResult, search
from paddlenlp_galvatron.profiles.data_sheet import load_data_sheet
from planner.clusters import GB_S, random_prices, shaped

FILE = Path(__file__).with_name("pinned.json")
# Set here, so that a change of a default changes no pinned problem.
FIXED = {"simplest_within": 0.0, "default_dp_type": "ddp", "context_mib": 0.0, "max_tp_deg": 8, "max_pp_deg": 8}
FAST = 1.0  # of the usual speed between nodes

Run = Callable[[], SearchResult]


class Found(NamedTuple):
    """The result of a search."""

    time_ms: float  # of a step; infinite: nothing fits
    gap: float
    cpu_s: float


def on_nodes(name: str, nodes: int, across: float, layers: int | None = None, **options: Any) -> Run:
    """On H100-like nodes of eight, with links between them that are `across` times as fast as usual."""
    return lambda: shaped(name, layers, nodes, across, **FIXED | options)


def on_sheet(name: str, gpus: int, ki_tokens: int, **more: Any) -> Run:
    """On nodes of eight H100 from their data sheet, 4 Mi tokens a step: ZeRO-2, and the device's own reserve."""

    def run() -> SearchResult:
        sheet, shape, seq = load_data_sheet("h100-80gb"), load_model(name), ki_tokens * 1024
        shape = replace(shape, max_position_embeddings=max(seq, shape.max_position_embeddings))
        options = SearchOptions(
            num_nodes=gpus // sheet.gpus_per_node,
            num_gpus_per_node=sheet.gpus_per_node,
            world_size=gpus,
            memory_constraint=sheet.memory.value,
            settle_bsz=4 * 2**20 // seq,
            seq_length=seq,
            sp_space="tp+sp",
            default_dp_type="zero2",
            max_tp_deg=32,
            **more,
        )
        cost = derive(shape, sheet, options.num_nodes, options.num_gpus_per_node, options.assumptions)
        context_mib = cost.profiles.reserve.context_mib(sheet.memory.value * 1024)
        cost = cost.reserving(context_mib)
        return search(cost.models, cost, options.model_copy(update={"context_mib": context_mib}))

    return run


WIDE = {"max_tp_deg": 1024, "max_pp_deg": 1024, "seq_length": 8192}
NAMED: dict[str, Run] = {
    "405b, 1,024 devices": on_nodes("llama3-405b", 128, FAST, settle_bsz=2048, **WIDE),
    "7b, 32 devices, 1 GB/s": on_nodes("llama2-7b", 4, GB_S, memory_constraint=24),
    "13b, 32 devices, 2 GB/s": on_nodes("llama2-13b", 4, 2 * GB_S, memory_constraint=24),
    "70b, 128 devices, 1 GB/s": on_nodes("llama3-70b", 16, GB_S),
    "500 layers, 1,024 devices": on_nodes("llama3-405b", 128, FAST, 500, settle_bsz=2048, **WIDE),
    "random prices": lambda: random_prices(96, 0),
    "70b, 32K tokens, recompute by parts": on_sheet("llama3.1-70b", 64, 32, recompute_parts=True),
    "405b, recompute by parts": on_sheet("llama3.1-405b", 1024, 4, recompute_parts=True),
    "405b, context parallel": on_sheet("llama3.1-405b", 256, 4, max_cp_deg=32),
    "13b, interleaved": on_nodes("llama2-13b", 2, FAST, settle_bsz=64, max_virtual_pp_deg=4),
}
HARD: dict[str, Run] = {  # for the slow test
    "random prices that need branching": lambda: random_prices(96, 3),
    "70b, interleaved": on_nodes("llama3-70b", 4, FAST, settle_bsz=32, max_virtual_pp_deg=4),
    "405b, all dimensions": on_sheet(
        "llama3.1-405b", 256, 4, max_virtual_pp_deg=4, recompute_parts=True, max_cp_deg=32
    ),
}


def found(run: Run) -> Found:
    start = time.process_time()
    result = run()
    return Found(result.time_s * 1e3, result.fastest_gap, time.process_time() - start)


def pinned() -> dict[str, Any]:
    return json.loads(FILE.read_text())  # type: ignore[no-any-return]


def main() -> None:
    """Write the file again."""
    rows = {name: found(run) for name, run in (NAMED | HARD).items()}
    lines = [
        f"{json.dumps(name)}: {json.dumps([round(row.time_ms, 6), round(row.gap, 8), round(row.cpu_s, 2)])}"
        for name, row in rows.items()
    ]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
