"""Runs one step of a stage: its passes in the plan's order, activations and gradients to its neighbours meanwhile.

Activations go down from stage to stage and gradients up, on a communicator each: the two directions never wait for
one another. Where stages have several chunks, the first and the last stage are neighbours, too, on two more. Sends
return at once; a receive is posted one pass ahead, so that it hides under compute. What messages arrive in is kept for
those to come.

On a GPU the first step takes one micro-batch after the other, and posts nothing ahead: CUDA loads a kernel when it is
first used, and may wait for all that the device was given to do, for messages, too. Nothing is under way then that
needs the pass that the kernel is for.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import paddle

from ..plan import Plan
from ..plan.schedules import Pass, order
from . import device
from .collectives import Pending, receive_start, send_start
from .groups import BACK, DOWN, ON, UP, Groups
from .stage import Stage, Tokens
from .trace import span


class Link:
    """One direction between this rank and its peer in a neighbouring stage. Messages arrive in order."""

    def __init__(self, group: Any, peer: int, shape: list[int], dtype: str):
        self._group, self._peer, self._shape, self._dtype = group, peer, shape, dtype
        self._sent: deque[Pending] = deque()
        self._posted: deque[Pending] = deque()
        self._free: list[Any] = []  # where messages arrived that are not read any more

    def send(self, tensor: Any) -> None:
        """Start sending; the tensor is kept until it has left."""
        self._sent.append(send_start(tensor, self._peer, self._group))

    def post(self) -> None:
        """Start receiving the next message."""
        buffer = self._free.pop() if self._free else paddle.empty(self._shape, self._dtype)
        self._posted.append(receive_start(buffer, self._peer, self._group))

    @property
    def is_posted(self) -> bool:
        """Whether the receive of the next message is."""
        return bool(self._posted)

    def receive(self) -> Any:
        """The next message; posts it where that has not been done."""
        if not self._posted:
            self.post()
        return self._posted.popleft().wait()

    def done_with(self, message: Any) -> None:
        """What is computed next does not read this message any more: another one may arrive where it did."""
        self._free.append(message.detach())  # on the same memory, without what autograd knows of it

    def let_go(self) -> None:
        """Keep no more what has left."""
        while self._sent and self._sent[0].ended:
            self._sent.popleft()

    def flush(self) -> None:
        """Wait until all that was sent has left."""
        while self._sent:
            self._sent.popleft().wait()


class Pipeline:
    """Runs steps of a stage."""

    def __init__(self, plan: Plan, stage: Stage, rank: int, groups: Groups):
        self._stage = stage
        self._micro_batches, self._chunks = plan.micro_batches, plan.chunks
        self._schedule = order(plan.schedule, stage.index, plan.pipeline, plan.micro_batches, plan.chunks)
        self._order = self._schedule  # of the next step
        if device.loads_kernels():
            self._order = sorted(self._schedule, key=lambda step: step.micro_batch)
        size, first = plan.stage_size, rank % plan.stage_size
        last = first + plan.world_size - size

        def links(low: int, high: int, uses: tuple[str, str]) -> list[Link]:
            """For activations, and for gradients."""
            peer = low + high - rank
            return [
                Link(groups.get((low, high), use), peer, stage.boundary_shape, stage.numbers.stored) for use in uses
            ]

        before: list[Link] | None = None
        after: list[Link] | None = None
        around: list[Link] | None = None
        if not stage.is_first:
            before = links(rank - size, rank, (DOWN, UP))
        if not stage.is_last:
            after = links(rank, rank + size, (DOWN, UP))
        if plan.chunks > 1 and (stage.is_first or stage.is_last):
            around = links(first, last, (ON, BACK))
        self._links = [link for pair in (before, after, around) if pair for link in pair]
        # Of each chunk: where its input comes from and where its output goes to.
        self._above = [around if stage.is_first and chunk else before for chunk in range(plan.chunks)]
        self._below = [around if stage.is_last and chunk < plan.chunks - 1 else after for chunk in range(plan.chunks)]

    def run(self, ids: Tokens, labels: Tokens, scale: float) -> Any:
        """One step over all micro-batches; gradients of `scale` times the summed loss are added to the parameters.

        `ids` and `labels` [micro-batches, M·S]. Returns the sum of this dp share's losses on the last stage, else 0.
        """
        held: list[deque[tuple[Any, Any]]] = [deque() for _ in range(self._chunks)]  # inputs and outputs in flight
        own_ids, own_labels = self._take(ids, labels)
        total = paddle.zeros([], "float32")
        for position, step in enumerate(self._order):
            above, below = self._above[step.chunk], self._below[step.chunk]
            if step.kind == "forward":
                x = self._input(position)
                with span(f"forward {self._name(step)}", "forward"):
                    out = self._stage.forward(x, own_ids[step.micro_batch], own_labels[step.micro_batch], step.chunk)
                if below:
                    below[0].send(out.detach())
                else:
                    total += out.detach()
                held[step.chunk].append((x, out))
            else:
                x, out = held[step.chunk].popleft()
                self._stage.chains[step.chunk].last_backward = step.micro_batch == self._micro_batches - 1
                self._backward(out, scale, position)
                self._stage.settle()
                if above:
                    above[1].send(x.grad)
                    above[0].done_with(x)
        self._flush()
        self._order = self._schedule
        return total

    def evaluate(self, ids: Tokens, labels: Tokens) -> Any:
        """As `run`, without gradients: forward passes alone."""
        total = paddle.zeros([], "float32")
        own_ids, own_labels = self._take(ids, labels)
        with paddle.no_grad():
            for step in self._order:
                if step.kind == "backward":
                    continue
                above, below = self._above[step.chunk], self._below[step.chunk]
                x = above[0].receive() if above else None
                out = self._stage.forward(x, own_ids[step.micro_batch], own_labels[step.micro_batch], step.chunk)
                if below:
                    below[0].send(out)
                else:
                    total += out
                if above:
                    above[0].done_with(x)
        self._flush()
        return total

    def _flush(self) -> None:
        for link in self._links:
            link.flush()

    def _take(self, ids: Tokens, labels: Tokens) -> tuple[list[Any], list[Any]]:
        """What the stage needs of a step's tokens, by micro-batch."""
        nothing = [None] * self._micro_batches
        return (
            self._stage.take(ids) if self._stage.is_first else nothing,
            self._stage.take(labels) if self._stage.is_last else nothing,
        )

    def _name(self, step: Pass) -> str:
        return str(step.micro_batch) if self._chunks == 1 else f"{step.micro_batch}, chunk {step.chunk}"

    def _source(self, step: Pass) -> Link | None:
        """Where a pass receives what it begins with."""
        if step.kind == "forward":
            links = self._above[step.chunk]
            return links[0] if links else None
        links = self._below[step.chunk]
        return links[1] if links else None

    def _input(self, position: int) -> Any:
        link = self._source(self._order[position])
        if link is None:
            self._post_next(position)
            return None
        x = link.receive()
        x.stop_gradient = False
        self._post_next(position)
        return x

    def _backward(self, out: Any, scale: float, position: int) -> None:
        step = self._order[position]
        name = f"backward {self._name(step)}"
        link = self._source(step)
        if link is None:
            self._post_next(position)
            with span(name, "backward"):
                (out * scale).backward()
            return
        grad = link.receive()
        self._post_next(position)
        with span(name, "backward"):
            paddle.autograd.backward([out], [grad])
        link.done_with(grad)

    def _post_next(self, position: int) -> None:
        """Post the receive of the next pass, and of the one after it, where that has not been done. What the pass has
        received tells that older messages have left."""
        for any_link in self._links:
            any_link.let_go()
        if self._order is not self._schedule:
            return
        for step in self._order[position + 1 : position + 3]:
            link = self._source(step)
            if link and not link.is_posted:
                link.post()
