"""Kernels that only GPUs have, or that differ there, as plain operations in the place of Paddle's operators.

Their callers stay as they are on a GPU: PaddleNLP's layers and Paddle's own functions. Each twin takes the operator's
positional arguments and computes as documented.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import _C_ops
from paddle.autograd import PyLayer

HEADER = "include/paddle/fluid/pir/dialect/operator/ir/pd_op.h"
calls: dict[str, int] = {}
_prepared: dict[int, Any] = {}  # groups by the number that an operator gives


def operators_with_ring() -> list[str]:
    """Paddle's operators that look for a communicator by its number."""
    text = (Path(paddle.__file__).parent / HEADER).read_text()
    parts = re.split(r'return "pd_op\.(\w+)"', text)[1:]
    found = [name for name, rest in zip(parts[::2], parts[1::2], strict=True) if re.search(r"\bring_id\b", rest)]
    return [name for name in found if hasattr(_C_ops, name)]


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(f"a kernel for GPUs would refuse this: {what}")


def _attend(q: Any, k: Any, v: Any, hidden: Any) -> tuple[Any, None, None, None]:
    """[B, S, heads, D] to [B, T, kv heads, D]; `hidden` [B, 1, S, T]: positions that a row must not see."""
    (_, _, heads, width), kv_heads = q.shape, k.shape[2]
    _require(width % 8 == 0 and heads % kv_heads == 0 and k.shape == v.shape, f"heads {q.shape}, {k.shape}")
    _require(q.dtype == k.dtype == v.dtype, f"types {q.dtype}, {k.dtype}, {v.dtype}")
    k, v = (x.unsqueeze(3).expand([*x.shape[:3], heads // kv_heads, width]).reshape([*x.shape[:2], heads, width])
            for x in (k, v))  # fmt: skip
    q, k, v = (x.transpose([0, 2, 1, 3]) for x in (q, k, v))
    scores = paddle.matmul(q, k, transpose_y=True) / width**0.5
    scores = paddle.where(hidden, paddle.full_like(scores, -1e9), scores)
    weights = paddle.nn.functional.softmax(scores) * (1 - hidden.astype(scores.dtype))
    return paddle.matmul(weights, v).transpose([0, 2, 1, 3]), None, None, None


def flash_attn(q: Any, k: Any, v: Any, seed: Any, mask: Any, dropout: float, causal: bool, *_: Any) -> Any:
    _require(seed is None and mask is None and dropout == 0.0, "a mask or dropout")
    _require(causal and q.shape[1] == k.shape[1], "rows of unlike numbers of queries and keys, which versions number")
    rows = paddle.arange(q.shape[1])
    return _attend(q, k, v, (rows.unsqueeze(0) > rows.unsqueeze(1)).unsqueeze([0, 0]))


def flashmask_attention(q: Any, k: Any, v: Any, rows: Any, seed: Any, dropout: float, causal: bool, *_: Any) -> Any:
    """For each key [B, 1, T, 2]: rows from the first number on do not see it, nor do those before the second. Causal:
    [B, 1, T, 1], and nor do those before the key."""
    _require(rows.dtype == paddle.int32 and dropout == 0.0, f"{rows.dtype}")
    _require(rows.shape == [q.shape[0], 1, k.shape[1], 1 if causal else 2], f"rows {rows.shape}")
    own = paddle.arange(q.shape[1], dtype="int32").unsqueeze(1)
    from_row = rows[..., 0].unsqueeze(2)
    to_row = paddle.arange(k.shape[1], dtype="int32") if causal else rows[..., 1].unsqueeze(2)
    return _attend(q, k, v, paddle.logical_or(own >= from_row, own < to_row))


def fused_rotary_position_embedding(
    q: Any, k: Any, v: Any, sin: Any, cos: Any, positions: Any, neox: bool, time_major: bool, base: float
) -> Any:
    _require(v is None and positions is None and not neox and not time_major, "other positions")
    _require(list(sin.shape) == [1, q.shape[1], 1, q.shape[3]] == list(cos.shape), f"table {sin.shape}")

    def turned(x: Any) -> Any:
        first, second = x.chunk(2, axis=-1)
        return x * cos + paddle.concat([-second, first], axis=-1) * sin

    return turned(q), turned(k), None


def rms_norm(x: Any, bias: Any, residual: Any, weight: Any, norm_bias: Any, epsilon: float, axis: int, *_: Any) -> Any:
    """The CPU has its forward kernel, and not its gradient."""
    _require(bias is None and residual is None and norm_bias is None and axis == x.ndim - 1, f"axis {axis}")
    return x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight, None, None


def batched_gemm(left: Any, right: Any, rows: list[int], transpose_left: bool, transpose_right: bool) -> Any:
    """An expert's rows times its matrix, or its transposed rows times other rows of it; for all experts."""
    _require(left.dtype == right.dtype == paddle.float32 and sum(rows) == left.shape[0] > 0, f"{left.shape}, {rows}")
    _require(not (transpose_left and transpose_right), "both transposed")
    calls["empty expert"] = calls.get("empty expert", 0) + rows.count(0)
    ends = np.cumsum(rows)[:-1]
    of_right = np.split(right.numpy(), ends) if transpose_left else right.numpy()
    products = [
        (x.T if transpose_left else x) @ (y.T if transpose_right else y)
        for x, y in zip(np.split(left.numpy(), ends), of_right, strict=True)
    ]
    return paddle.to_tensor(np.stack(products) if transpose_left else np.concatenate(products))


def topk(x: Any, k: int, axis: int, largest: bool, *_: Any, **__: Any) -> Any:
    """Neither NaN nor -inf is taken, and the index in their place is -1; of equal numbers the first comes first
    (Paddle's top_k_function_cuda.h). The CPU has another kernel."""
    _require(largest, "the smallest")
    values = np.moveaxis(x.numpy(), axis, -1)
    ranked = np.where(np.isnan(values), -np.inf, values)
    order = np.argsort(-ranked, axis=-1, kind="stable")[..., :k]
    best = np.take_along_axis(ranked, order, -1)
    order = np.where(best == -np.inf, -1, order)
    return tuple(paddle.to_tensor(np.moveaxis(each, -1, axis)) for each in (best, order))


class _CrossEntropy(PyLayer):  # type: ignore[misc]
    """As the operator and its gradient: softmax [U, v] and losses [U, 1]."""

    @staticmethod
    def forward(ctx: Any, logits: Any, labels: Any, ignored: int, group: Any) -> Any:
        start = group.rank * logits.shape[-1]
        largest = logits.max(-1, keepdim=True)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        exponentials = paddle.exp(logits - largest)
        total = exponentials.sum(-1, keepdim=True)
        dist.all_reduce(total, group=group)
        mine = (paddle.arange(start, start + logits.shape[-1]).unsqueeze(0) == labels).astype(logits.dtype)
        target = ((logits - largest) * mine).sum(-1, keepdim=True)
        dist.all_reduce(target, group=group)
        counted = (labels != ignored).astype(logits.dtype)
        softmax = exponentials / total
        ctx.save_for_backward(softmax, mine, counted)
        return softmax, (total.log() - target) * counted

    @staticmethod
    def backward(ctx: Any, _softmax: Any, grad: Any) -> Any:
        softmax, mine, counted = ctx.saved_tensor()
        return (softmax - mine) * counted * grad


def c_softmax_with_cross_entropy(logits: Any, labels: Any, ignored: int, ring: int, rank: int, ranks: int) -> Any:
    group = _prepared[ring]
    _require((group.rank, group.nranks) == (rank, ranks), f"rank {rank} of {ranks}")
    _require(logits.dtype == paddle.float32 and labels.shape == [logits.shape[0], 1], f"{logits.dtype}, {labels.shape}")
    return _CrossEntropy.apply(logits, labels, ignored, group)


TWINS: tuple[Callable[..., Any], ...] = (
    flash_attn, flashmask_attention, fused_rotary_position_embedding, rms_norm, batched_gemm, topk,
    c_softmax_with_cross_entropy,
)  # fmt: skip
ON_GPUS = {"FLAGS_cudnn_deterministic": False, "FLAGS_flash_attn_version": 2}  # flags that a build for CPUs lacks
NEWER = {"rms_norm": "fused_rms_norm_quant"}  # names since Paddle 3.3


def install() -> None:
    """From now on, in this process. Operators that look for a communicator raise where nobody prepared it, as all but
    the loss do here."""
    from paddlenlp_galvatron.runtime import paddle_private

    def preparing(group: Any, gpu: int | None) -> None:
        """Without a context: gloo's share their keys in the store, so that there can be one in a launch."""
        _prepared[paddle_private.FIRST_RING + group.id] = group

    def counted(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return run(*arguments, **named)

        return call

    def guarded(name: str) -> Callable[..., Any]:
        run = getattr(_C_ops, name)

        def call(*arguments: Any) -> Any:
            ring = arguments[3] if name == c_softmax_with_cross_entropy.__name__ else None
            if ring not in _prepared:
                raise AssertionError(f"{name} looks for the communicator {ring}, which nobody prepared")
            return run(*arguments)

        return call

    paddle_private.make_context = preparing

    def flags(names: Any, get: Callable[..., Any] = paddle.get_flags) -> Any:
        return ON_GPUS if isinstance(names, list) and set(names) <= set(ON_GPUS) else get(names)

    paddle.get_flags = paddle.base.framework.get_flags = flags
    for twin in TWINS:
        name = NEWER.get(twin.__name__, "")
        setattr(_C_ops, name if hasattr(_C_ops, name) else twin.__name__, counted(twin.__name__, twin))
    for name in operators_with_ring():
        setattr(_C_ops, name, guarded(name))
