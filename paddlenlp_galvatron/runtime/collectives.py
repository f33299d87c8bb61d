"""Collectives, counted and watched. The differentiable ones, at a layer's communication points, are in `mappings`.

Every tensor is split and joined along its first dim. Shapes: T tokens held here, T·n tokens of a group of n ranks.
Logical bytes are counted above the backend: the whole tensor that a collective reduces, gathers or exchanges, as one
rank sees it; the bytes that a backend sends for it (a ring sends 2(n-1)/n of an all-reduce) are not counted.

A watchdog names an operation that never ends. On a GPU a call returns at once, and a hang shows at the next read of a
value, which does not name its cause.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import paddle
import paddle.distributed as dist

from ..launch import status
from ..launch.faults import named
from ..launch.status import RankOutcome, waiting
from . import device
from .cpu_backend import SentRows
from .trace import span

CHECK_S = 5.0  # interval of the watchdog
MESSAGES = ("send", "receive")  # messages between stages; all others are collectives
_started: deque[Operation] = deque()
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")
traffic_bytes: Counter[str] = Counter()  # keyed by collective, since the start or `forget_traffic`
traffic_calls: Counter[str] = Counter()
How = Mapping[str, bool]
LATER: How = {"sync_op": False}
# On the compute stream, if the next kernel needs the result: avoids events between two streams.
AT_ONCE: How = {"sync_op": True, "use_calc_stream": True}


class Operation:
    """A collective or message that was started."""

    __slots__ = ("_ended", "_step", "shown", "since", "task", "what")

    def __init__(self, kind: str, ranks: tuple[int, ...]):
        self.what = f"{kind} of {named(ranks)}"
        self._step = status.step()
        self.shown = ("wait", "wait") if kind in MESSAGES else (kind, "collective")  # name and category on a time line
        self.since = time.monotonic()
        self.task: Any = None  # Paddle's, once the call has returned
        self._ended = False
        while _started and _started[0].ended:
            _started.popleft()
        _started.append(self)

    @property
    def ended(self) -> bool:
        """Whether it has finished."""
        task = self.task
        if task is not None and task.is_completed():
            self._ended, self.task = True, None  # gloo's tasks hold their inputs
        return self._ended

    @property
    def started(self) -> str:
        """The operation and its step, in words."""
        return self.what + status.in_step(self._step)

    def wait(self) -> None:
        """Make this rank's next computation wait for it: the host on CPU, the compute stream on a GPU."""
        if (task := self.task) is not None:  # the watchdog clears a finished task
            task.wait()
        _ = self.ended


def oldest() -> tuple[str, float] | None:
    """The longest current operation or wait, and its start by the monotonic clock."""
    waits = [(call.started, call.since) for call in list(_started) if not call.ended][:1]
    if wait := status.longest_wait():
        waits.append(wait)
    return min(waits, key=lambda wait: wait[1], default=None)


def watch(limit_s: float) -> None:
    """From now on end this process if an operation takes too long, and name the operation."""
    threading.Thread(target=_watch, args=(limit_s, device.gpu_number()), daemon=True).start()


def _watch(limit_s: float, gpu: int | None) -> None:
    device.use_in_thread(gpu)
    while True:
        time.sleep(min(CHECK_S, limit_s))
        if (wait := oldest()) and time.monotonic() - wait[1] > limit_s:
            late = f"has not ended within {limit_s:.0f} s"
            status.failed(RankOutcome.LOST_A_PEER, f"it {late}", waited_in=wait[0])
            sys.stderr.write(f"error: {wait[0]} {late}\n")
            sys.stderr.flush()
            os._exit(1)


def count(kind: str, tensor: Any) -> None:
    """Add one collective over a tensor to the traffic of this process."""
    traffic_bytes[kind] += tensor.size * tensor.element_size()
    traffic_calls[kind] += 1


def forget_traffic() -> None:
    """Count from zero."""
    traffic_bytes.clear()
    traffic_calls.clear()


class Pending:
    """A collective or message in flight. Its tensors are kept and must not be written until `wait`, which gives the
    result."""

    def __init__(self, operation: Operation, out: Any, kept: Any = None):
        self._operation, self._out, self._kept = operation, out, kept

    def wait(self) -> Any:
        with waiting(self._operation.what), span(*self._operation.shown):
            self._operation.wait()
        self._kept = None
        return self._out


def _start(kind: str, group: Any, call: Callable[[], Any], out: Any, kept: Any = None, how: How = LATER) -> Pending:
    operation = Operation(kind, tuple(group.ranks))
    with waiting(operation.what), span(*operation.shown):  # gloo's collectives return when they are done
        task = call()
        # For Paddle a collective on the compute stream is completed at once.
        operation.task = device.Mark() if how is AT_ONCE and device.on_gpu() else task
    return Pending(operation, out, kept)


