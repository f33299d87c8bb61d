"""Recompute of parts of a layer, as set per layer in `plan.strategy`.

Matrix products read a part's output and would keep it. Instead its memory is freed as soon as they have run. In
backward the first of these products runs the part again, from its inputs and with the same random numbers, into the
same tensor; backward then continues through the part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import paddle
from paddle.autograd import PyLayer

from .paddle_private import close_window, share
from .trace import span

Run = Callable[..., Any]


class RecomputedPart:
    """Calls functions from tensors to one tensor and recomputes them in backward."""

    def __init__(self, readers: Sequence[Any], weights: Callable[[], AbstractContextManager[None]]):
        """`readers`: the linear layers that read the output, in running order; `weights`: context that gives layers
        their weights, as in the forward pass."""
        self._weights = weights
        self._call: _Call | None = None  # the call whose output is being read
        for reader in readers:
            self._follow(reader, last=reader is readers[-1])

    def __call__(self, run: Run, *inputs: Any) -> Any:
        """`run(*inputs)`; the readers must run next."""
        if not paddle.is_grad_enabled():
            return run(*inputs)
        call = self._call = _Call(run, self._weights)
        call.out = _Recomputed.apply(call, *inputs)
        return call.out

    def _follow(self, reader: Any, last: bool) -> None:
        forward = reader.forward

        def read(x: Any) -> Any:
            out, call = forward(x), self._call
            if call is not None:
                out.register_hook(call.again)
                if last:
                    self._call = None
                    close_window(call.out)
            return out

        reader.forward = read


class _Call:
    """One call of a part, of one micro-batch."""

    def __init__(self, run: Run, weights: Callable[[], AbstractContextManager[None]]):
        self.run = run
        self.inputs: tuple[Any, ...] = ()
        self._weights, self._random = weights, paddle.get_rng_state()
        self.out: Any = None  # the tensor that readers use
        self._again: Any = None  # the same, with its autograd graph

    def again(self, _gradient: Any = None) -> None:
        """Restores the output in place; backward of every reader begins with this."""
        if self._again is not None:
            return
        self.inputs = tuple(map(_detached, self.inputs))
        now = paddle.get_rng_state()
        paddle.set_rng_state(self._random)
        with span("recompute", "recompute"), paddle.enable_grad(), self._weights():
            self._again = self.run(*self.inputs)
        paddle.set_rng_state(now)
        share(self.out, self._again, 0, self._again.shape[0])
        self.out = None

    def backward(self, gradient: Any) -> tuple[Any, ...]:
        """The inputs' gradients; those of weights are added to theirs."""
        self.again()
        paddle.autograd.backward([self._again], [gradient])
        gradients = tuple(x.grad for x in self.inputs)
        self.inputs, self._again = (), None  # autograd's graph holds this call until backward ends
        return gradients


class _Recomputed(PyLayer):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, call: _Call, *inputs: Any) -> Any:
        ctx.call, call.inputs = call, inputs
        return call.run(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return ctx.call.backward(gradient)


def _detached(x: Any) -> Any:
    alone = x.detach()
    alone.stop_gradient = x.stop_gradient
    return alone
