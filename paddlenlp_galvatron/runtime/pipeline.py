"""Runs one step of a stage: its passes in the plan's order, activations and gradients to its neighbours meanwhile.

Activations go down from stage to stage and gradients up, on a communicator each: the two directions never wait for
one another. Sends return at once; a receive is posted one pass ahead, so that it hides under compute.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import paddle

from ..plan import Plan
from ..plan.schedules import order
from .collectives import Pending, receive_start, send_start
from .groups import DOWN, UP, Groups
from .stage import Stage, Tokens
from .trace import span


class Link:
    """One direction between this rank and its peer in a neighbouring stage. Messages arrive in order."""

    def __init__(self, group: Any, peer: int, shape: list[int], dtype: str):
        self._group, self._peer, self._shape, self._dtype = group, peer, shape, dtype
        self._sent: deque[Pending] = deque()
        self._posted: deque[Pending] = deque()

    def send(self, tensor: Any) -> None:
        """Start sending; the tensor is kept until it has left."""
        while self._sent and self._sent[0].ended:
            self._sent.popleft()
        self._sent.append(send_start(tensor, self._peer, self._group))

    def post(self) -> None:
        """Start receiving the next message."""
        buffer = paddle.empty(self._shape, self._dtype)
        self._posted.append(receive_start(buffer, self._peer, self._group))

    def receive(self) -> Any:
        """The next message; posts it where that has not been done."""
        if not self._posted:
            self.post()
        return self._posted.popleft().wait()

    def flush(self) -> None:
        """Wait until all that was sent has left."""
        while self._sent:
            self._sent.popleft().wait()


class Pipeline:
    """Runs steps of a stage."""

    def __init__(self, plan: Plan, stage: Stage, rank: int, groups: Groups):
        self._stage = stage
        self._micro_batches = plan.micro_batches
        self._order = order(plan.schedule, stage.index, len(plan.stages), plan.micro_batches)
        before, after = rank - plan.stage_size, rank + plan.stage_size

        def link(first: int, second: int, use: str, peer: int) -> Link:
            return Link(groups.get((first, second), use), peer, stage.boundary_shape, stage.numbers.stored)

        self._from_before = None if stage.is_first else link(before, rank, DOWN, before)
        self._to_before = None if stage.is_first else link(before, rank, UP, before)
        self._to_after = None if stage.is_last else link(rank, after, DOWN, after)
        self._from_after = None if stage.is_last else link(rank, after, UP, after)

    def run(self, ids: Tokens, labels: Tokens, scale: float) -> Any:
        """One step over all micro-batches; gradients of `scale` times the summed loss are added to the parameters.

        `ids` and `labels` [micro-batches, M·S]. Returns the sum of this dp share's losses on the last stage, else 0.
        """
        held: deque[tuple[Any, Any]] = deque()  # input and output of the micro-batches in flight
        own_ids, own_labels = self._take(ids, labels)
        total = paddle.zeros([], "float32")
        for position, step in enumerate(self._order):
            if step.kind == "forward":
                x = self._input(position)
                with span(f"forward {step.micro_batch}", "forward"):
                    out = self._stage.forward(x, own_ids[step.micro_batch], own_labels[step.micro_batch])
                if self._stage.is_last:
                    total += out.detach()
                if self._to_after:
                    self._to_after.send(out.detach())
                held.append((x, out))
            else:
                x, out = held.popleft()
                self._stage.chain.last_backward = step.micro_batch == self._micro_batches - 1
                self._backward(out, scale, position)
                self._stage.settle()
                if self._to_before:
                    self._to_before.send(x.grad)
        for link in (self._to_after, self._to_before):
            if link:
                link.flush()
        return total

    def evaluate(self, ids: Tokens, labels: Tokens) -> Any:
        """As `run`, without gradients: forward passes alone."""
        total = paddle.zeros([], "float32")
        with paddle.no_grad():
            for micro_ids, micro_labels in zip(*self._take(ids, labels), strict=True):
                x = self._from_before.receive() if self._from_before else None
                out = self._stage.forward(x, micro_ids, micro_labels)
                if self._to_after:
                    self._to_after.send(out)
                else:
                    total += out
        if self._to_after:
            self._to_after.flush()
        return total

    def _take(self, ids: Tokens, labels: Tokens) -> tuple[list[Any], list[Any]]:
        """What the stage needs of a step's tokens, by micro-batch."""
        nothing = [None] * self._micro_batches
        return (
            self._stage.take(ids) if self._stage.is_first else nothing,
            self._stage.take(labels) if self._stage.is_last else nothing,
        )

    def _input(self, position: int) -> Any:
        if self._from_before is None:
            return None
        x = self._from_before.receive()
        x.stop_gradient = False
        self._post_next(self._from_before, "forward", position)
        return x

    def _backward(self, out: Any, scale: float, position: int) -> None:
        name = f"backward {self._order[position].micro_batch}"
        if self._from_after is None:
            with span(name, "backward"):
                (out * scale).backward()
            return
        grad = self._from_after.receive()
        self._post_next(self._from_after, "backward", position)
        with span(name, "backward"):
            paddle.autograd.backward([out], [grad])

    def _post_next(self, link: Link, kind: str, position: int) -> None:
        """Post a receive when this pass is followed, at once or after one other, by another that needs it."""
        if any(step.kind == kind for step in self._order[position + 1 : position + 3]):
            link.post()
