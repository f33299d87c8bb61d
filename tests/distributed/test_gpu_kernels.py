"""Kernels that only GPUs run: whole plans with every fused kernel, by twins of those that a CPU has not."""

import json
from collections import Counter
from dataclasses import replace
from math import isfinite
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from paddlenlp_galvatron.check.parity.parity import Case, compare, small_case, write_cases
from paddlenlp_galvatron.launch.processes import launch
from paddlenlp_galvatron.runtime.paddle_private import batched_gemm

from .plans import Named, having, plan
from .test_latents import with_yarn

WORKER = str(Path(__file__).with_name("kernels_worker.py"))
TIMEOUT_S = 300.0
REFUSAL = "Do not support c_softmax_with_cross_entropy for cpu kernel"


@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (4, 2)])
def test_the_fused_loss_finds_the_communicator_that_was_made_for_it(tmp_path, ranks, stages):
    """Paddle's own operator: it begins no store of its own, and continues to its kernel, which a CPU has not."""
    launch(WORKER, ["loss", str(tmp_path), str(stages)], ranks, tmp_path / "log", TIMEOUT_S)
    reported = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    assert not [one["new"] for one in reported if one["new"]]
    refused = [REFUSAL in one["printed"] for one in reported]
    assert refused == [rank >= ranks - ranks // stages for rank in range(ranks)], reported


def cases(named: list[Named]) -> list[Case]:
    """With a vocabulary that every degree divides: the fused loss takes no padding. With two words some experts get no
    rows."""
    made = [small_case(one.plan, one.family, one.optimizer, 2, kv_heads=one.kv_heads, tied=one.tied) for one in named]
    made = [with_yarn(case) if case.shape.latents else case for case in made]  # which scales queries
    return [replace(case, shape=replace(case.shape, vocab_size=2 if case.shape.experts else 256)) for case in made]


FOUR = [
    Named("a pipeline, split vocabulary", plan(4, "2 2r 2n 2a", (2, 2), vocab="2", micro_batches=4), "qwen2", "adamw"),
    Named("ZeRO of odd sizes", plan(4, "1z 2z 4z", vocab="4z"), "qwen2", "adamw"),
    Named("cp, cp with tp, parts", plan(4, "1c4 2c2 1c2ma 2c2r", vocab="2"), "llama", kv_heads=2),
    Named("Ulysses", plan(4, "2u 4u 2ur", vocab="2u"), "qwen3"),
    Named("experts", having(plan(4, "1 2r 1z"), "4 2x2 1z"), "qwen3_moe", "adamw"),
    Named("latents under flash attention", having(plan(4, "2 2c2a 4ur 1z"), "4 2x2 1 1z"), "deepseek_v3"),
]


def test_plans_with_every_fused_kernel_train_as_one_process_does(tmp_path):
    of = cases(FOUR)
    write_cases(tmp_path, of)
    launch(WORKER, ["twins", str(tmp_path)], 4, tmp_path / "log", TIMEOUT_S)
    results = compare(tmp_path, of)
    assert all(result.agrees for result in results), [
        (one.name, result.max_loss_diff, result.max_grad_rel_diff, result.worst_gradient)
        for one, result in zip(FOUR, results, strict=True)
    ]
    calls = sum((Counter(json.loads((tmp_path / f"calls.{rank}").read_text())) for rank in range(4)), Counter())
    assert len(calls) == (8 if batched_gemm else 6) and all(calls.values()), calls  # each kernel has been called


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_token_of_nan_ends_a_run_with_experts_as_any_other(tmp_path, family):
    """A GPU's top-k gives it no experts. Each rank reports the loss, or leaves the step out and trains on."""
    of = [small_case(having(plan(2, "1 1"), layers), family, "adamw") for layers in ("1 1", "2 2", "2x1 1x2")]
    write_cases(tmp_path, of)
    launch(WORKER, ["nan", str(tmp_path)], 2, tmp_path / "log", TIMEOUT_S)
    for rank in range(2):
        for norms, sentence, chosen in json.loads((tmp_path / f"{rank}.json").read_text()):
            assert [isfinite(norm) for norm in norms] == [True, False, False, True]
            assert sentence.startswith("step 2: the loss is nan, the norm of the gradients nan; lower learning_rate")
            assert max(chosen) <= 2 * min(chosen)  # where all tokens are NaN, no expert gets most of their rows
