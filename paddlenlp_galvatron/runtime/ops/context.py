"""Context parallelism in attention: the tokens of a rank, two chunks of each sample, attend to the keys of all of it.

The causal mask follows true positions. A rank's own positions rise, so the tokens that do not see a key are its first
ones: as many as precede the key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.nn.functional import flashmask_attention

from ...plan.comm_points import Op
from .. import device
from ..collectives import all_gather, reduce_scatter

Chunks = Sequence[tuple[int, int]]  # first and last-plus-one position of those that a rank has of each sample, rising


def _gather(x: Any, group: Any) -> Any:
    """[B, 2·s, …], a rank's two chunks of s tokens -> [B, 2·n·s, …], all in order."""
    (samples, own, *rest), axes = x.shape, range(2, x.ndim + 1)
    chunks = all_gather(x, group).reshape([group.nranks, samples, 2, own // 2, *rest])
    fronts, ends = (chunks[:, :, half].transpose([1, 0, *axes]) for half in (0, 1))
    return paddle.concat([fronts, ends[:, ::-1]], axis=1).reshape([samples, group.nranks * own, *rest])


def _scatter(grad: Any, group: Any) -> Any:
    """[B, 2·n·s, …] -> [B, 2·s, …]: a rank's two chunks of the sum over the group."""
    (samples, length, *rest), axes, ranks = grad.shape, range(2, grad.ndim + 2), group.nranks
    chunks = grad.reshape([samples, 2 * ranks, length // (2 * ranks), *rest])
    by_rank = paddle.stack([chunks[:, :ranks], chunks[:, ranks:][:, ::-1]], axis=2).transpose([1, 0, *axes])
    return reduce_scatter(by_rank.reshape([ranks * samples, length // ranks, *rest]), group)


OPS = {Op.GATHER_CHUNKS: (_gather, _scatter)}


def own_rows(x: Any, chunks: Chunks, axis: int) -> Any:
    """This rank's entries of a tensor that has one for every position along the axis."""
    parts = (x.slice([axis], [start], [stop]) for start, stop in chunks)
    return paddle.concat(list(parts), axis)


class OwnPositions(nn.Layer):  # type: ignore[misc]
    """PaddleNLP's table of rotary positions, as far as it is of a rank's own tokens; made once for all its layers and
    micro-batches, each of which keeps it for backward."""

    def __init__(self, table: Any, chunks: Chunks):
        super().__init__()
        self._table, self._chunks = table, chunks
        self._own: dict[Any, Any] = {}  # by the type of numbers

    def forward(self, x: Any, seq_len: int) -> Any:
        """(cosines, sines), each [1, own tokens, 1, D]."""
        if x.dtype not in self._own:
            every = self._table(x, seq_len=self._chunks[-1][1])
            self._own[x.dtype] = tuple(own_rows(part, self._chunks, axis=1) for part in every)
        return self._own[x.dtype]


def flash(hidden: Any = None, causal: bool | None = None) -> Callable[..., Any]:
    """Flash attention, called as PaddleNLP calls its own: of whole samples, or of own queries [B, 2·s, heads, D] to all
    keys and values [B, S, kv heads, D], by `hidden_rows`: where the rows of its causal form begin, of fewer queries
    than keys, differs by Paddle's version. `causal`: whether the mask is causal besides; unset: without `hidden`.

    By the function of Paddle's that has no other kernel. PaddleNLP's takes a plain one, silently, where flash attention
    is not there or refuses: one whose memory grows by the length's square."""

    causal = hidden is None if causal is None else causal

    def attend(query: Any, _config: Any, key: Any, value: Any, *_rest: Any, **_named: Any) -> Any:
        rows = None if hidden is None else hidden.expand([key.shape[0], -1, -1, -1])
        return flashmask_attention(query, key, value, rows, causal=rows is None if causal is None else causal).flatten(
            2
        )

    return attend


@lru_cache(maxsize=8)
def hidden_rows(chunks: Chunks, length: int) -> Any:
    """[1, 1, S, 2] for each key: the row behind the last one, and how many of the first rows lie in front of it."""
    own = np.concatenate([np.arange(start, stop) for start, stop in chunks])
    before = np.searchsorted(own, np.arange(length))
    return device.to_device(np.stack([np.full(length, len(own)), before], axis=-1).astype(np.int32)[None, None])
