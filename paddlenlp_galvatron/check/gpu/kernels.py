"""The part that compares Paddle's GPU kernels with plain operations, at the sizes of real layers.

Run as a program it is the process that computes. Its arguments are a folder and the number of the first kernel; it
writes each kernel's difference as `<number>.json`.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import paddle
from paddle.incubate.nn.functional import fused_rotary_position_embedding, swiglu
from paddle.nn import functional

from ...launch.gpus import FLASH_VERSION, THIRD, has_flash_attention_3
from ...runtime import device
from ...runtime.attention import flash as flash_attention
from ...runtime.attention import hidden_rows
from ...runtime.cross_entropy import CrossEntropy, VocabularyShard
from ...runtime.experts import Products
from ...runtime.groups import run_as_rank, sentence, start_world
from ...runtime.kernels import rms_norm as fused_rms_norm
from ...runtime.paddle_private import MultiTensorAdamW
from ..findings import Finding
from .setting import CheckSetting, in_turn

TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-4}  # share of the largest number of a result: a few roundings of the dtype
# Relative error of a rounding, and the factor of sqrt(n) roundings that n successive additions in this dtype may have.
# At most 1.9 in 50 emulated seeds that round every addition.
ROUNDING, SPREAD = {"bfloat16": 2**-9, "float32": 2**-24}, 3
SUMMED_AT_ONCE = 32  # tokens of the embedding's gradient, in fp32 (launch.gpus.ON_GPUS)
RATE, BETAS, EPSILON, DECAY = 1e-2, (0.9, 0.95), 1e-8, 0.1
NORM_EPSILON = 1e-6


def kernels(setting: CheckSetting) -> Iterator[Finding]:
    """Compare result and gradients of each kernel with those of plain fp32 operations on the same device."""

    def start(first: int, number: int) -> None:
        setting.launch(f"{__package__}.kernels", setting.folder, first, ranks=1, logs=setting.folder / f"{number}")

    def judge(index: int) -> Finding | None:
        path = setting.folder / f"{index}.json"
        return _judged(setting, NAMES[index], json.loads(path.read_text())) if path.exists() else None

    return in_turn(setting, NAMES, start, judge)


def _judged(setting: CheckSetting, name: str, result: dict[str, str | float]) -> Finding:
    if "missing" in result:
        return setting.skipped(name, f"Paddle does not have it on this processor: {result['missing']}")
    off, tolerance = float(result["off"]), float(result["tolerance"])
    return setting.found(name, off <= tolerance, f"{result['worst']} off by {off:.1e} of {tolerance:.0e}")


@dataclass(frozen=True)
class Sizes:
    """Sizes and dtype of the kernels' inputs."""

    heads: int
    kv_heads: int
    head_dim: int
    tokens: int
    hidden: int
    inner: int
    vocabulary: int
    dtype: str


ON_GPU = Sizes(8, 2, 128, 4096, 4096, 11008, 32_000, "bfloat16")
ON_CPU = Sizes(8, 2, 16, 64, 48, 80, 96, "float32")


class KernelCase(NamedTuple):
    """A kernel and its plain counterpart, with inputs that get gradients."""

    kernel: Callable[..., Any]  # returns one tensor or several
    plain: Callable[..., Any]  # the same in fp32
    inputs: list[Any]
    additions: int = 1  # successive additions that the kernel rounds to the inputs' dtype, at most

    def tolerance(self, dtype: str) -> float:
        """Allowed error, as a share of the result's largest number."""
        return max(TOLERANCE[dtype], SPREAD * ROUNDING[dtype] * sqrt(self.additions))


def attention(query: Any, key: Any, value: Any, rows: Any, ends: Any = None) -> Any:
    """[1, q, heads, D], [1, S, kv heads, D] twice and the position of each query -> [1, q, heads, D]. Each query sees
    the keys up to its position. With `ends` [S], the end row of each key's document, it sees only its own document."""
    groups = query.shape[2] // key.shape[2]
    key, value = (x.unsqueeze(3).expand([*x.shape[:3], groups, -1]).flatten(2, 3) for x in (key, value))
    query, key, value = (x.transpose([0, 2, 1, 3]) for x in (query, key, value))
    scores = paddle.matmul(query, key, transpose_y=True) * query.shape[-1] ** -0.5
    hidden = paddle.arange(key.shape[2], dtype=rows.dtype).unsqueeze(0) > rows.unsqueeze(1)
    if ends is not None:
        hidden = paddle.logical_or(hidden, rows.unsqueeze(1) >= ends)
    scores = paddle.where(hidden, paddle.full([], -1e30, scores.dtype), scores)
    return paddle.matmul(functional.softmax(scores, -1), value).transpose([0, 2, 1, 3])


