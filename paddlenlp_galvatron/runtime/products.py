"""Products of column-split weights under Megatron-SP: they read all tokens of a tensor-parallel group, of which each
rank keeps its own.

The tokens are gathered for forward, and again in backward, where only the weights' gradients need them: they arrive
while the gradient of the tokens is computed. Its sum over the ranks is under way while the weights' gradients are
computed. This is Megatron-LM's `LinearWithGradAccumulationAndAsyncCommunication`, of all products with the same input.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import paddle
from paddle.autograd import PyLayer

from .collectives import all_gather, all_gather_start, reduce_scatter_start
from .lora import after_products, read_by
from .precision import Numbers, cast


class GatheredProducts(PyLayer):  # type: ignore[misc]
    """A rank's tokens [T, H] and matrices [H, C] each -> the products [T·n, C] of all tokens of a group of n ranks.

    `keeps`: the gathered tokens, where backward follows at once; `transposed`: the matrices are [C, H].
    """

    @staticmethod
    def forward(
        ctx: Any, x: Any, group: Any, numbers: Numbers, keeps: bool, transposed: bool, *matrices: Any
    ) -> tuple[Any, ...]:
        tokens = cast(all_gather(cast(x, numbers.stored), group), numbers.computed)
        ctx.kept, ctx.matrices = tokens if keeps else x, matrices
        ctx.how = group, numbers, keeps, transposed, not x.stop_gradient
        return tuple(paddle.matmul(tokens, matrix, transpose_y=transposed) for matrix in matrices)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        kept, matrices, (group, numbers, keeps, transposed, tracked) = ctx.kept, ctx.matrices, ctx.how
        ctx.kept = ctx.matrices = None  # autograd's graph holds this call until all of backward ends
        learn = [not matrix.stop_gradient for matrix in matrices]
        arriving = leaving = None
        if any(learn) and not keeps:
            arriving = all_gather_start(cast(kept, numbers.stored), group)
        if tracked:
            total = None
            for gradient, matrix in zip(gradients, matrices, strict=True):
                part = paddle.matmul(gradient, matrix, transpose_y=not transposed)
                total = part if total is None else total.add_(part)
            leaving = reduce_scatter_start(cast(total, numbers.stored), group)
            del total, part
        tokens = cast(arriving.wait(), numbers.computed) if arriving else kept
        pairs = [(gradient, tokens) if transposed else (tokens, gradient) for gradient in gradients]
        of_matrices = [
            paddle.matmul(*pair, transpose_x=True) if learns else None
            for pair, learns in zip(pairs, learn, strict=True)
        ]
        return cast(leaving.wait(), numbers.computed) if leaving else None, *of_matrices


Multiply = Callable[..., tuple[Any, ...]]  # a rank's tokens and matrices -> products of all tokens


def read_together(layers: list[Any], multiply: Multiply) -> None:
    """Let linear layers that run one after the other with the same input share one call of `multiply`."""
    waiting: list[list[Any]] = []  # products of the layers that have not been called yet

    def forward(layer: Any, x: Any) -> Any:
        if layer is layers[0]:
            each = [read_by(one) for one in layers]
            products = list(multiply(x, *(matrix for matrices in each for matrix in matrices)))
            waiting[:] = [[products.pop(0) for _ in matrices] for matrices in each]
        return after_products(layer, *waiting.pop(0))

    for layer in layers:
        layer.forward = partial(forward, layer)
