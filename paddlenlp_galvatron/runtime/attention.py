"""Attention on a rank: latents, and masks for context parallelism and rows of several documents.

Under context parallelism a rank's tokens, two chunks of each sample, attend to the keys of the whole sample. The causal
mask follows true positions. A rank's positions rise, so the tokens that do not see a key are its first ones: those that
precede the key.

`ends` [B, S] has the end of each key's document: rows from the key's position up to its end see the key. Padding is a
separate document, so that every row sees a key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import isclose
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.nn.functional import flashmask_attention
from paddle.nn.functional.flash_attention import flash_attention
from paddlenlp.transformers.deepseek_v2.modeling import apply_rotary_pos_emb

from ..launch.gpus import FLASH_VERSION, THIRD
from ..model.attention import Latents
from ..plan.comm_points import CommPoint
from . import device

Chunks = Sequence[tuple[int, int]]  # first and last-plus-one positions of a rank's chunks of each sample, rising


def own_rows(x: Any, chunks: Chunks, axis: int) -> Any:
    """This rank's entries of a tensor that has one for every position along the axis."""
    parts = (x.slice([axis], [start], [stop]) for start, stop in chunks)
    return paddle.concat(list(parts), axis)


class OwnPositions(nn.Layer):  # type: ignore[misc]
    """PaddleNLP's table of rotary positions for a rank's tokens; made once for all layers and micro-batches, which keep
    it for backward."""

    def __init__(self, table: Any, chunks: Chunks):
        super().__init__()
        self._table, self._chunks = table, chunks
        self._own: dict[Any, Any] = {}  # keyed by dtype

    def forward(self, x: Any, seq_len: int) -> Any:
        """(cosines, sines), each [1, own tokens, 1, D]."""
        if x.dtype not in self._own:
            every = self._table(x, seq_len=self._chunks[-1][1])
            self._own[x.dtype] = tuple(own_rows(table, self._chunks, axis=1) for table in every)
        return self._own[x.dtype]


def flash(hidden: Any = None, causal: bool | None = None) -> Callable[..., Any]:
    """Flash attention with PaddleNLP's signature: whole samples, or own queries [B, 2·s, heads, D] to all keys and
    values [B, S, kv heads, D] with `hidden_rows`, as the first row of its causal mask with fewer queries than keys
    depends on Paddle's version. `causal`: whether the mask is also causal; unset: without `hidden`.

    Calls the function of Paddle that has no other kernel: PaddleNLP's silently falls back to a plain kernel, whose
    memory grows with the length's square. FLAGS_flash_attn_version asks for FlashAttention 3, which that function
    honours only with rows.

    Values of latent attention are narrower than keys. FlashAttention 3 accepts that; for version 2 they are padded with
    zeros, and queries are multiplied by the ratio of the scales, as its scale is fixed."""

    causal = hidden is None if causal is None else causal

    def attend(
        query: Any, _config: Any, key: Any, value: Any, *_rest: Any, softmax_scale: float | None = None, **_named: Any
    ) -> Any:
        width, value_width = key.shape[-1], value.shape[-1]
        if softmax_scale is not None and not isclose(factor := softmax_scale * width**0.5, 1.0):
            query = query * factor
        if hidden is None and is_third():
            return flash_attention(query, key, value, causal=True)[0].flatten(2)
        if value_width < width:
            value = paddle.concat([value, paddle.zeros([*value.shape[:3], width - value_width], value.dtype)], axis=-1)
        rows = None if hidden is None else hidden.expand([key.shape[0], -1, -1, -1])
        out = flashmask_attention(query, key, value, rows, causal=causal)
        return (out[..., :value_width] if value_width < width else out).flatten(2)

    return attend


def is_third() -> bool:
    """Whether flash attention is FlashAttention 3."""
    try:
        return bool(str(paddle.get_flags(FLASH_VERSION)[FLASH_VERSION]) == THIRD)
    except ValueError:  # a build for CPUs, or Paddle 3.1
        return False


@lru_cache(maxsize=8)
def hidden_rows(chunks: Chunks, length: int) -> Any:
    """[1, 1, S, 2] for each key: the end of the rows, and the number of first rows that precede the key."""
    local = np.concatenate([np.arange(start, stop) for start, stop in chunks])
    earlier = np.searchsorted(local, np.arange(length))
    return device.to_device(np.stack([np.full(length, len(local)), earlier], axis=-1).astype(np.int32)[None, None])