def _heads(sizes: Sizes, tokens: int) -> list[Any]:
    """q of `tokens` tokens, k and v of all."""
    shapes = ((tokens, sizes.heads), (sizes.tokens, sizes.kv_heads), (sizes.tokens, sizes.kv_heads))
    return [paddle.randn([1, *shape, sizes.head_dim]) for shape in shapes]


def flash(sizes: Sizes) -> KernelCase:
    """Causal attention of whole samples."""
    return _attention_of(flash_attention(), paddle.arange(sizes.tokens), _heads(sizes, sizes.tokens))


def flashmask(sizes: Sizes, rank: int) -> KernelCase:
    """Two of four chunks of the queries, all keys."""
    chunk = sizes.tokens // 4
    chunks = tuple((index * chunk, (index + 1) * chunk) for index in sorted((rank, 3 - rank)))
    attend = flash_attention(hidden_rows(chunks, sizes.tokens))
    rows = paddle.concat([paddle.arange(start, stop) for start, stop in chunks])
    return _attention_of(attend, rows, _heads(sizes, 2 * chunk))


def packed(sizes: Sizes) -> KernelCase:
    """A row of two documents."""
    first, rows = sizes.tokens // 3, paddle.arange(sizes.tokens, dtype="int32")
    ends = first + (rows >= first).astype("int32") * (sizes.tokens - first)
    attend = flash_attention(ends.reshape([1, 1, -1, 1]), causal=True)
    return _attention_of(attend, rows, _heads(sizes, sizes.tokens), ends)


