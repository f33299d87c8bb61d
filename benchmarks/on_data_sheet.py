"""Searches on nodes of H100 that nobody measured: prices and options from their data sheet."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paddlenlp_galvatron.cost_model import CostModel, derive
from paddlenlp_galvatron.plan import load_model
from paddlenlp_galvatron.profiles.data_sheet import load_data_sheet
from paddlenlp_galvatron.search import SearchOptions

KI, TOKENS = 1024, 4 * 2**20  # of a step, whatever the length of its samples


def problem(name: str, gpus: int, seq: int, **more: Any) -> tuple[CostModel, SearchOptions]:
    """What to search with: ZeRO-2, the device's own reserve of memory, and `more` options. A model whose positions end
    earlier is given as many as a sample has."""
    sheet, shape = load_data_sheet("h100-80gb"), load_model(name)
    shape = replace(shape, max_position_embeddings=max(seq, shape.max_position_embeddings))
    nodes, cards = max(gpus // sheet.gpus_per_node, 1), min(gpus, sheet.gpus_per_node)
    options = SearchOptions(
        num_nodes=nodes,
        num_gpus_per_node=cards,
        world_size=gpus,
        memory_constraint=sheet.memory.value,
        settle_bsz=TOKENS // seq,
        seq_length=seq,
        sp_space="tp+sp",
        default_dp_type="zero2",
        **more,
    )
    cost = derive(shape, sheet, nodes, cards, options.assumptions)
    context_mib = cost.reserve.context_mib(sheet.memory.value * KI)
    return cost.reserving(context_mib), options.model_copy(update={"context_mib": context_mib})
