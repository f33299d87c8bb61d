"""Prints Python's calls into Paddle in one layer and micro-batch, and what a GPU's launches would take, as JSON.

    python tests/runtime/python_calls.py

Calls are counted in the forward pass, those that launch nothing too; the backward pass runs in Paddle's C++, but for
the runtime's own communication points. A layer's count is the difference between 2 layers and 6. Where ranks share a
layer this process is one of two; messages go nowhere, and each counts as a call.

From the calls follows, as an estimate, the share of a 7B layer's launches in its computation: CALL_US for each call
forward, twice that backward, against its arithmetic at a GPU's rate (a causal layer of 4,096 tokens, bf16, PEAK_TFLOPS
x USED). "fused" is plain with one call for each of both norms and for the rotary positions, and "experts", a layer of
Qwen3-MoE with its balance loss, has one for each product of all experts: CPUs lack these kernels.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import paddle
import paddle.distributed as dist
from paddlenlp.transformers.llama.modeling import apply_rotary_pos_emb

from paddlenlp_galvatron.plan import Assumptions, DataParallel, LayerStrategy, ModelShape, Plan, Precision, Recompute
from paddlenlp_galvatron.runtime import grouped
from paddlenlp_galvatron.runtime.adapters import load_family
from paddlenlp_galvatron.runtime.collectives import traffic_calls
from paddlenlp_galvatron.runtime.groups import RankGroups
from paddlenlp_galvatron.runtime.precision import on_device
from paddlenlp_galvatron.runtime.setup import ModelSetup
from paddlenlp_galvatron.runtime.stage import Stage

SEQ = 8
FEW, MANY = 2, 6  # layers
CALL_US = 8.0  # of one call on a GPU machine: Python, Paddle's dispatch, the launch
PEAK_TFLOPS, USED = 312.0, 0.5  # A100, bf16 (data sheet); the share that large products reach
TOKENS, WIDTH, WEIGHTS = 4096, 4096, 202e6  # of Llama-7B's layer
DENSE = ModelShape("narrow", "llama", 1, 16, 32, 2, 2, 32, SEQ)
MIXTURE = ModelShape("narrow", "qwen3_moe", 1, 16, 32, 2, 2, 32, SEQ, own_head_dim=8, experts=4, experts_per_token=2)
MIXTURE = replace(MIXTURE, expert_size=16, norm_topk=True, router_aux_loss_coef=0.001)
STRATEGIES: dict[str, tuple[Any, ...]] = {  # strategy, assumptions, and another shape than DENSE
    "plain": (LayerStrategy(), Assumptions()),
    "recompute": (LayerStrategy(recompute=Recompute.FULL), Assumptions()),
    "bf16": (LayerStrategy(), Assumptions(mixed_precision=Precision.BF16)),  # on CPU every layer casts at its edge
    "tp": (LayerStrategy(2), Assumptions()),
    "tp, Megatron-SP": (LayerStrategy(2), Assumptions(sequence_parallel=True)),
    "Ulysses": (LayerStrategy(2, ulysses=True), Assumptions()),
    "context parallel": (LayerStrategy(context=2), Assumptions()),
    "zero3": (LayerStrategy(dp_type=DataParallel.ZERO3), Assumptions()),
    "experts": (LayerStrategy(), Assumptions(), MIXTURE),
}


class Groups:
    """Stands for those of a rank whose messages go nowhere."""

    def get(self, ranks: tuple[int, ...], use: str = "") -> Any:
        """Its group, of which it is the first rank."""
        return None if len(ranks) == 1 else SimpleNamespace(ranks=[*ranks], nranks=len(ranks), rank=0, id=len(ranks))


NOWHERE = dict.fromkeys(
    ("all_reduce", "all_gather", "reduce_scatter", "alltoall_single", "broadcast"),
    lambda *_, **__: SimpleNamespace(wait=lambda: True, is_completed=lambda: True),
)


def share(calls: float) -> float:
    """Launching a 7B layer on one GPU against computing it."""
    flops = 6 * WEIGHTS * TOKENS + 6 * TOKENS * TOKENS * WIDTH  # causal attention: half of 12 S^2 H
    return 3 * calls * CALL_US * 1e-6 / (flops / (PEAK_TFLOPS * 1e12 * USED))


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
    """Stands for one product of all experts."""
    columns = right.shape[-2 if transpose_right else -1]
    shape = (len(counts), left.shape[1]) if transpose_left else (left.shape[0],)
    return paddle.zeros([*shape, columns], left.dtype)


@patch.multiple(dist.stream, **NOWHERE)
@patch.object(grouped, "one_by_one", together)
def of_layers(layers: int, strategy: LayerStrategy, assumed: Assumptions, shape: ModelShape) -> int:
    """Calls of a forward pass after one whole step."""
    world = 2 if strategy.dp_type is DataParallel.ZERO3 else strategy.ranks
    plan = Plan(world, world, 1, (layers,), (strategy,) * layers, assumed=replace(assumed, seq_length=SEQ))
    numbers = on_device(assumed.number_types)
    setup = ModelSetup.of(plan, replace(shape, layers=layers), SEQ, numbers=numbers)
    stage = Stage(setup, RankGroups(plan, 0, Groups()))
    (tokens,) = stage.take(np.zeros((1, SEQ), np.int64))
    for _ in range(2):  # the first passes prepare what later ones find ready
        stage.forward(None, tokens, tokens).backward()
        stage.accumulate_gradients()
    messages = traffic_calls.total()
    return paddle_calls(lambda: stage.forward(None, tokens, tokens)) + traffic_calls.total() - messages


def layer_calls(strategy: LayerStrategy, assumed: Assumptions, shape: ModelShape = DENSE) -> float:
    """Calls of one more layer."""
    few, many = (of_layers(layers, strategy, assumed, shape) for layers in (FEW, MANY))
    return (many - few) / (MANY - FEW)


def fused(plain: float) -> float:
    """With one call in the place of those of the plain norms and rotary positions."""
    family = load_family(DENSE.family)
    config = family.config(DENSE, SEQ)
    norm, rotary = family.final_norm(config), family.decoder_layer(DENSE, config).self_attn.rotary_emb
    heads = paddle.randn([1, SEQ, 2, 8])
    cos, sin = rotary(heads, seq_len=SEQ)
    norms = 2 * (paddle_calls(lambda: norm(paddle.randn([SEQ, 16]))) - 2)  # one is the fused kernel, one makes x
    turns = paddle_calls(lambda: apply_rotary_pos_emb(heads, heads, cos, sin, None)) - 1
    return plain - norms - turns


if __name__ == "__main__":
    calls = {name: layer_calls(*case) for name, case in STRATEGIES.items()}
    calls["fused"] = fused(calls["plain"])
    sys.stdout.write(json.dumps({name: [number, share(number)] for name, number in calls.items()}) + "\n")