def latents(make: Callable[[Sizes], KernelCase], sizes: Sizes) -> KernelCase:
    """The same case with DeepSeek-V3's heads: keys 1.5 times as wide as values, one kv head per head."""
    case = make(replace(sizes, kv_heads=sizes.heads, head_dim=3 * sizes.head_dim // 2))
    query, key, value = case.inputs
    return case._replace(inputs=[query, key, value[..., : sizes.head_dim].contiguous()])


def _attention_of(attend: Callable[..., Any], rows: Any, inputs: list[Any], ends: Any = None) -> KernelCase:
    """The runtime's attention for these rows, and plain matrix products."""
    return KernelCase(
        lambda q, k, v: attend(q, None, k, v), lambda q, k, v: attention(q, k, v, rows, ends).flatten(2), inputs
    )


def rotary(sizes: Sizes) -> KernelCase:
    """Rotary positions of the halves of each head, by PaddleNLP's tables."""
    rates = 10_000.0 ** (-paddle.arange(0, sizes.head_dim, 2, dtype="float32") / sizes.head_dim)
    angles = paddle.arange(sizes.tokens, dtype="float32").unsqueeze(1) * paddle.concat([rates, rates]).unsqueeze(0)
    tables = [table.reshape([1, sizes.tokens, 1, sizes.head_dim]) for table in (paddle.cos(angles), paddle.sin(angles))]

    def kernel(query: Any, key: Any) -> Any:
        cos, sin = (table.astype(query.dtype) for table in tables)
        turned = fused_rotary_position_embedding(query, key, None, sin=sin, cos=cos, use_neox_rotary_style=False)
        return turned[:2]

    def plain(*inputs: Any) -> Any:
        cos, sin = (table.astype(sizes.dtype).astype("float32") for table in tables)
        halves = (x.chunk(2, axis=-1) for x in inputs)
        return [x * cos + paddle.concat([-b, a], -1) * sin for x, (a, b) in zip(inputs, halves, strict=True)]

    return KernelCase(kernel, plain, _heads(sizes, sizes.tokens)[:2])


def rms_norm(sizes: Sizes) -> KernelCase:
    return KernelCase(
        partial(fused_rms_norm, epsilon=NORM_EPSILON),
        lambda x, weight: x * paddle.rsqrt(x.square().mean(-1, keepdim=True) + NORM_EPSILON) * weight,
        [paddle.randn([sizes.tokens, sizes.hidden]), 1 + paddle.randn([sizes.hidden])],
    )


def gated(sizes: Sizes) -> KernelCase:
    inputs = [paddle.randn([sizes.tokens, sizes.inner]) for _ in range(2)]
    return KernelCase(swiglu, lambda x, y: x / (1 + paddle.exp(-x)) * y, inputs)


def linear(sizes: Sizes) -> KernelCase:
    shapes = ([sizes.tokens, sizes.hidden], [sizes.hidden, sizes.inner], [sizes.inner])
    inputs = [paddle.randn(shape) for shape in shapes]
    return KernelCase(functional.linear, lambda x, weight, bias: paddle.matmul(x, weight) + bias, inputs)


def embedding(sizes: Sizes) -> KernelCase:
    """Half of the tokens are the same, so that its gradient is a long sum."""
    ids = paddle.randint(0, sizes.vocabulary, [sizes.tokens])
    ids[: sizes.tokens // 2] = 1
    one_hot = partial(functional.one_hot, num_classes=sizes.vocabulary)
    table = paddle.randn([sizes.vocabulary, sizes.hidden])
    kernel, additions = partial(functional.embedding, ids), -(-sizes.tokens // 2 // SUMMED_AT_ONCE)
    return KernelCase(kernel, lambda table: one_hot(ids) @ table, [table], additions)


def loss(sizes: Sizes) -> KernelCase:
    ids = paddle.randint(0, sizes.vocabulary, [sizes.tokens])
    alone: Any = SimpleNamespace(tp=1, index=0)
    cross_entropy = CrossEntropy(VocabularyShard(sizes.vocabulary, alone), None, fused=False)
    logits = paddle.randn([sizes.tokens, sizes.vocabulary])

    def plain(logits: Any) -> Any:
        label = paddle.take_along_axis(logits, ids.unsqueeze(-1), -1).squeeze(-1)
        return paddle.logsumexp(logits, -1) - label

    # Gradients of a copy: the kernel overwrites its input.
    return KernelCase(lambda logits: cross_entropy.losses(1 * logits, ids), plain, [logits])


def _stepped(weights: list[Any], gradients: list[list[Any]]) -> list[Any]:
    """Weights in fp32 after two updates by the kernel."""
    tensors = []
    for weight in weights:
        tensors.append(paddle.create_parameter(weight.shape, "float32"))
        tensors[-1].set_value(weight)
    named = {"weight_decay": DECAY, "apply_decay_param_fun": lambda _: True}
    optimizer = MultiTensorAdamW(RATE, *BETAS, EPSILON, parameters=tensors, **named)
    for step in gradients:
        for tensor, gradient in zip(tensors, step, strict=True):
            tensor.grad = gradient
        optimizer.step()
    return [tensor.detach() for tensor in tensors]


def _stepped_plainly(weights: list[Any], gradients: list[list[Any]]) -> list[Any]:
    results = []
    for number, weight in enumerate(weights):
        first, second = paddle.zeros_like(weight), paddle.zeros_like(weight)
        for count, step in enumerate(gradients, 1):
            first = BETAS[0] * first + (1 - BETAS[0]) * step[number]
            second = BETAS[1] * second + (1 - BETAS[1]) * step[number].square()
            rated = first / (1 - BETAS[0] ** count)
            weight = weight * (1 - RATE * DECAY) - RATE * rated / ((second / (1 - BETAS[1] ** count)).sqrt() + EPSILON)
        results.append(weight)
    return results


def adamw(sizes: Sizes) -> KernelCase:
    """Updates of a matrix, a vector and a matrix of odd sizes, as differences because the weights are far from 0."""
    shapes = ([sizes.hidden, sizes.inner], [sizes.hidden], [sizes.hidden + 1, 7])
    weights = [paddle.randn(shape) for shape in shapes]
    gradients = [[paddle.randn(shape) for shape in shapes] for _ in range(2)]

    def moved(step: Callable[..., list[Any]]) -> Callable[[], list[Any]]:
        return lambda: [new - old for new, old in zip(step(weights, gradients), weights, strict=True)]

    return KernelCase(moved(_stepped), moved(_stepped_plainly), [])


def experts(sizes: Sizes) -> KernelCase:
    """Rows of three experts; one expert has no rows, so its gradient is zeros."""
    first, width = sizes.tokens // 4, sizes.heads * sizes.head_dim
    counts = [first, 0, sizes.tokens - first]

    def plain(rows: Any, weights: Any) -> Any:
        return paddle.concat([rows[:first] @ weights[0], rows[first:] @ weights[2]])

    inputs = [paddle.randn([sizes.tokens, sizes.hidden]), paddle.randn([len(counts), sizes.hidden, width])]
    return KernelCase(lambda rows, weights: Products.apply(rows, counts, weights), plain, inputs)


class Missing(Exception):
    """This GPU or this Paddle lacks the kernel."""


def third(make: Callable[[Sizes], KernelCase], sizes: Sizes) -> KernelCase:
    """The same case by FlashAttention 3."""
    if device.on_gpu() and not has_flash_attention_3():
        raise Missing("FlashAttention 3 needs a GPU of Hopper's kind and Paddle 3.2")
    kernel, plain, inputs, _ = make(sizes)

    def call(*tensors: Any) -> Any:
        previous = paddle.get_flags(FLASH_VERSION)
        paddle.set_flags({FLASH_VERSION: int(THIRD)})
        try:
            return kernel(*tensors)
        finally:
            paddle.set_flags(previous)

    return KernelCase(call, plain, inputs)


OF_ALL_HEADS: dict[str, Callable[[Sizes], KernelCase]] = {
    "flash attention, causal, 4 heads a kv head": flash,
    "flashmask, first of 2 context ranks": partial(flashmask, rank=0),
    "flashmask, second of 2 context ranks": partial(flashmask, rank=1),
    "flashmask, packed rows": packed,
}
FLASH = OF_ALL_HEADS | {f"{name}, latents": partial(latents, make) for name, make in OF_ALL_HEADS.items()}
CASES: dict[str, Callable[[Sizes], KernelCase]] = FLASH | {
    "rotary positions": rotary,
    "RMSNorm": rms_norm,
    "SwiGLU": gated,
    "linear with bias": linear,
    "embedding, half of the tokens the same": embedding,
    "loss": loss,
    "AdamW, two steps": adamw,
    "experts, one without rows": experts,
}
CASES |= {f"{name}, FlashAttention 3": partial(third, make) for name, make in FLASH.items()}
NAMES = tuple(CASES)


def difference(case: KernelCase, dtype: str) -> tuple[float, str]:
    """The largest difference between the kernel and the plain operation, as a share of the largest number; and the
    tensor's name."""
    drawn = [x.astype(dtype) for x in case.inputs]
    random: list[Any] = []
    outcomes = []
    for function, computed_in in ((case.kernel, dtype), (case.plain, "float32")):
        inputs = [x.astype(computed_in).detach() for x in drawn]
        for x in inputs:
            x.stop_gradient = False
        results = function(*inputs)
        results = list(results) if isinstance(results, list | tuple) else [results]
        random = random or [paddle.randn(result.shape).astype(dtype) for result in results]
        if inputs:
            paddle.autograd.backward(results, [grad.astype(computed_in) for grad in random])
        outcomes.append([x.detach().astype("float32") for x in (*results, *(x.grad for x in inputs))])
    names = [f"result {number}" for number in range(len(random))] + [f"gradient {n}" for n in range(len(drawn))]
    shares = [float((ours - plain).abs().max() / plain.abs().max()) for ours, plain in zip(*outcomes, strict=True)]
    worst = max(range(len(shares)), key=lambda number: shares[number] if shares[number] == shares[number] else 1e30)
    return shares[worst], names[worst]


def main() -> None:
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # before CUDA starts: the plain products of fp32 are of fp32
    folder, first = Path(sys.argv[1]), int(sys.argv[2])
    start_world()
    sizes = ON_GPU if device.on_gpu() else ON_CPU
    for number in range(first, len(NAMES)):
        paddle.seed(number)
        try:
            case = CASES[NAMES[number]](sizes)
            off, worst = difference(case, sizes.dtype)
            result: dict[str, str | float] = {"off": off, "worst": worst, "tolerance": case.tolerance(sizes.dtype)}
        except Missing as error:
            result = {"missing": str(error)}
        except Exception as error:  # Paddle raises several classes
            if device.on_gpu():
                raise  # a CUDA error persists, so the next kernel gets a new process
            result = {"missing": sentence(error)}
        written = folder / f"{number}.tmp"
        written.write_text(json.dumps(result))
        written.rename(folder / f"{number}.json")


if __name__ == "__main__":
    run_as_rank(main)
