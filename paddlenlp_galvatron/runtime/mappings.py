"""Operations at the communication points of a layer, forward and backward, of each axis."""

from __future__ import annotations

from typing import Any

import paddle
from paddle.autograd import PyLayer

from ..plan.comm_points import Op
from .collectives import all_gather, all_reduce, all_to_all, reduce_scatter


def _sum(x: Any, group: Any) -> Any:
    return all_reduce(x.clone(), group)


def _to_heads(x: Any, group: Any) -> Any:
    """[T, n·C], own tokens of all heads -> [T·n, C], all tokens of own heads."""
    tokens, width = x.shape
    by_rank = x.reshape([tokens, group.nranks, width // group.nranks]).transpose([1, 0, 2])
    return all_to_all(by_rank.reshape([tokens * group.nranks, -1]), group)


def _to_tokens(x: Any, group: Any) -> Any:
    """[T·n, C] -> [T, n·C]."""
    tokens = x.shape[0] // group.nranks
    by_rank = all_to_all(x, group).reshape([group.nranks, tokens, -1])
    return by_rank.transpose([1, 0, 2]).reshape([tokens, -1])


def _gather_chunks(x: Any, group: Any) -> Any:
    """[B, 2·s, …], a rank's two chunks of s tokens -> [B, 2·n·s, …], all in order."""
    (samples, own, *rest), axes = x.shape, range(2, x.ndim + 1)
    chunks = all_gather(x, group).reshape([group.nranks, samples, 2, own // 2, *rest])
    fronts, ends = (chunks[:, :, half].transpose([1, 0, *axes]) for half in (0, 1))
    return paddle.concat([fronts, ends[:, ::-1]], axis=1).reshape([samples, group.nranks * own, *rest])


def _scatter_chunks(grad: Any, group: Any) -> Any:
    """[B, 2·n·s, …] -> [B, 2·s, …]: a rank's two chunks of the sum over the group."""
    (samples, length, *rest), axes, ranks = grad.shape, range(2, grad.ndim + 2), group.nranks
    chunks = grad.reshape([samples, 2 * ranks, length // (2 * ranks), *rest])
    by_rank = paddle.stack([chunks[:, :ranks], chunks[:, ranks:][:, ::-1]], axis=2).transpose([1, 0, *axes])
    return reduce_scatter(by_rank.reshape([ranks * samples, length // ranks, *rest]), group)


def _own(x: Any, group: Any) -> Any:
    """This rank's part of tokens that all ranks have."""
    count = x.shape[0] // group.nranks
    return x[group.rank * count : (group.rank + 1) * count].clone()


OPS: dict[Op, tuple[Any, Any]] = {  # None: nothing
    # Tensor parallelism: plain, and Megatron-SP, whose tokens are sharded between layers and gathered in `products`.
    Op.GATHER: (all_gather, reduce_scatter),
    Op.SHARE: (all_gather, reduce_scatter),
    Op.SCATTER: (reduce_scatter, all_gather),
    Op.REPLICATE: (None, _sum),
    Op.REDUCE: (_sum, None),
    # Ulysses: tokens are exchanged for heads in front of attention, and back behind it.
    Op.TO_HEADS: (_to_heads, _to_tokens),
    Op.TO_TOKENS: (_to_tokens, _to_heads),
    # Context parallelism: keys and values of whole samples.
    Op.GATHER_CHUNKS: (_gather_chunks, _scatter_chunks),
    # Experts under plain tensor parallelism: a rank has all tokens, of which it sends its own part.
    Op.TAKE: (_own, all_gather),
    Op.GIVE: (all_gather, _own),
}


class Crossing(PyLayer):  # type: ignore[misc]
    """An operation at a communication point, over a group."""

    @staticmethod
    def forward(ctx: Any, x: Any, op: Op, group: Any) -> Any:
        run, ctx.back = OPS[op]
        ctx.group = group
        # A PyLayer must return a tensor of its own, which may be on the same memory.
        return run(x, group) if run else x.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return ctx.back(grad, ctx.group) if ctx.back else grad
