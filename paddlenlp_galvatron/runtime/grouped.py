"""Products of rows that are sorted by expert with the stacked weights of these experts.

Shapes: R rows, of which `counts` says how many each of l experts has; I and O columns on either side of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Any

import paddle

from ..plan import Plan
from ..plan.strategy import EXPERT_ROWS, IMBALANCE_BOUND, Predicted, padded_rows
from . import device, paddle_private


@dataclass
class Padding:
    """Padding of the rows of a stage's experts. In a pipeline on GPUs row numbers vary between steps but must not make
    the host wait for the device, and so for a posted receive:

    - cuBLAS loads a kernel at its first use, which waits, and chooses it by the number of rows (docs/dev/gpus.md has
    measurements). So rows of an expert are padded to multiples, each of which has been used once. - The allocator must
    hold the memory of the busiest rank. So the first step has as many rows as the bound of memory.
    """

    multiple: int = 1
    bound: float = 1.0  # rows of the busiest rank over the mean, as the bound of memory has it
    fills: bool = False  # whether ranks get that many rows: in the first step

    @classmethod
    def of(cls, plan: Plan) -> Padding:
        """The padding of a plan's first step on this device."""
        if plan.pipeline == 1 or not device.loads_kernels():
            return UNPADDED
        load = Predicted.of(plan).load
        return cls(EXPERT_ROWS, load.moe_imbalance_bound if load else IMBALANCE_BOUND, fills=True)

    def rows(self, counts: Sequence[int], mean: float, ep: int) -> list[int]:
        """Rows of each of a rank's experts, padded; `counts`: rows sent to each. `mean`: rows sent to a rank, over all
        ranks."""
        padded = [self._padded(count) for count in counts]
        if self.fills:
            most = padded_rows(self.most(mean, ep), len(counts))
            padded[-1] += max(0, self._padded(most) - sum(padded))
        return padded

    def most(self, mean: float, ep: int) -> float:
        """Most rows that are sent to a rank."""
        return min(self.bound, ep) * mean

    def _padded(self, count: float) -> int:
        return ceil(count / self.multiple) * self.multiple


UNPADDED = Padding()


def grouped(
    left: Any, right: Any, counts: Sequence[int], *, transpose_left: bool = False, transpose_right: bool = False
) -> Any:
    """Rows [R, I] times weights [l, I, O] -> [R, O]; rows [R, O] times transposed weights [l, I, O] -> [R, I];
    transposed rows [R, I] times rows [R, O] -> [l, I, O], zeros for an expert without rows.

    By one call of Paddle where it has a kernel: PaddleFleet trained 2.3 times as fast with it as by a loop over experts
    and as fast as with DeepGEMM (its pull request 266).
    """
    together = any(counts) and has_kernel(left.dtype)
    product = paddle_private.batched_gemm if together else one_by_one
    return product(left, right, counts, transpose_left, transpose_right)


def has_kernel(dtype: Any) -> bool:
    """Whether Paddle multiplies the rows of all experts in one call: on GPUs, in bf16 and fp32, not in Paddle 3.1."""
    return paddle_private.batched_gemm is not None and device.on_gpu() and dtype != paddle.float16


def one_by_one(left: Any, right: Any, counts: Sequence[int], transpose_left: bool, transpose_right: bool) -> Any:
    """Grouped products by a few calls an expert."""
    columns = right.shape[-2 if transpose_right else -1]
    shape = (len(counts), left.shape[1]) if transpose_left else (left.shape[0],)
    out, start = paddle.zeros([*shape, columns], left.dtype), 0
    for expert, count in enumerate(counts):
        if count:
            rows = slice(start, start + count)
            matrix = right[rows if transpose_left else expert]
            out[expert if transpose_left else rows] = paddle.matmul(left[rows], matrix, transpose_left, transpose_right)
        start += count
    return out


@lru_cache
@paddle.no_grad()  # type: ignore[untyped-decorator]
def use_every_size(most: int, inner: int, outer: int, dtype: Any) -> None:
    """Multiply each number of rows that an expert may get (0 up to `most`) once with weights [inner, outer], as the
    passes do."""
    sizes = range(EXPERT_ROWS, most + EXPERT_ROWS, EXPERT_ROWS)
    left, right = (paddle.zeros([sizes[-1], columns], dtype) for columns in (inner, outer))
    weights = paddle.zeros([2, inner, outer], dtype)
    for size in sizes:
        x, grad, counts = left[:size], right[:size], [size, 0]
        grouped(x, weights, counts)
        grouped(grad, weights, counts, transpose_right=True)
        grouped(x, grad, counts, transpose_left=True)
