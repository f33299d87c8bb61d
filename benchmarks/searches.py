"""The gaps of hard and of whole searches, and their processor time.

    python benchmarks/searches.py [KIND ...] [--effort PASSES] [--profiles FOLDER]

Kinds: slow links (1 and 2 GB/s between nodes), many layers (500 and 1,000 on 1,024 devices), random prices (strided
groups, 96 layers on 48 devices), interleaved, experts (on H100 by its data sheet), scale (the shape of Llama-3.1-405B
with more layers and devices), sheets (usual models on usual clusters, by data sheets), measured (llama2-7b, with
`--profiles`: a folder of them, 8 devices, bf16, 2048 tokens).

Searches of models of usual kinds read profiles of a cluster that nobody measured: H100-like devices, eight a node, from
their data sheet. Times follow from floating-point operations at half of 989 TFLOP/s (bf16 dense), memory from
PaddleNLP's layers with flash attention; bandwidths are 300 GB/s in a node and 40 GB/s a device across nodes.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from paddlenlp_galvatron.base.units import MIB
from paddlenlp_galvatron.cost_model import CostModel, derive, load
from paddlenlp_galvatron.plan import ModelShape, load_model
from paddlenlp_galvatron.planner import FamilyOutcome, SearchOptions, SearchResult, search
from paddlenlp_galvatron.planner.question import Question
from paddlenlp_galvatron.profiles.data_sheet import load_data_sheet

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from planner.random_cost import RandomCost, model_of

FLOP_PER_MS = 0.5 * 989e12 / 1e3
INSIDE_MIB_PER_MS, ACROSS_MIB_PER_MS = 300e9 / 2**20 / 1e3, 40e9 / 2**20 / 1e3
GB_S = 1 / 40  # of the links between nodes
Case = tuple[str, Callable[[], SearchResult]]
SHEETS = (  # model, data sheet, devices, global batch, sequence length
    ("qwen3-8b", "rtx4090-24gb", 8, 64, 2048),
    ("llama2-7b", "l20-48gb", 8, 64, 2048),
    ("llama2-7b", "a100-80gb", 8, 256, 4096),
    ("qwen3-8b", "h800-80gb", 8, 256, 4096),
    ("qwen3-8b", "h100-80gb", 32, 256, 16384),
    ("llama3.1-8b", "h100-80gb", 64, 512, 8192),
    ("qwen2.5-7b", "h20-96gb", 16, 256, 8192),
    ("llama2-13b", "a100-80gb", 16, 256, 4096),
    ("llama2-13b", "a100-40gb", 32, 256, 4096),
    ("qwen3-14b", "h800-80gb", 16, 256, 8192),
    ("qwen3-14b", "a800-80gb", 64, 512, 4096),
    ("llama2-13b", "h100-80gb", 128, 1024, 4096),
    ("qwen3-32b", "h100-80gb", 16, 128, 4096),
    ("qwen3-32b", "h800-80gb", 64, 512, 8192),
    ("qwen3-32b", "a100-80gb", 32, 256, 4096),
    ("llama3-70b", "a100-80gb", 64, 512, 4096),
    ("llama3-70b", "a100-80gb", 256, 1024, 4096),
    ("llama3.1-70b", "h100-80gb", 64, 256, 8192),
    ("llama3.1-70b", "h100-80gb", 128, 128, 32768),
    ("llama3.1-70b", "h20-96gb", 64, 512, 4096),
    ("qwen2.5-72b", "h800-80gb", 256, 1024, 4096),
    ("llama3.1-405b", "h100-80gb", 256, 512, 8192),
    ("llama3.1-405b", "h100-80gb", 512, 1024, 8192),
    ("llama3.1-405b", "h100-80gb", 1024, 2048, 8192),
    ("llama3.1-405b", "a100-80gb", 1024, 1024, 4096),
    ("mixtral-8x7b", "a100-80gb", 32, 256, 4096),
    ("mixtral-8x7b", "h100-80gb", 64, 512, 4096),
    ("mixtral-8x22b", "h100-80gb", 64, 512, 4096),
    ("qwen3-30b-a3b", "h100-80gb", 16, 512, 4096),
    ("qwen3-235b-a22b", "h100-80gb", 128, 1024, 4096),
    ("qwen3-235b-a22b", "h800-80gb", 256, 1024, 8192),
    ("qwen3-235b-a22b", "h100-80gb", 1024, 4096, 4096),
)


def cost_model(model: ModelShape, options: SearchOptions, folder: Path, across: float = 1.0) -> CostModel:
    """Write the profiles to the folder and load them; links between nodes are `across` times as fast as above."""
    nodes, gpus = options.num_nodes, options.num_gpus_per_node
    write_profiles(model, nodes, gpus, options.seq_length or 8192, folder, across)
    return load(model, nodes, gpus, options.assumptions, folder=folder, options=options.cost_options)


def write_profiles(model: ModelShape, nodes: int, gpus: int, seq: int, folder: Path, across: float = 1.0) -> None:
    across_mib_per_ms = across * ACROSS_MIB_PER_MS
    cluster = f"{nodes}nodes_{gpus}gpus_per_node"
    shape = f"bf16_hidden_{model.hidden_size}_head_{model.heads}"
    sizes = [2**power for power in range(1, 20) if 2**power <= nodes * gpus]
    files: dict[str, object] = {
        f"allreduce_bandwidth_{cluster}": {
            f"allreduce_size_{size}_consec_{consecutive}": INSIDE_MIB_PER_MS
            if size <= gpus and (consecutive or nodes == 1)
            else across_mib_per_ms * min(size, gpus)
            for size in sizes
            for consecutive in (0, 1)
        },
        f"p2p_bandwidth_{cluster}": {f"pp_size_{size}": across_mib_per_ms for size in sizes},
        "overlap_coefficient": {"overlap_coe": 1.15},
        f"sp_time_{cluster}": {
            f"{kind}_size_{size}_{mib}MB_time": 0.02 + factor * mib / INSIDE_MIB_PER_MS
            for kind, factor in (("allreduce", 2.0), ("all2all", 1.0))
            for size in sizes
            if size <= gpus
            for mib in (1, 16, 256, 1024)
        },
        f"computation_profiling_{shape}": _times(model, seq),
        f"memory_profiling_{shape}": _memory(model, seq),
    }
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def _times(model: ModelShape, seq: int) -> dict[str, float]:
    layer = (2 * model.layer_parameters + 2 * seq * model.hidden_size) * seq / FLOP_PER_MS
    other = 2 * model.vocab_size * model.hidden_size * seq / FLOP_PER_MS
    # A tenth of a millisecond a call: small batches use a device badly.
    times = {f"layertype_0_bsz{b}_seq{seq}": layer + 0.1 / b for b in (1, 2, 4, 8)}
    return times | {f"layertype_other_bsz{b}_seq{seq}": other + 0.1 / b for b in (1, 2, 4, 8)}


def _memory(model: ModelShape, seq: int) -> dict[str, object]:
    token_mib = seq * 2 / MIB
    layer = token_mib * (8 * model.hidden_size + 4 * model.intermediate_size)
    degrees = (1, 2, 4, 8)
    checkpoint = {"checkpoint": token_mib * model.hidden_size}
    whole = 4 * checkpoint["checkpoint"]  # norms' inputs and outputs: on every rank without Megatron-SP
    activations = {
        "_sp": checkpoint | {str(tp): layer / tp for tp in degrees},
        "": checkpoint | {str(tp): whole + (layer - whole) / tp for tp in degrees},
    }
    table = 16 * model.vocab_size * model.hidden_size / MIB

    def vocabulary(tables: float, logits: bool) -> dict[str, object]:
        kept = token_mib * (model.hidden_size + (3 * model.vocab_size if logits else 0))
        states = {str(tp): tables * table / tp for tp in degrees}
        return {str(seq): {"model_states": states, "activation": {str(tp): kept / tp for tp in degrees}}}

    parameters = model.layer_parameters * 4 / MIB
    entries: dict[str, object] = {}
    for suffix, activation in activations.items():
        entries |= {
            f"layertype_0{suffix}": {
                str(seq): {"parameter_size": parameters, "tp_activation_per_bsz_dict": activation}
            },
            f"other_memory_pp_off{suffix}": vocabulary(2, True),
            f"other_memory_pp_on_first{suffix}": vocabulary(1, False),
            f"other_memory_pp_on_last{suffix}": vocabulary(1, True),
        }
    return entries


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


def by_sheet(name: str, sheet: str, gpus: int, batch: int, seq: int, **values: Any) -> SearchResult:
    asked = {"model_size": name, "device": sheet, "world_size": gpus, "settle_bsz": batch, "seq_length": seq}
    return Question.of(asked | values).search()


def scaled(layers: int, nodes: int, **values: Any) -> SearchResult:
    """The 405B shape with `layers` layers; every divisor, one or two samples a device."""
    batch = 16 * nodes if nodes < 1000 else 8 * nodes
    wide = {"settle_bsz": batch, "seq_length": 8192, "max_tp_deg": 8 * nodes, "max_pp_deg": 8 * nodes}
    return shaped("llama3-405b", layers, nodes, **wide | values)


def measured(profiles: Path, **values: Any) -> SearchResult:
    model, options = load_model("llama2-7b"), SearchOptions.from_mapping({"seq_length": 2048, "max_tp_deg": 8} | values)
    return search(model, load(model, 1, 8, options.assumptions, folder=profiles, options=options.cost_options), options)


def cases(effort: int | None, profiles: Path | None) -> Iterator[Case]:
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
    for layers in (32, 64, 126, 250, 500, 1000):
        yield f"scale: {layers} layers, 1,024 devices", lambda n=layers: scaled(n, 128, **given)
    for nodes in (2, 8, 32, 128, 512, 1250):
        yield f"scale: 126 layers, {8 * nodes:,} devices", lambda n=nodes: scaled(126, n, **given)
    yield "scale: 1,000 layers, 10,000 devices", lambda: scaled(1000, 1250, **given)
    for asked in SHEETS:
        yield "sheets: {}, {}, {} devices, batch {}, {} tokens".format(*asked), lambda a=asked: by_sheet(*a, **given)
    for gb, batch, space in product((16, 24, 40, 80), (8, 16, 32, 64, 128), ("tp", "tp+sp")) if profiles else ():
        values = {"memory_constraint": gb, "settle_bsz": batch, "sp_space": space} | given
        yield f"measured: {gb} GB, batch {batch}, {space}", lambda values=values: measured(profiles, **values)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", help="kinds of cases")
    parser.add_argument("--effort", type=int, help="as the search's option")
    parser.add_argument("--profiles", type=Path, help="folder of the kind `measured`")
    given = parser.parse_args()
    for name, run in cases(given.effort, given.profiles):
        if given.kinds and not name.startswith(tuple(given.kinds)):
            continue
        started = time.process_time()
        result = run()
        spent = time.process_time() - started
        given_up = sum(outcome is FamilyOutcome.GIVEN_UP for outcome in result.outcomes.values())
        plan = result.best.plan if result.best else None
        what = f"{plan.pipeline} stages x {plan.chunks}, {plan.micro_batches} micro-batches" if plan else "no plan"
        print(f"{name:62} gap {result.fastest_gap:.1e}  {spent:6.2f} s")
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        given_up_of = f"{given_up} of {len(result.outcomes)} given up"
        print(f"    {result.time_s * 1e3:.3f} ms, {given_up_of}, {what}; {peak_mib:.0f} MiB")
        if (best := result.best) and (fastest := result.fastest):
            gain = result.layer_wise_gain
            over = "no uniform plan fits" if gain is None else f"{gain:.2%} over uniform"
            runs = f"{fastest.strategies} strategies in {fastest.segments} segments"
            runs += f" -> {best.strategies} in {best.segments}"
            print(
                f"    {runs}, {best.time_s / fastest.time_s - 1:+.2%}; {over} (gap {result.uniform_gap:.1e})",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
