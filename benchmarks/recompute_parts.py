"""What recompute by parts brings, as predicted: searches with and without it, on profiles derived from a data sheet.

    python benchmarks/recompute_parts.py [--device h100-80gb]

Prints a table: the best plan's step time without recompute_parts and with it, what its layers recompute, and how long
both searches took.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from paddlenlp_galvatron.cost_model.derived import derive
from paddlenlp_galvatron.plan import Plan, load_model
from paddlenlp_galvatron.profiles.data_sheet import load_data_sheet
from paddlenlp_galvatron.search import SearchOptions, SearchResult, search

# Model, nodes of eight, tokens of a sample, samples of a step.
CASES = (
    ("llama3.1-8b", 1, 4096, 64),
    ("llama3.1-8b", 1, 8192, 32),
    ("llama3.1-8b", 1, 32768, 16),
    ("llama3.1-8b", 8, 8192, 256),
    ("llama3.1-70b", 4, 8192, 128),
    ("llama3.1-70b", 8, 8192, 256),
    ("llama3.1-70b", 16, 8192, 256),
    ("llama3.1-70b", 16, 32768, 128),
)


def searched(model: str, nodes: int, seq: int, batch: int, device: str, parts: bool) -> SearchResult:
    sheet = load_data_sheet(device)
    options = SearchOptions(
        num_nodes=nodes,
        memory_constraint=sheet.memory.value,
        settle_bsz=batch,
        seq_length=seq,
        sp_space="tp+sp",
        max_tp_deg=8,
        default_dp_type="zero2",
        use_flash_attention=True,
        context_mib=4096,
        recompute_parts=parts,
        parallel_search=True,
    )
    shape = load_model(model)
    cost = derive(shape, sheet, nodes, 8, options.assumptions, options.cost_options)
    return search(shape, cost, options)


def recomputed(plan: Plan) -> str:
    counts = Counter(layer.recompute.words for layer in plan.layers)
    return ", ".join(f"{count} {words}" for words, count in counts.most_common())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="h100-80gb")
    device = parser.parse_args().device
    print("| model | GPUs | tokens | batch | without, s | with, s | gain | layers recompute | gap | searches, s |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for model, nodes, seq, batch in CASES:
        whole, parts = (searched(model, nodes, seq, batch, device, parts) for parts in (False, True))
        where = f"| {model} | {8 * nodes} | {seq:,} | {batch} |"
        if parts.best is None:
            print(f"{where} does not fit | does not fit | | | | |")
            continue
        gain = f"{whole.time_s / parts.time_s - 1:.1%}" if whole.best else "fits"
        words = f"{recomputed(whole.plan) if whole.best else '-'} -> {recomputed(parts.plan)}"
        times = f"{whole.search_time_s:.2f}, {parts.search_time_s:.2f}"
        without = f"{whole.time_s:.3f}" if whole.best else "does not fit"
        print(f"{where} {without} | {parts.time_s:.3f} | {gain} | {words} | {parts.gap:.1e} | {times} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
