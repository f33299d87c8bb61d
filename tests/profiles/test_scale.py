"""A plan for many nodes is one that many nodes bear."""

from paddlenlp_galvatron.plan import DataParallel
from paddlenlp_galvatron.planner.question import Question


def test_a_search_over_1024_gpus_does_not_shard_all_weights_over_half_of_them():
    """Before, it chose tp 2 with zero3 over 512 ranks, one micro-batch and recompute. Such models need pipelines."""
    asked = {"model_size": "llama3.1-405b", "device": "h100", "num_nodes": 128, "num_gpus_per_node": 8}
    asked |= {"settle_bsz": 2048, "seq_length": 4096, "max_tp_deg": 8, "max_pp_deg": 16}
    plan = Question.of(asked).search().plan
    assert plan.pipeline > 1 and {layer.dp_type for layer in plan.layers} == {DataParallel.ZERO2}