def within(kind: str, group: Any, call: Callable[[], Any]) -> Any:
    """Result of a kernel that communicates by itself, in the compute queue."""
    operation = Operation(kind, tuple(group.ranks))
    with waiting(operation.what), span(*operation.shown):
        out = call()
        operation.task = device.Mark()
    return out


def all_reduce_start(tensor: Any, group: Any, op: Any = dist.ReduceOp.SUM, how: How = LATER) -> Pending:
    """Start reducing in place over the group."""
    count("all_reduce", tensor)
    call = partial(dist.stream.all_reduce, tensor, op=op, group=group, **how)
    return _start("all_reduce", group, call, tensor, how=how)


def all_gather_start(tensor: Any, group: Any, how: How = LATER, out: Any = None) -> Pending:
    """Start [T, …] -> [T·n, …]: the slices of all ranks in rank order, into `out` if given."""
    if out is None:
        out = paddle.empty([tensor.shape[0] * group.nranks, *tensor.shape[1:]], tensor.dtype)
    count("all_gather", out)
    tensor = tensor.contiguous()
    call = partial(dist.stream.all_gather, out, tensor, group=group, **how)
    return _start("all_gather", group, call, out, tensor, how)


def reduce_scatter_start(tensor: Any, group: Any, how: How = LATER) -> Pending:
    """Start [T·n, …] -> [T, …]: this rank's slice of the sum over the group. The input may be overwritten."""
    out = paddle.empty([tensor.shape[0] // group.nranks, *tensor.shape[1:]], tensor.dtype)
    count("reduce_scatter", tensor)
    tensor = tensor.contiguous()
    call = partial(dist.stream.reduce_scatter, out, tensor, group=group, **how)
    return _start("reduce_scatter", group, call, out, tensor, how)


def broadcast(tensor: Any, group: Any) -> None:
    """Copy the tensor of the group's first rank to all its ranks, in place. Used for initial weights; not counted."""
    call = partial(dist.stream.broadcast, tensor, src=group.ranks[0], group=group, **LATER)
    _start("broadcast", group, call, tensor).wait()


def all_gather_first(tensor: Any, group: Any) -> Any:
    """Join flat parts of initial weights, as `all_gather_start`; not counted."""
    whole = paddle.empty([tensor.shape[0] * group.nranks], tensor.dtype)
    call = partial(dist.stream.all_gather, whole, tensor, group=group, **LATER)
    return _start("all_gather", group, call, whole, tensor).wait()


def send_start(tensor: Any, peer: int, group: Any) -> Pending:
    """Start sending to a global rank of the group. The tensor must not be written before it is sent."""
    count("p2p", tensor)
    tensor = tensor.contiguous()
    return _start("send", group, partial(dist.isend, tensor, peer, group), tensor)


def receive_start(buffer: Any, peer: int, group: Any) -> Pending:
    """Start receiving into the buffer from a global rank of the group."""
    return _start("receive", group, partial(dist.irecv, buffer, peer, group), buffer)


def all_reduce(tensor: Any, group: Any, op: Any = dist.ReduceOp.SUM) -> Any:
    """Reduce in place over the group; returns the tensor. Group None: one rank, nothing to do."""
    return tensor if group is None else all_reduce_start(tensor, group, op, AT_ONCE).wait()


def all_gather(tensor: Any, group: Any) -> Any:
    """[T, …] -> [T·n, …]. Group None: one rank, nothing to do."""
    return tensor if group is None else all_gather_start(tensor, group, AT_ONCE).wait()


def reduce_scatter(tensor: Any, group: Any) -> Any:
    """[T·n, …] -> [T, …], as `reduce_scatter_start`. Group None: one rank, nothing to do."""
    return tensor if group is None else reduce_scatter_start(tensor, group, AT_ONCE).wait()


def all_to_all(tensor: Any, group: Any, rows: Sequence[Sequence[int]] | None = None) -> Any:
    """Give each rank of the group its rows of `tensor` and join the rows received, in rank order.

    `rows`: numbers from each rank to each; None: equal shares.
    """
    receive = None if rows is None else [sent[group.rank] for sent in rows]
    out = paddle.empty([tensor.shape[0] if receive is None else sum(receive), *tensor.shape[1:]], tensor.dtype)
    count("all_to_all", tensor)
    tensor = tensor.contiguous()
    call = partial(
        dist.stream.alltoall_single,
        out,
        tensor,
        out_split_sizes=receive,
        in_split_sizes=None if rows is None else SentRows(rows, group.rank),
        group=group,
        **AT_ONCE,
    )
    return _start("all_to_all", group, call, out, tensor, AT_ONCE).wait()