class Documents:
    """Masks of this rank's attention within documents. Made before the first step."""

    def __init__(self, chunks: Chunks | None, length: int, fused: bool):
        """`chunks`: the rank's tokens of each sample; None: all of it."""
        self._fused, self._chunks = fused, chunks
        local = [np.arange(start, stop) for start, stop in chunks or ((0, length),)]
        self._keys = device.to_device(np.arange(length, dtype=np.int32))
        self._rows = device.to_device(np.concatenate(local).astype(np.int32)[:, None])
        self._in_front = hidden_rows(chunks, length)[..., 1:] if fused and chunks else None

    def attention(self, ends: Any, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Replaces PaddleNLP's attention: `plain` with a mask, or flash attention."""
        if not self._fused:
            return lambda q, config, k, v, _mask, *rest, **named: plain(
                q, config, k, v, self.mask(ends, q.dtype), *rest, **named
            )
        return flash(self.rows(ends), causal=self._chunks is None)

    def mask(self, ends: Any, dtype: Any) -> Any:
        """[B, 1, own rows, S] to add to attention's scores."""
        seen = paddle.logical_and(self._rows >= self._keys, self._rows < ends.unsqueeze(1)).unsqueeze(1)
        return paddle.where(seen, paddle.zeros([], dtype), paddle.full([], paddle.finfo(dtype).min, dtype))

    def rows(self, ends: Any) -> Any:
        """[B, 1, S, 1] for causal flash attention: for each key the first later row that does not see it. For a rank's
        chunks, [B, 1, S, 2]: the same counted in its rows, and the number of its rows that precede the key."""
        if self._chunks is None or self._in_front is None:
            return ends.unsqueeze([1, -1])
        behind = paddle.zeros_like(ends)
        for start, stop in self._chunks:
            behind = behind + (ends - start).clip(0, stop - start)
        behind = behind.unsqueeze([1, -1])
        return paddle.concat([behind, self._in_front.expand_as(behind)], axis=-1)


Cross = Callable[[CommPoint, Any], Any]


class LatentAttention:
    """Replaces the forward of PaddleNLP's attention."""

    def __init__(self, attention: Any, sizes: Latents, lengths: tuple[int, int], cross: Cross):
        """`lengths`: of the sequence, and of this rank's queries."""
        self._attention, self._sizes, (self._length, self._own_length), self._cross = attention, sizes, lengths, cross

    def __call__(self, hidden_states: Any, attention_mask: Any = None, **_: Any) -> tuple[Any, None, None]:
        attention, sizes, cross = self._attention, self._sizes, self._cross
        turned, rank = sizes.qk_rope_head_dim, sizes.kv_lora_rank
        latents, shared_key = paddle.split(attention.kv_a_proj_with_mqa(hidden_states), [rank, turned], axis=-1)
        kv = attention.kv_b_proj(cross(CommPoint.LATENT, attention.kv_a_layernorm(latents)))
        kv = self._by_heads(cross(CommPoint.KEY, kv), sizes.product_dim)
        k, v = paddle.split(kv, [sizes.qk_nope_head_dim, sizes.v_head_dim], axis=-1)
        q = self._by_heads(cross(CommPoint.QUERY, self._queries(hidden_states)), sizes.head_dim)
        q, q_turned = paddle.split(q, [sizes.qk_nope_head_dim, turned], axis=-1)
        shared_key = self._by_heads(cross(CommPoint.LATENT_KEY, shared_key), turned)
        cos, sin = attention.rotary_emb(v, seq_len=self._length)
        q_turned, shared_key = apply_rotary_pos_emb(q_turned, shared_key, cos, sin, None)
        q = paddle.concat([q, q_turned], axis=-1)
        k = paddle.concat([k, shared_key.expand([-1, -1, k.shape[2], -1])], axis=-1)
        how = {"softmax_scale": attention.softmax_scale, "training": attention.training}
        context = attention.attn_func(q, attention.config, k, v, attention_mask, False, **how)
        return attention.o_proj(context), None, None

    def _queries(self, x: Any) -> Any:
        attention = self._attention
        if not self._sizes.q_lora_rank:
            return attention.q_proj(self._cross(CommPoint.INTO_ATTENTION, x))
        return attention.q_b_proj(self._cross(CommPoint.LATENT_QUERY, attention.q_a_layernorm(attention.q_a_proj(x))))

    def _by_heads(self, x: Any, width: int) -> Any:
        """[T, heads · width] -> [B, S, heads, width]."""
        return x.reshape([-1, self._own_length, x.shape[-1] // width, width])
