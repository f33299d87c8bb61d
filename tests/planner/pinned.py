"""Searches whose plans, gaps and processor times are pinned.

    python tests/planner/pinned.py            # writes pinned.json again from the core that is installed

Run it after a change of prices, and look at the differences: a change of the search alone must not make plans slower.
"""

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
from planner.random_cost import RandomCost, model_of

FILE = Path(__file__).with_name("pinned.json")
# Set here, so that a change of a default changes no pinned problem.
FIXED = {"simplest_within": 0.0, "max_pp_deg": 8}

Run = Callable[[], SearchResult]


class Found(NamedTuple):
    """The result of a search."""

    time_ms: float  # of a step; infinite: nothing fits
    gap: float
    cpu_s: float


def on_sheet(
    name: str, gpus: int, ki_tokens: int, node_gb_s: float | None = None, layers: int | None = None, **more: Any
) -> Run:
    """On nodes of eight H100 from their data sheet, or with other links between nodes, 4 Mi tokens a step: ZeRO-2, and
    the device's own reserve."""

    def run() -> SearchResult:
        sheet, shape, seq = load_data_sheet("h100-80gb"), load_model(name), ki_tokens * 1024
        if node_gb_s:
            sheet = sheet.model_copy(update={"network": sheet.network.model_copy(update={"value": node_gb_s})})
        longest = max(seq, shape.max_position_embeddings)
        shape = replace(shape, max_position_embeddings=longest, layers=layers or shape.layers)
        asked = {"num_nodes": gpus // 8, "memory_constraint": sheet.memory.value, "settle_bsz": 4 * 2**20 // seq}
        asked |= {"seq_length": seq, "sp_space": "tp+sp", "default_dp_type": "zero2", "max_tp_deg": 32}
        options = SearchOptions.from_mapping(asked | FIXED | more)
        cost = derive(shape, sheet, gpus // 8, 8, options.assumptions)
        context_mib = cost.profiles.reserve.context_mib(sheet.memory.value * 1024)
        cost = cost.reserving(context_mib)
        return search(cost.models, cost, options.model_copy(update={"context_mib": context_mib}))

    return run


def random_prices(seed: int) -> Run:
    asked = {"num_nodes": 6, "settle_bsz": 96, "seq_length": 12, "tp_consec": False, "sequence_parallel": False}
    asked |= {"memory_constraint": 3.0, "default_dp_type": "ddp", "max_tp_deg": 48, "max_pp_deg": 48}
    options = SearchOptions.from_mapping(asked)
    models = [model_of(96)]
    return lambda: search(models, RandomCost(models, options, seed), options)


WIDE = {"max_tp_deg": 1024, "max_pp_deg": 1024, "settle_bsz": 2048}
NAMED: dict[str, Run] = {
    "405b, 1,024 devices": on_sheet("llama3-405b", 1024, 8, **WIDE),
    "7b, 32 devices, 1 GB/s": on_sheet("llama2-7b", 32, 4, 8, memory_constraint=24, settle_bsz=64),
    "13b, 32 devices, 2 GB/s": on_sheet("llama2-13b", 32, 4, 16, memory_constraint=24, settle_bsz=64),
    "70b, 128 devices, 1 GB/s": on_sheet("llama3-70b", 128, 4, 8, settle_bsz=256, max_tp_deg=8),
    "500 layers, 1,024 devices": on_sheet("llama3-405b", 1024, 8, layers=500, **WIDE | {"max_tp_deg": 8}),
    "random prices": random_prices(0),
    "70b, 32K tokens, recompute by parts": on_sheet("llama3.1-70b", 64, 32, recompute_parts=True),
    "405b, recompute by parts": on_sheet("llama3.1-405b", 1024, 4, recompute_parts=True),
    "405b, context parallel": on_sheet("llama3.1-405b", 256, 4, max_cp_deg=32),
    "13b, interleaved": on_sheet("llama2-13b", 16, 4, settle_bsz=64, max_virtual_pp_deg=4),
}
HARD: dict[str, Run] = {  # for the slow test
    "random prices that need branching": random_prices(3),
    "70b, interleaved": on_sheet("llama3-70b", 32, 4, settle_bsz=32, max_virtual_pp_deg=4),
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
