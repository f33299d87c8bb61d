"""Runs one step of a stage: its passes in the plan's order, and messages to its neighbours.

Activations go down from stage to stage and gradients up, each on its own communicator, so the two directions never wait
for each other. With several chunks, the first and the last stage are also neighbours, with two more communicators.
Sends return at once; a receive is posted one pass ahead, so that compute hides it. Receive buffers are reused. Sent
tensors are kept until the schedule proves their arrival, as a host that runs ahead of its device cannot see it.

On a GPU the first step runs one micro-batch after the other and posts nothing ahead: CUDA loads a kernel at first use,
which may wait for all work of the device, including messages. Then no message in flight depends on the pass that needs
the kernel. The same holds for allocations: the memory of the second step, with several micro-batches in flight, is
allocated before it begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import paddle

from ..launch.out_of_memory import is_out_of_memory
from ..plan import Plan
from ..plan.communicators import BACK, DOWN, ON, UP
from ..plan.schedule import Pass, PassKind, arrivals, order
from . import device
from .batch import Samples, behind
from .collectives import Pending, receive_start, send_start
from .groups import Groups, end_out_of_memory
from .paddle_private import close_window, sharing
from .stage import Stage
from .trace import span


class Link:
    """One direction between this rank and its peer in a neighbouring stage. Messages arrive in order."""

    def __init__(self, group: Any, peer: int, shape: list[int], dtype: str):
        self._group, self._peer, self._shape, self._dtype = group, peer, shape, dtype
        self._sent: deque[Pending] = deque()
        self._left = 0  # messages since the last flush that have been released
        self._posted: deque[Pending] = deque()
        self._free: list[Any] = []  # buffers of messages that are no longer read

    def send(self, tensor: Any) -> None:
        """Start sending; the tensor is kept until it is sent."""
        self._sent.append(send_start(tensor, self._peer, self._group))

    def post(self) -> None:
        """Start receiving the next message."""
        buffer = self._free.pop() if self._free else self._place()
        self._posted.append(receive_start(buffer, self._peer, self._group))

    def have_places(self, messages: int) -> None:
        """Allocate buffers for `messages` messages at once; none is in use."""
        self._free += [self._place() for _ in range(messages - len(self._free))]

    def _place(self) -> Any:
        return paddle.empty(self._shape, self._dtype)

    @property
    def is_posted(self) -> bool:
        """Whether the receive of the next message is."""
        return bool(self._posted)

    def receive(self) -> Any:
        """The next message; posts its receive if necessary."""
        if not self._posted:
            self.post()
        return self._posted.popleft().wait()

    def done_with(self, message: Any) -> None:
        """Frees the buffer of a message that no later computation reads: another message may arrive in it."""
        self._free.append(message.detach())  # same memory, without its autograd graph

    def has_received(self, messages: int) -> None:
        """The peer has received `messages` messages since the last flush: release them."""
        while self._left < messages:
            self._sent.popleft().wait()
            self._left += 1

    def flush(self) -> None:
        """Wait until all messages are sent."""
        self.has_received(self._left + len(self._sent))
        self._left = 0


Links = tuple[Link, Link]  # links between two stages: activations, gradients


class StageSchedule(NamedTuple):
    """The passes of a stage, in order."""

    passes: list[Pass]
    arrived: list[int]  # for each pass: messages of this step to its source that have arrived when its input has

    @classmethod
    def of(cls, plan: Plan, stage: int, in_turn: bool = False) -> StageSchedule:
        """Lists the passes in the plan's order, or one micro-batch after the other."""

        def order_of(stage: int) -> list[Pass]:
            passes = order(plan.schedule, stage, plan.pipeline, plan.micro_batches, plan.chunks)
            return sorted(passes, key=lambda step: step.micro_batch) if in_turn else passes

        return cls(order_of(stage), arrivals(order_of, stage, plan.pipeline, plan.chunks))

    def most_held(self, each: Sequence[float]) -> float:
        """Peak if a micro-batch in flight in each chunk holds `each`."""
        in_flight = most = 0.0
        for step in self.passes:
            in_flight += each[step.chunk] if step.kind is PassKind.FORWARD else -each[step.chunk]
            most = max(most, in_flight)
        return most


