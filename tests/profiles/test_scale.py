"""Losses with more nodes: published speeds of InternEvo and llm-foundry; one number was fitted to each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paddlenlp_galvatron.cost_model import derive
from paddlenlp_galvatron.model import ModelShape, Recompute
from paddlenlp_galvatron.plan import Assumptions, DataParallel, Precision, uniform_plan
from paddlenlp_galvatron.planner.question import Question
from paddlenlp_galvatron.profiles.data_sheet import HALF_RANKS, DataSheet, load_data_sheet

SEQ = 2048
H100, A100 = load_data_sheet("h100"), load_data_sheet("a100")
ROCE = A100.model_copy(  # 4 x 100 Gb/s a node
    update={"network": A100.network.model_copy(update={"value": 50.0}), "half_ranks": HALF_RANKS}
)
INTERNLM = ModelShape("internlm-7b", "llama", 32, 4096, 11008, 32, 32, 103168, SEQ)
MPT = {  # layers, width, heads
    "3b": (32, 2560, 20),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (64, 8192, 64),
}


def tokens_per_s(
    shape: ModelShape, sheet: DataSheet, gpus: int, samples: int, recompute: Recompute = Recompute.NONE, **how: Any
) -> float:
    """Speed of a GPU, with so many samples of each a step."""
    zero3 = "sdp" in how
    assumed = Assumptions(False, Precision.BF16, not zero3, SEQ, zero3, True)
    size = {"layers": shape.layers, "world_size": gpus, "global_train_batch_size": gpus * samples}
    plan = uniform_plan(**size, assumed=assumed, **how)
    plan = replace(plan, layers=tuple(replace(layer, recompute=recompute) for layer in plan.layers))
    return samples * SEQ / derive(shape, sheet, gpus // 8, 8, assumed).predict(plan).time_s


@pytest.mark.parametrize(("tp", "measured"), [(1, 2271 / 4062), (2, 2785 / 3822)])
def test_zero1_of_internevo_loses_as_much_on_1024_gpus(tp, measured):
    how = {"global_tp_deg": tp, "vocab_tp": tp, "chunks": 4, "default_dp_type": DataParallel.ZERO2}
    few, many = (tokens_per_s(INTERNLM, ROCE, gpus, 8, **how) for gpus in (8, 1024))
    assert many / few == pytest.approx(measured, abs=0.03)


@pytest.mark.parametrize(
    ("size", "samples", "measured"),
    [("3b", 8, 21664 / 23422), ("13b", 16, 4952 / 5080), ("30b", 8, 2115 / 2199), ("70b", 8, 1007 / 1058)],
)
def test_fsdp_of_llm_foundry_loses_as_much_from_128_to_512_gpus(size, samples, measured):
    layers, hidden, heads = MPT[size]
    shape = ModelShape(size, "llama", layers, hidden, round(8 * hidden / 3), heads, heads, 50368, SEQ, True)
    recompute = Recompute.NONE if size == "3b" else Recompute.FULL
    how = {"default_dp_type": DataParallel.ZERO2} if size == "3b" else {"sdp": True}
    few, many = (tokens_per_s(shape, H100, gpus, samples, recompute, **how) for gpus in (128, 512))
    assert many / few == pytest.approx(measured, abs=0.03)


def test_a_search_over_1024_gpus_does_not_shard_all_weights_over_half_of_them():
    """Before, it chose tp 2 with zero3 over 512 ranks, one micro-batch and recompute. Such models need pipelines."""
    asked = {"model_size": "llama3.1-405b", "device": "h100", "num_nodes": 128, "num_gpus_per_node": 8}
    asked |= {"settle_bsz": 2048, "seq_length": 4096, "max_tp_deg": 8, "max_pp_deg": 16}
    plan = Question.of(asked).search().plan
    assert plan.pipeline > 1 and {layer.dp_type for layer in plan.layers} == {DataParallel.ZERO2}
