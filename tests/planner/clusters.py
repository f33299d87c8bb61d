"""Searches on clusters that nobody measured, whose answers are pinned.

Times follow from floating-point operations at half of an H100's 989 TFLOP/s (bf16 dense), memory from PaddleNLP's
layers with flash attention; bandwidths are 300 GB/s in a node of eight and 40 GB/s a device across nodes.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from paddlenlp_galvatron.base.units import MIB
from paddlenlp_galvatron.cost_model import CostModel, load
from paddlenlp_galvatron.plan import ModelShape, load_model
from paddlenlp_galvatron.planner import SearchOptions, SearchResult, search

from .random_cost import RandomCost, model_of

FLOP_PER_MS = 0.5 * 989e12 / 1e3
INSIDE_MIB_PER_MS, ACROSS_MIB_PER_MS = 300e9 / 2**20 / 1e3, 40e9 / 2**20 / 1e3
GB_S = 1 / 40  # of the links between nodes


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