class Headroom:
    """Memory that a step by the schedule needs beyond the first step, which runs one micro-batch after the other."""

    def __init__(self, in_turn: StageSchedule, schedule: StageSchedule, chunks: int):
        self._in_turn, self._schedule = in_turn, schedule
        self.held_mib = [0.0] * chunks  # memory of a micro-batch in flight

    def begin(self) -> None:
        """Call before the first step."""
        device.release()
        self._before_mib = device.allocated_mib()
        device.reset_peak()

    def end(self) -> None:
        """Call after the first step."""
        self._passing_mib = device.peak_mib() - self._before_mib
        self._taken_mib = device.reserved_peak_mib() - self._before_mib

    def reserve(self) -> None:
        """Allocate the memory of the second and all later steps. Raises if there is not enough.

        Like the first step, they waste memory in holes too small for large tensors and in messages still in use: the
        same share of the tensors' memory."""
        beyond_mib = self._schedule.most_held(self.held_mib) - self._in_turn.most_held(self.held_mib)
        tensors_mib = self._passing_mib + beyond_mib
        spare = self._taken_mib / self._passing_mib - 1 if self._passing_mib else 0.0
        device.reserve(tensors_mib, tensors_mib * spare)
        device.reset_peak()  # measure the peak of a step, not of this allocation


def _apart(sent: Any, received: Any) -> Any:
    """Returns `sent`, in memory that is not the buffer of a later message."""
    if received is not None:
        assert sent.data_ptr() != received.data_ptr(), "a chunk without work of its own sends its input"
    return sent


