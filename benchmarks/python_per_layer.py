"""What Python does for a layer and micro-batch: calls into Paddle, and the time they take on this machine.

    python benchmarks/python_per_layer.py [--strategy plain]...

A GPU waits for Python where launching takes longer than computing. Tokens and widths are so small here that computing
takes next to nothing; what a layer adds is the difference between 2 layers and 6. Calls into Paddle are counted in the
forward pass, those that launch nothing too; the backward pass runs in Paddle's C++, but for the runtime's own seams.

From the calls follows, as an estimate, what launching a 7B layer takes of computing it: CALL_US for each call forward,
twice that backward, beside its arithmetic at a GPU's rate (a causal layer of 4,096 tokens in bf16, PEAK_TFLOPS x USED).
"fused" is plain with one call for each of both norms and for the rotary positions, whose kernels CPUs lack.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import paddle
from paddlenlp.transformers.llama.modeling import apply_rotary_pos_emb
from rich import box
from rich.console import Console
from rich.table import Table

from paddlenlp_galvatron.adapters import load_family
from paddlenlp_galvatron.plan import Assumptions, ModelShape, Precision, uniform_plan
from paddlenlp_galvatron.runtime.engine import Engine
from paddlenlp_galvatron.runtime.weights import SeededWeights

SEQ, TIMED = 8, 30
FEW, MANY = 2, 6  # layers
CALL_US = 8.0  # of one call on a GPU machine: Python, Paddle's dispatch, the launch
PEAK_TFLOPS, USED = 312.0, 0.5  # A100, bf16 (data sheet); what large products reach of it
TOKENS, WIDTH, WEIGHTS = 4096, 4096, 202e6  # of Llama-7B's layer
STRATEGIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "recompute": {"global_checkpoint": True},
    "bf16": {"precision": Precision.BF16},  # on CPU every layer casts at its edge
}


@dataclass(frozen=True)
class Cost:
    """Of a layer and micro-batch."""

    calls: float  # into Paddle in the forward pass
    forward_us: float
    backward_us: float

    @property
    def share(self) -> float:
        """Launching a 7B layer on one GPU beside computing it."""
        flops = 6 * WEIGHTS * TOKENS + 6 * TOKENS * TOKENS * WIDTH  # causal attention: half of 12 S^2 H
        return 3 * self.calls * CALL_US * 1e-6 / (flops / (PEAK_TFLOPS * 1e12 * USED))


def paddle_calls(run: Callable[[], Any]) -> int:
    """Calls from Python into Paddle's C++ functions and tensors' methods."""
    count = 0

    def told(_frame: Any, event: str, called: Any) -> None:
        nonlocal count
        if event == "c_call":
            owner = getattr(called, "__self__", None)
            of = getattr(called, "__module__", None) or getattr(owner, "__name__", "")
            count += isinstance(owner, paddle.Tensor) or "libpaddle" in str(of)

    sys.setprofile(told)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def of_layers(layers: int, precision: Precision = Precision.FP32, **options: Any) -> tuple[int, float, float]:
    """Calls forward, and medians of the forward and backward pass, s."""
    shape = ModelShape("narrow", "llama", layers, 16, 32, 2, 2, 32, SEQ)
    assumed = Assumptions(mixed_precision=precision, seq_length=SEQ)
    plan = uniform_plan(layers=layers, world_size=1, global_train_batch_size=1, assumed=assumed, **options)
    engine = Engine(plan, shape, load_family("llama"), SEQ, SeededWeights(0, 0.02))
    (tokens,) = engine.stage.take(np.zeros((1, SEQ), np.int64))
    times: list[tuple[float, float]] = []

    def forward() -> Any:
        return engine.stage.forward(None, tokens, tokens)

    for _ in range(TIMED):
        start = time.perf_counter()
        out = forward()
        middle = time.perf_counter()
        out.backward()
        engine.stage.settle()
        times.append((middle - start, time.perf_counter() - middle))
    return paddle_calls(forward), *(median(column) for column in zip(*times, strict=True))


def cost(**options: Any) -> Cost:
    """What a layer adds."""
    few, many = of_layers(FEW, **options), of_layers(MANY, **options)
    calls, forward_s, backward_s = ((more - less) / (MANY - FEW) for less, more in zip(few, many, strict=True))
    return Cost(calls, forward_s * 1e6, backward_s * 1e6)


def fused(plain: Cost) -> Cost:
    """With one call in the place of those of the plain norms and rotary positions."""
    shape = ModelShape("narrow", "llama", 1, 16, 32, 2, 2, 32, SEQ)
    family = load_family("llama")
    config = family.config(shape, SEQ)
    norm, rotary = family.final_norm(config), family.decoder_layer(shape, config).self_attn.rotary_emb
    heads = paddle.randn([1, SEQ, 2, 8])
    cos, sin = rotary(heads, seq_len=SEQ)
    norms = 2 * (paddle_calls(lambda: norm(paddle.randn([SEQ, 16]))) - 2)  # one is the fused kernel, one makes x
    turns = paddle_calls(lambda: apply_rotary_pos_emb(heads, heads, cos, sin, None)) - 1
    return Cost(plain.calls - norms - turns, 0.0, 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", action="append", choices=STRATEGIES, help="this one alone; may be repeated")
    table = Table(box=box.SIMPLE, title="a layer and micro-batch in Python; of a 7B layer's time")
    for column in ("strategy", "calls", "forward µs", "backward µs", "7B layer", "tp 8"):
        table.add_column(column, justify="left" if column == "strategy" else "right", no_wrap=True)
    costs = {name: cost(**STRATEGIES[name]) for name in parser.parse_args().strategy or STRATEGIES}
    if "plain" in costs:
        costs["fused"] = fused(costs["plain"])
    for name, of in costs.items():
        times = [f"{us:.0f}" if us else "-" for us in (of.forward_us, of.backward_us)]
        table.add_row(name, f"{of.calls:.0f}", *times, f"{of.share:.0%}", f"{8 * of.share:.0%}")
    Console().print(table)


if __name__ == "__main__":
    main()
