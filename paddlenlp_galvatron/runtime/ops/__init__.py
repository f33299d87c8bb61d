"""Operations at the communication points of a layer, forward and backward: one file an axis."""

from __future__ import annotations

from typing import Any

from paddle.autograd import PyLayer

from ...plan.comm_points import Op
from . import context, expert, tensor, ulysses

OPS = {**tensor.OPS, **ulysses.OPS, **context.OPS, **expert.OPS}  # None: nothing


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
