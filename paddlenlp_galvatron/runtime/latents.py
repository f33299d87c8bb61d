"""Latent attention of one decoder layer on flat tokens [T, H], with collectives at its communication points.

PaddleNLP's own forward wants whole samples of hidden states; here each rank projects its own tokens down, and latents
are handed over: 2,112 numbers a token of DeepSeek-V3 instead of 7,168. The projections, norms, positions and
attention's core are PaddleNLP's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
from paddlenlp.transformers.deepseek_v2.modeling import apply_rotary_pos_emb

from ..model.latents import Latents
from ..plan.comm_points import CommPoint

Cross = Callable[[CommPoint, Any], Any]


class LatentAttention:
    """Replaces the forward of PaddleNLP's attention."""

    def __init__(self, attention: Any, sizes: Latents, lengths: tuple[int, int], cross: Cross):
        """`lengths`: the sequence length, and how much of it has its queries on this rank."""
        self._attention, self._sizes, (self._length, self._own_length), self._cross = attention, sizes, lengths, cross

    def __call__(self, hidden_states: Any, attention_mask: Any = None, **_: Any) -> tuple[Any, None, None]:
        of, sizes, cross = self._attention, self._sizes, self._cross
        turned, rank = sizes.qk_rope_head_dim, sizes.kv_lora_rank
        latents, shared_key = paddle.split(of.kv_a_proj_with_mqa(hidden_states), [rank, turned], axis=-1)
        kv = of.kv_b_proj(cross(CommPoint.LATENT, of.kv_a_layernorm(latents)))
        kv = self._by_heads(cross(CommPoint.KEY, kv), sizes.product_dim)
        k, v = paddle.split(kv, [sizes.qk_nope_head_dim, sizes.v_head_dim], axis=-1)
        q = self._by_heads(cross(CommPoint.QUERY, self._queries(hidden_states)), sizes.head_dim)
        q, q_turned = paddle.split(q, [sizes.qk_nope_head_dim, turned], axis=-1)
        shared_key = self._by_heads(cross(CommPoint.LATENT_KEY, shared_key), turned)
        cos, sin = of.rotary_emb(v, seq_len=self._length)
        q_turned, shared_key = apply_rotary_pos_emb(q_turned, shared_key, cos, sin, None)
        q = paddle.concat([q, q_turned], axis=-1)
        k = paddle.concat([k, shared_key.expand([-1, -1, k.shape[2], -1])], axis=-1)
        how = {"softmax_scale": of.softmax_scale, "training": of.training}
        return of.o_proj(of.attn_func(q, of.config, k, v, attention_mask, False, **how)), None, None

    def _queries(self, x: Any) -> Any:
        of = self._attention
        if not self._sizes.q_lora_rank:
            return of.q_proj(self._cross(CommPoint.INTO_ATTENTION, x))
        return of.q_b_proj(self._cross(CommPoint.LATENT_QUERY, of.q_a_layernorm(of.q_a_proj(x))))

    def _by_heads(self, x: Any, width: int) -> Any:
        """[T, heads · width] -> [B, S, heads, width]."""
        return x.reshape([-1, self._own_length, x.shape[-1] // width, width])
