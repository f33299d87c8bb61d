"""Rows that hold several documents: which keys a row of attention sees, told by one number a key.

`ends` [B, S]: a key is seen by the rows from its own on and before its end, which is where its document ends. Padding
is a document of its own, so that every row sees a key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle

from . import device
from .ops.context import Chunks, flash, hidden_rows


class Documents:
    """Which of a sample's `length` tokens this rank's rows of attention see. Made before the first step."""

    def __init__(self, chunks: Chunks | None, length: int, fused: bool):
        """`chunks`: what the rank has of each sample; None: all of it."""
        self._fused, self._chunks = fused, chunks
        own = [np.arange(start, stop) for start, stop in chunks or ((0, length),)]
        self._keys = device.to_device(np.arange(length, dtype=np.int32))
        self._rows = device.to_device(np.concatenate(own).astype(np.int32)[:, None])
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
        """[B, 1, S, 1] as causal flash attention takes it: for each key the first row behind it that does not see it.
        For a rank's chunks, [B, 1, S, 2]: the same counted in its own rows, and how many of them precede the key."""
        if self._chunks is None or self._in_front is None:
            return ends.unsqueeze([1, -1])
        behind = paddle.zeros_like(ends)
        for start, stop in self._chunks:
            behind = behind + (ends - start).clip(0, stop - start)
        behind = behind.unsqueeze([1, -1])
        return paddle.concat([behind, self._in_front.expand_as(behind)], axis=-1)