class Pipeline:
    """Runs steps of a stage."""

    def __init__(self, plan: Plan, stage: Stage, rank: int, groups: Groups):
        self._stage = stage
        self._micro_batches, self._chunks = plan.micro_batches, plan.chunks
        self._schedule = StageSchedule.of(plan, stage.index)
        self._next_schedule = self._schedule  # schedule of the next step
        self._headroom: Headroom | None = None  # headroom of the first two steps
        if device.loads_kernels():
            self._next_schedule = StageSchedule.of(plan, stage.index, in_turn=True)
        numbers = stage.numbers.sent.dtype
        size, first = plan.stage_size, rank % plan.stage_size
        last = first + plan.world_size - size

        def links(low: int, high: int, *uses: str) -> Links:
            peer = low + high - rank
            down, up = (Link(groups.get((low, high), use), peer, stage.boundary_shape, numbers) for use in uses)
            return down, up

        previous = None if stage.is_first else links(rank - size, rank, DOWN, UP)
        after = None if stage.is_last else links(rank, rank + size, DOWN, UP)
        wraps = plan.chunks > 1 and (stage.is_first or stage.is_last)
        around = links(first, last, ON, BACK) if wraps else None
        self._links = [link for pair in (previous, after, around) if pair for link in pair]
        # For each chunk: the source of its input and the destination of its output.
        self._above = [around if stage.is_first and chunk else previous for chunk in range(plan.chunks)]
        lasts = [plan.chunk_layers(stage.index, chunk)[-1:] for chunk in range(plan.chunks)]
        self._frees = [any(plan.layers[index].offload for index in last) for last in lasts]  # sent outputs
        self._below = [around if stage.is_last and chunk < plan.chunks - 1 else after for chunk in range(plan.chunks)]
        if self._links and self._next_schedule is not self._schedule:
            self._headroom = Headroom(self._next_schedule, self._schedule, plan.chunks)

    def run(self, samples: Samples, scale: float) -> Any:
        """One step over all micro-batches; gradients of `scale` times the summed loss are added to the parameters.

        The parts [micro-batches, r·S] hold the stage's samples. Returns the sum of this dp share's losses on the last
        stage, else 0.
        """
        try:
            return self._run(samples, scale)
        except Exception as error:
            if is_out_of_memory(error) and any(link.is_posted for link in self._links):
                end_out_of_memory(error)
            raise

    def _run(self, samples: Samples, scale: float) -> Any:
        if (headroom := self._headroom) and self._next_schedule is self._schedule:
            self._have_places()
            self._stage.window.reserve([int(self._most_in_flight(chunk)) for chunk in range(self._chunks)])
            headroom.reserve()
            self._headroom = headroom = None
        elif headroom:
            headroom.begin()
        self._stage.expect_gradient(scale)
        in_flight: list[deque[tuple[Any, Any]]] = [deque() for _ in range(self._chunks)]  # inputs and outputs in flight
        local_samples = self._take(samples)
        total = paddle.zeros([], "float32")
        passes, window = self._next_schedule.passes, self._stage.window
        for position, step in enumerate(passes):
            above, below = self._above[step.chunk], self._below[step.chunk]
            if step.kind is PassKind.FORWARD:
                x = self._receive(position)
                if x is not None:
                    x.stop_gradient = False
                if passes[position + 1].kind is PassKind.BACKWARD:
                    window.fetch_ahead(passes[position + 1].chunk)
                before_mib = device.allocated_mib() if headroom else 0.0
                with span(f"forward {self._name(step)}", "forward"):
                    out = self._forward(x, step, local_samples)
                if headroom:
                    headroom.held_mib[step.chunk] = device.allocated_mib() - before_mib
                if below:
                    below[0].send(_apart(out, x).detach())
                else:
                    total += out.detach()
                in_flight[step.chunk].append((x, out))
            else:
                x, out = in_flight[step.chunk].popleft()
                window.next_backward(step.chunk)
                self._stage.chains[step.chunk].last_backward = step.micro_batch == self._micro_batches - 1
                grad = self._backward(out, scale, position)
                self._stage.accumulate_gradients()
                if above:
                    above[1].send(_apart(x.grad, grad))
                    above[0].done_with(x)
        self._flush()
        if headroom:
            headroom.end()
        self._stage.load.padding.fills = False
        self._next_schedule = self._schedule
        return total

    def evaluate(self, samples: Samples) -> Any:
        """Runs only the forward passes; returns as `run`."""
        total = paddle.zeros([], "float32")
        local_samples = self._take(samples)
        with paddle.no_grad():
            for step in self._next_schedule.passes:
                if step.kind is PassKind.BACKWARD:
                    continue
                above, below = self._above[step.chunk], self._below[step.chunk]
                x = above[0].receive() if above else None
                out = self._forward(x, step, local_samples)
                if below:
                    below[0].send(sharing(out))
                    if self._frees[step.chunk]:
                        close_window(out)  # backward needs only its place in autograd's graph
                else:
                    total += out
                if above:
                    above[0].done_with(x)
        self._flush()
        return total

    def _most_in_flight(self, chunk: int) -> float:
        return self._schedule.most_held([float(each == chunk) for each in range(self._chunks)])

    def _have_places(self) -> None:
        """Allocates buffers for all messages that are in use at once, and the next of each direction."""
        for above in {id(pair): pair for pair in self._above if pair}.values():
            above[0].have_places(int(self._schedule.most_held([float(pair is above) for pair in self._above])) + 1)
        for below in {id(pair): pair for pair in self._below if pair}.values():
            below[1].have_places(2)

    def _flush(self) -> None:
        for link in self._links:
            link.flush()

    def _take(self, samples: Samples) -> list[tuple[Any, ...]]:
        """The stage's tokens, labels, ends and pairs of each micro-batch, on the device."""
        (ids, labels, ends, pairs), stage = samples, self._stage
        parts: list[Any] = [[None] * self._micro_batches for _ in samples]
        if stage.is_first:
            parts[0] = stage.take(ids)
        if stage.is_last:
            parts[1] = stage.take(labels)
        if ends is not None:
            parts[2] = stage.take_ends(ends)
            if stage.is_last and pairs is not None:
                parts[3] = stage.take_pairs(ends, pairs)
        if stage.has_mtp:
            parts.append(list(zip(*map(stage.take, behind(samples, stage.seq_length)), strict=True)))
        return list(zip(*parts, strict=True))

    def _forward(self, x: Any, step: Pass, local_samples: Sequence[tuple[Any, ...]]) -> Any:
        ids, labels, *others = local_samples[step.micro_batch]
        return self._stage.forward(x, ids, labels, step.chunk, *others)

    def _name(self, step: Pass) -> str:
        return str(step.micro_batch) if self._chunks == 1 else f"{step.micro_batch}, chunk {step.chunk}"

    def _source(self, step: Pass) -> Links | None:
        """Link from which a pass receives its input, and the link back to that stage."""
        if step.kind is PassKind.FORWARD:
            return self._above[step.chunk]
        below = self._below[step.chunk]
        return below and below[::-1]

    def _receive(self, position: int) -> Any:
        """Input of a pass, if a stage sends it; posts only the receive of the next pass, as on a GPU a posted receive
        occupies multiprocessors until its message arrives."""
        message = None
        if source := self._source(self._next_schedule.passes[position]):
            message = source[0].receive()
            source[1].has_received(self._next_schedule.arrived[position])
        if self._next_schedule is self._schedule:
            for step in self._next_schedule.passes[position + 1 : position + 2]:
                if ahead := self._source(step):
                    ahead[0].post()
        return message

    def _backward(self, out: Any, scale: float, position: int) -> Any:
        """Returns the received gradient, if a stage sends one."""
        step = self._next_schedule.passes[position]
        grad = self._receive(position)
        with span(f"backward {self._name(step)}", "backward"):
            if grad is None:
                (out * scale).backward()
            else:
                paddle.autograd.backward([out], [grad])
        if source := self._source(step):
            source[0].done_with(grad)
        return grad
