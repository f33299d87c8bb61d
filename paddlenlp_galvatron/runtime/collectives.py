"""Collectives, counted. The differentiable ones, at a layer's communication points, are in `ops`.

Every tensor is split and joined along its first dim. Shapes: T tokens held here, T·n tokens of a group of n ranks.
Logical bytes are counted above the backend: the whole tensor that a collective reduces, gathers or exchanges, as one
rank sees it; what a backend sends for it (a ring sends 2(n-1)/n of an all-reduce) is its own affair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import paddle
import paddle.distributed as dist

from ..launch.status import waiting
from . import device
from .cpu_backend import SentRows
from .outstanding import Operation
from .trace import span

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")
traffic_bytes: Counter[str] = Counter()  # by collective, since the process started or `forget_traffic`
traffic_calls: Counter[str] = Counter()


def count(kind: str, tensor: Any) -> None:
    """Add one collective over a tensor to the traffic of this process."""
    traffic_bytes[kind] += tensor.size * tensor.element_size()
    traffic_calls[kind] += 1


def forget_traffic() -> None:
    """Count from zero."""
    traffic_bytes.clear()
    traffic_calls.clear()


class Pending:
    """A collective or message under way. Its tensors are kept, and nobody may write to them, until `wait`, which gives
    the result."""

    def __init__(self, operation: Operation, out: Any, kept: Any = None):
        self._operation, self._out, self._kept = operation, out, kept

    def wait(self) -> Any:
        with waiting(self._operation.what), span(*self._operation.shown):
            self._operation.wait()
        self._kept = None
        return self._out


How = Mapping[str, bool]
LATER: How = {"sync_op": False}
# In the queue of what is computed, where the next that is computed needs the result: no events between two queues.
AT_ONCE: How = {"sync_op": True, "use_calc_stream": True}


def _start(kind: str, group: Any, call: Callable[[], Any], out: Any, kept: Any = None, how: How = LATER) -> Pending:
    operation = Operation(kind, tuple(group.ranks))
    with waiting(operation.what), span(*operation.shown):  # gloo's collectives return when they are done
        task = call()
        # Paddle calls what runs in the queue of what is computed completed at once.
        operation.task = device.Mark() if how is AT_ONCE and device.on_gpu() else task
    return Pending(operation, out, kept)


def within(kind: str, group: Any, call: Callable[[], Any]) -> Any:
    """Result of a kernel that exchanges messages by itself, in the compute queue."""
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
    """Start [T, …] -> [T·n, …]: the slices of all ranks, in rank order, in `out` where that is given."""
    if out is None:
        out = paddle.empty([tensor.shape[0] * group.nranks, *tensor.shape[1:]], tensor.dtype)
    count("all_gather", out)
    tensor = tensor.contiguous()
    call = partial(dist.stream.all_gather, out, tensor, group=group, **how)
    return _start("all_gather", group, call, out, tensor, how)


def reduce_scatter_start(tensor: Any, group: Any, how: How = LATER) -> Pending:
    """Start [T·n, …] -> [T, …]: this rank's slice of the sum over the group. The input's content may be lost."""
    out = paddle.empty([tensor.shape[0] // group.nranks, *tensor.shape[1:]], tensor.dtype)
    count("reduce_scatter", tensor)
    tensor = tensor.contiguous()
    call = partial(dist.stream.reduce_scatter, out, tensor, group=group, **how)
    return _start("reduce_scatter", group, call, out, tensor, how)


def broadcast(tensor: Any, group: Any) -> None:
    """Copy the tensor of the group's first rank to all its ranks, in place. Used for initial weights; not counted."""
    call = partial(dist.stream.broadcast, tensor, src=group.ranks[0], group=group, **LATER)
    _start("broadcast", group, call, tensor).wait()


def send_start(tensor: Any, peer: int, group: Any) -> Pending:
    """Start sending to a global rank of the group. Nobody writes to the tensor before it has left."""
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

    `rows`: how many from each rank to each; equal shares where that is None.
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
