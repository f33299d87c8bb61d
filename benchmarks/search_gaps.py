"""The gaps of hard searches and their processor time.

    python benchmarks/search_gaps.py [NAME ...] [--effort PASSES]

Links between nodes of 1 and 2 GB/s; 500 and 1,000 layers on 1,024 devices; random prices with strided groups, 96 layers
on 48 devices; interleaved schedules; models with experts on H100 by its data sheet. NAME: only kinds that begin so.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from search_profiles import cost_model

from paddlenlp_galvatron.cost_model import derive
from paddlenlp_galvatron.plan import load_model
from paddlenlp_galvatron.profiles.data_sheet import load_data_sheet
from paddlenlp_galvatron.search import FamilyOutcome, SearchOptions, SearchResult, search

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from search.random_cost import RandomCost, model_of

GB_S = 1 / 40  # of the links between nodes in `search_profiles`
Case = tuple[str, Callable[[], SearchResult]]


def shaped(name: str, layers: int | None, nodes: int, across: float = 1.0, **values: Any) -> SearchResult:
    """A model on H100-like nodes of eight."""
    model = load_model(name)
    model = replace(model, layers=layers or model.layers)
    options = SearchOptions.from_mapping(
        {"num_nodes": nodes, "memory_constraint": 80, "settle_bsz": 16 * nodes, "seq_length": 4096, "sp_space": "tp+sp"}
        | values
    )
    with tempfile.TemporaryDirectory() as folder:
        cost = cost_model(model, options, Path(folder), across)
    return search(model, cost, options)


def random_prices(layers: int, seed: int, **values: Any) -> SearchResult:
    options = SearchOptions.from_mapping(
        {
            "num_nodes": 6,
            "settle_bsz": 96,
            "seq_length": 12,
            "tp_consec": False,
            "sequence_parallel": False,
            "memory_constraint": 3.0,
            "default_dp_type": "ddp",
            "max_tp_deg": 48,
            "max_pp_deg": 48,
        }
        | values
    )
    models = [model_of(layers)]
    return search(models, RandomCost(models, options, seed), options)


def with_experts(name: str, gpus: int, batch: int, **values: Any) -> SearchResult:
    model = load_model(name)
    asked = {"device": "h100", "memory_constraint": 79.1, "context_mib": 8000, "mixed_precision": "bf16"}
    options = SearchOptions.from_mapping(
        {"num_nodes": gpus // 8, "settle_bsz": batch, "seq_length": 4096, "sequence_parallel": True} | asked | values
    )
    sheet = load_data_sheet(options.device or "")
    return search(model, derive(model, sheet, gpus // 8, 8, options.assumptions, options.cost_options), options)


def cases(effort: int | None) -> Iterator[Case]:
    given = {} if effort is None else {"effort": effort}
    for gb_s in (1, 2):
        for name, nodes in (
            ("llama2-7b", 2),
            ("llama2-7b", 4),
            ("llama2-13b", 4),
            ("llama3-70b", 8),
            ("llama3-70b", 16),
        ):
            for gb in (24, 80):
                yield (
                    f"slow links: {gb_s} GB/s, {name}, {nodes} x 8, {gb} GB",
                    lambda a=(name, None, nodes, gb_s * GB_S), gb=gb: shaped(*a, memory_constraint=gb, **given),
                )
    for layers in (500, 1000):
        values = {"settle_bsz": 2048, "seq_length": 8192, "max_tp_deg": 1024, "max_pp_deg": 1024} | given
        yield f"many layers: {layers} x 1,024 devices", lambda n=layers, v=values: shaped("llama3-405b", n, 128, **v)
    for seed in range(4):
        yield f"random prices: 96 layers, 48 devices, seed {seed}", lambda s=seed: random_prices(96, s, **given)
    for name, nodes, v in (
        ("llama2-7b", 1, 4),
        ("llama2-13b", 2, 4),
        ("llama3-70b", 4, 4),
        ("llama3-70b", 8, 8),
        ("llama3-405b", 128, 4),
    ):
        for per_node in (8, 32):
            values = {"max_virtual_pp_deg": v, "settle_bsz": per_node * nodes, "max_pp_deg": 16} | given
            yield (
                f"interleaved: {name}, {8 * nodes} devices, batch {per_node * nodes}, v <= {v}",
                lambda a=(name, None, nodes), values=values: shaped(*a, **values),
            )
    for name, gpus, batch in (
        ("qwen3-30b-a3b", 64, 512),
        ("qwen3-235b-a22b", 256, 1024),
        ("qwen3-235b-a22b", 256, 2048),
        ("qwen3-235b-a22b", 1024, 4096),
        ("mixtral-8x7b", 64, 512),
    ):
        yield f"experts: {name}, {gpus} devices, batch {batch}", lambda a=(name, gpus, batch): with_experts(*a, **given)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="kinds of cases")
    parser.add_argument("--effort", type=int, help="as the search's option")
    arguments = parser.parse_args()
    for name, run in cases(arguments.effort):
        if arguments.names and not name.startswith(tuple(arguments.names)):
            continue
        started = time.process_time()
        result = run()
        spent = time.process_time() - started
        given_up = sum(outcome is FamilyOutcome.GIVEN_UP for outcome in result.outcomes.values())
        plan = result.best.plan if result.best else None
        what = f"{plan.pipeline} stages x {plan.chunks}, {plan.micro_batches} micro-batches" if plan else "no plan"
        print(f"{name:58} gap {result.gap:.1e}  {spent:6.2f} s")
        print(f"    {result.time_s * 1e3:.3f} ms, {given_up} of {len(result.outcomes)} given up, {what}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
