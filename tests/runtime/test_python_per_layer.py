"""Python's part of a layer does not grow unseen: calls into Paddle of a forward pass, those that launch nothing, too.

A layer's count is the difference between 2 layers and 6.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("paddle")

import paddle
from paddlenlp.transformers.llama.modeling import apply_rotary_pos_emb

from paddlenlp_galvatron.plan import Assumptions, LayerStrategy, ModelShape, Plan, Recompute
from paddlenlp_galvatron.profiles.analytic import CHECKPOINT_CALLS, FUSED_CALLS, GROUPED, LAYER_CALLS
from paddlenlp_galvatron.runtime import grouped
from paddlenlp_galvatron.runtime.adapters import load_family
from paddlenlp_galvatron.runtime.groups import RankGroups
from paddlenlp_galvatron.runtime.setup import ModelSetup
from paddlenlp_galvatron.runtime.stage import Stage

SEQ = 8
FEW, MANY = 2, 6  # layers
DENSE = ModelShape("narrow", "llama", 1, 16, 32, 2, 2, 32, SEQ)
MIXTURE = ModelShape("narrow", "qwen3_moe", 1, 16, 32, 2, 2, 32, SEQ, own_head_dim=8, experts=4, experts_per_token=2)
MIXTURE = replace(MIXTURE, expert_size=16, norm_topk=True, router_aux_loss_coef=0.001)
LOOKED_UP = 3  # calls more of PaddleNLP's own linear layers, each of which looks up flags before its product
LINEAR = 7
Q_AND_K, MLP = 17, 5  # calls of Qwen3's two norms more; of an MLP, which a layer of experts has not


def paddle_calls(run: Callable[[], Any]) -> int:
    """Calls from Python into Paddle's C++ functions and tensors' methods."""
    count = 0

    def count_call(_frame: Any, event: str, called: Any) -> None:
        nonlocal count
        if event == "c_call":
            owner = getattr(called, "__self__", None)
            of = getattr(called, "__module__", None) or getattr(owner, "__name__", "")
            count += isinstance(owner, paddle.Tensor) or "libpaddle" in str(of)

    sys.setprofile(count_call)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def together(left: Any, right: Any, counts: Any, transpose_left: bool, transpose_right: bool) -> Any:
    """Stands for one product of all experts, a kernel that CPUs lack."""
    columns = right.shape[-2 if transpose_right else -1]
    shape = (len(counts), left.shape[1]) if transpose_left else (left.shape[0],)
    return paddle.zeros([*shape, columns], left.dtype)


def layer_calls(strategy: LayerStrategy, shape: ModelShape = DENSE) -> float:
    """Calls of one more layer."""
    counts = []
    for layers in (FEW, MANY):
        plan = Plan(1, 1, 1, (layers,), (strategy,) * layers, assumed=Assumptions(seq_length=SEQ))
        setup = ModelSetup.of(plan, replace(shape, layers=layers), SEQ)
        stage = Stage(setup, RankGroups(plan, 0, SimpleNamespace(get=lambda ranks, use="": None)))
        (tokens,) = stage.take(np.zeros((1, SEQ), np.int64))
        for _ in range(2):  # the first passes prepare what later ones find ready
            stage.forward(None, tokens, tokens).backward()
            stage.accumulate_gradients()
        counts.append(paddle_calls(lambda stage=stage, tokens=tokens: stage.forward(None, tokens, tokens)))
    return (counts[1] - counts[0]) / (MANY - FEW)


def saved_by_fused_kernels() -> int:
    """Calls that plain norms and rotary positions have more than one fused kernel for each."""
    family = load_family(DENSE.family)
    config = family.config(DENSE, SEQ)
    norm, rotary = family.final_norm(config), family.decoder_layer(DENSE, config).self_attn.rotary_emb
    heads = paddle.randn([1, SEQ, 2, 8])
    cos, sin = rotary(heads, seq_len=SEQ)
    norms = 2 * (paddle_calls(lambda: norm(paddle.randn([SEQ, 16]))) - 2)  # one is the fused kernel, one makes x
    return norms + paddle_calls(lambda: apply_rotary_pos_emb(heads, heads, cos, sin, None)) - 1


@pytest.mark.slow
def test_a_layer_makes_the_calls_that_derived_profiles_price(monkeypatch):
    """Those of PaddleNLP's layer, which published runs have; fused kernels make fewer."""
    monkeypatch.setattr(grouped, "one_by_one", together)
    plain, again = layer_calls(LayerStrategy()), layer_calls(LayerStrategy(recompute=Recompute.FULL))
    experts, looked_up = layer_calls(LayerStrategy(), MIXTURE) - plain, LINEAR * LOOKED_UP
    counted = plain + looked_up, plain - saved_by_fused_kernels() + looked_up, again - plain
    assert counted == tuple(pytest.approx(number, abs=4) for number in (LAYER_CALLS, FUSED_CALLS, CHECKPOINT_CALLS))
    # Eight more than are priced: 0.06 ms of a layer's forward pass at 8 us a call (benchmarks/README.md).
    assert experts == pytest.approx(GROUPED.routing + Q_AND_K - MLP, abs=8)
