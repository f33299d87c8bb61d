"""The weights of one module under its data-parallel type: the parts of weights, gradients and moments on each rank.

A unit holds the matrices of a decoder layer, of the embedding or of the LM head; the ranks over whose tokens their
gradients are summed are its group of D ranks. Norms and biases, a thousandth of the weights, stay whole everywhere
and are reduced together at the end of the step.

    type    weights              gradients                          optimizer works on
    ddp     whole                whole, all-reduced (small: joined) the weights
    zero2   whole                reduce-scattered to 1/D            1/D of the weights, then gathered
    zero3   1/D, gathered while  reduce-scattered to 1/D            1/D of the weights
            the module runs

Gradients are summed locally over the micro-batches and reduced when the module's last backward pass is done, during
the backward passes of earlier layers; or after every micro-batch, when the plan says so. ZeRO stores the matrices one
after the other in a flat buffer, padded to a multiple of D; a weight is a window into it. If it shards over a subset of
the ranks, sums are all-reduced between the ranks with the same shard: once a step, after the last micro-batch's
reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import paddle

from ..plan import DataParallel
from ..plan.comm_points import WEIGHT_OPS, Collective
from ..plan.strategy import JOINED_NUMBERS
from .collectives import Pending, all_gather_first, all_gather_start, all_reduce, all_reduce_start, reduce_scatter_start
from .paddle_private import Windows, flattened, share, window
from .precision import add, cast
from .trace import span
from .weights import ShardedParameter, fill, within, zero_parameter

ALIGNED_BYTES = 16  # Paddle's fused AdamW reads four fp32 numbers of a gradient at once


@dataclass(frozen=True, eq=False)
class Piece:
    """Elements `start..stop-1` of a weight's flattened local slice, at `offset` of a trainable tensor."""

    weight: ShardedParameter
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, eq=False)
class Trainable:
    """A tensor that the optimizer updates, always fp32: a whole local weight, a rank's part of a unit's flat buffer,
    or the fp32 master copy of either."""

    tensor: Any
    pieces: tuple[Piece, ...]
    decays: bool
    owner: ShardedParameter | ShardedUnit  # holds the gradient and receives the updated values
    sharding: int = 1  # ranks over which ZeRO shards the weights
    holders: Any = None  # group of the ranks that sum its gradient and hold the same numbers; None: this rank alone

    @property
    def gradient(self) -> Any:
        return self.owner.gradient

    @property
    def is_first_copy(self) -> bool:
        """Whether no lower rank holds the same values."""
        first = self.holders is None or self.holders.rank == 0
        return first and any(piece.weight.first_copy for piece in self.pieces)

    def present_gradient(self, factor: float) -> None:
        """Give the optimizer the gradient times `factor`, in fp32."""
        if self.tensor.grad is None:
            self.tensor.grad_ = in_fp32(self.gradient)  # shares the memory; `grad` would copy and wait for the copy
        if factor != 1.0:
            self.tensor.grad.scale_(factor)

    def updated(self) -> None:
        """Called after the optimizer: drop the gradient and start sending the values."""
        self.drop_gradient()
        self.owner.publish(self.tensor)

    def published(self) -> None:
        """Start sending the values to the other ranks; readers of the weights wait for the messages."""
        self.owner.published()

    def drop_gradient(self) -> None:
        self.owner.drop_gradient()
        self.tensor.clear_gradient(False)


def in_fp32(gradient: Any) -> Any:
    """The gradient in fp32 with the alignment of the optimizer's kernels; copied only if needed."""
    fp32 = cast(gradient, "float32")
    return fp32.clone() if fp32.data_ptr() % ALIGNED_BYTES else fp32  # a window after a weight of odd size


def whole(weight: ShardedParameter) -> Trainable:
    """A local weight that the optimizer updates in place."""
    each = weight.tensor.size // len(weight.members)
    pieces = tuple(Piece(member, 0, each, index * each) for index, member in enumerate(weight.members))
    return Trainable(master_of(weight.tensor), pieces, weight.decays, weight, holders=weight.sum_group)


def master_of(tensor: Any) -> Any:
    """The fp32 master of a tensor for the optimizer; an fp32 tensor is its own master."""
    if tensor.dtype == paddle.float32:
        return tensor
    master = zero_parameter(list(tensor.shape), "float32")
    master.set_value(tensor.astype("float32"))
    return master


class Unit:
    """Matrices of one module, kept whole on every rank of the group (ddp), and what all kinds of units share."""

    every_micro_batch = False
    sends_whole = False  # whether reductions need whole gradients and keep less

    def __init__(self, weights: Sequence[ShardedParameter], group: Any):
        self.weights = tuple(weights)
        self.group = group
        self.deferred = False  # reduced at the end of the step only: another module shares a weight
        self._pending: list[Pending] = []  # reductions under way
        self._reduced = False

    def begin(self) -> None:
        """Give the weights their first values. Each rank of the group makes a share of them."""
        if self.group is None:
            for weight in self.weights:
                fill([weight], flattened(weight.tensor))
            return
        whole, offset = all_gather_first(self._first_share(), self.group), 0
        for weight, size in zip(self.weights, self._sizes, strict=True):
            paddle.assign(window(whole, offset, offset + size, weight.tensor.shape), output=weight.tensor.detach())
            offset += size

    def _first_share(self) -> Any:
        """This rank's share of the first values, a flat parameter; zeros after the last value."""
        size = -(-sum(self._sizes) // self.group.nranks)
        share_of_all = zero_parameter([size], self.weights[0].tensor.dtype)
        fill(self.weights, share_of_all.detach(), self.group.rank * size)
        return share_of_all

    def make_trainables(self) -> list[Trainable]:
        """Tensors that the optimizer updates; called once."""
        return [whole(weight) for weight in self.weights]

    def held(self) -> list[tuple[ShardedParameter, Any]]:
        """Each weight, and the parameter in which this rank holds its values between two steps."""
        return [pair for weight in self.weights for pair in weight.held()]

    def gather(self) -> None:
        """Make the whole weights available. Every use of the module calls it, and `release` after."""

    def release(self) -> None:
        """The module has run; its whole weights may be freed."""

    def prefetch(self) -> None:
        """Start the all-gather that `gather` waits for."""

    def backward_done(self, last: bool) -> None:
        """This module's gradients of one micro-batch are complete; `last`: the step's last."""
        for weight in self.weights:
            weight.accumulate_autograd()
        if (last or self.every_micro_batch) and not self.deferred:
            with span("sum gradients", "gradients"):
                self._start()
            self._reduced = last

    def finish(self) -> None:
        """End of the step: reduce the remaining gradients."""
        if not self._reduced:
            self._start()
        self._reduced = True
        self.finish_reductions()
        self._reduced = False

    def _start(self) -> None:
        """Start reducing the local gradients."""
        self.finish_reductions()
        self._sum_copies()
        if self.group is not None:
            self._pending = [all_reduce_start(weight.gradient, self.group) for weight in self.weights]

    def finish_reductions(self) -> None:
        """Wait for the reductions in flight and keep their results."""
        self._finished()

    def _finished(self) -> list[Any]:
        results = [pending.wait() for pending in self._pending]
        self._pending = []
        return results

    def _sum_copies(self) -> None:
        for weight in self.weights:
            all_reduce(weight.gradient, weight.presum_group)

    @property
    def _sizes(self) -> list[int]:
        return [weight.tensor.size for weight in self.weights]

    def _joined_gradients(self, padding: int = 0) -> Any:
        """Joins all local gradients flat, one after the other, and drops those of the weights."""
        self._sum_copies()
        parts = [weight.gradient.flatten() for weight in self.weights]
        if padding:
            parts.append(paddle.zeros([padding], parts[0].dtype))
        for weight in self.weights:
            weight.drop_gradient()
        return paddle.concat(parts) if len(parts) > 1 else parts[0]


class JoinedUnit(Unit):
    """ddp with gradients in one message: for small modules, to save latency, and if gradients are reduced after every
    micro-batch, to keep reduced and unreduced gradients apart."""

    def __init__(self, weights: Sequence[ShardedParameter], group: Any, every_micro_batch: bool):
        super().__init__(weights, group)
        self.every_micro_batch = every_micro_batch
        self._sum: Any = None

    def _start(self) -> None:
        self.finish_reductions()
        self._pending = [all_reduce_start(self._joined_gradients(), self.group)]

    def finish_reductions(self) -> None:
        for joined in self._finished():
            self._sum = add(self._sum, joined, self.weights[0].gradient_dtype)

    def finish(self) -> None:
        super().finish()
        if self._sum is not None:
            stop = 0
            for weight, size in zip(self.weights, self._sizes, strict=True):
                start, stop = stop, stop + size
                weight.summed = window(self._sum, start, stop, weight.tensor.shape)
            self._sum = None


class ShardedUnit(Unit):
    """Matrices whose optimizer states and gradients (zero2), and also weights (zero3), are sharded over the group."""

    sends_whole = True

    def __init__(self, weights: Sequence[ShardedParameter], group: Any, every_micro_batch: bool, keep_whole: bool):
        super().__init__(weights, group)
        self._replicas = weights[0].replica_group
        self._summing: Pending | None = None  # the sum over these, under way
        self.every_micro_batch = every_micro_batch
        self._keep_whole = keep_whole
        self._windows = Windows([weight.tensor for weight in weights])
        self._padding = -sum(self._sizes) % group.nranks
        self._shard_size = (sum(self._sizes) + self._padding) // group.nranks
        self._users = 0
        self._flight: Pending | None = None
        self._publishing: Pending | None = None
        self._sum: Any = None  # sum of this rank's part of the gradients
        self._flat: Any = None

    def begin(self) -> None:
        self._shard = self._first_shard()
        if self._keep_whole:  # this rank's part is a window into the whole, so that it is held once
            self._flat = all_gather_first(self._shard, self.group)
            share(self._shard, self._flat, self.group.rank * self._shard_size, (self.group.rank + 1) * self._shard_size)
            self._windows.open(self._flat)
        else:
            self._windows.close()

    def _first_shard(self) -> Any:
        """This rank's shard of the first values. Ranks with the same shard each make a share of it."""
        if self._replicas is None:
            return self._first_share()
        size = -(-self._shard_size // self._replicas.nranks)
        local = paddle.zeros([size], self.weights[0].tensor.dtype)
        fill(self.weights, local, self.group.rank * self._shard_size + self._replicas.rank * size)
        shard = zero_parameter([self._shard_size], local.dtype)
        joined = all_gather_first(local, self._replicas)
        paddle.assign(window(joined, 0, self._shard_size, [self._shard_size]), output=shard.detach())
        return shard

    def make_trainables(self) -> list[Trainable]:
        pieces = tuple(Piece(*each) for each in self._own() if each[1] < each[2])
        return [Trainable(master_of(self._shard), pieces, True, self, self.group.nranks, self._replicas)]

    def held(self) -> list[tuple[ShardedParameter, Any]]:
        """The elements of a weight's slice in this rank's part under zero3, flat; possibly none."""
        self.published()
        if self._keep_whole:
            return super().held()
        pairs = []
        for weight, low, high, offset in self._own():
            pairs.append((weight, zero_parameter([high - low], self._shard.dtype)))
            if low < high:
                share(pairs[-1][1], self._shard, offset, offset + high - low)
        return pairs

    def _own(self) -> Iterator[tuple[ShardedParameter, int, int, int]]:
        """Divides this rank's part among the weights; see `within`."""
        start = self.group.rank * self._shard_size
        return within(self.weights, start, start + self._shard_size)

    @property
    def gradient(self) -> Any:
        """This rank's part [part], summed over the ranks of the group."""
        return self._sum

    def drop_gradient(self) -> None:
        self._sum = None

    def gather(self) -> None:
        self.published()
        self._users += 1
        if self._flat is None:
            self.prefetch()
            assert self._flight is not None
            with span("gather weights", "gather"):
                self._flat = self._flight.wait()
            self._flight = None
            self._windows.open(self._flat)

    def prefetch(self) -> None:
        if self._flat is None and self._flight is None:
            with span("gather weights", "gather"):
                self._flight = all_gather_start(self._shard, self.group)

    def release(self) -> None:
        self._users -= 1
        if not self._keep_whole and self._users == 0:
            self._windows.close()
            self._flat = None

    def writable(self) -> Any:
        """This rank's part, which has no readers now."""
        self.published()
        if self._flight is not None:  # fetched before the update
            self._flight.wait()
            self._flight = None
        return self._shard

    def publish(self, updated: Any) -> None:
        """The optimizer has updated this rank's part: start updating the whole weights in place."""
        if updated is not self.writable():
            paddle.assign(cast(updated, self._shard.dtype), output=self._shard)
        if self._keep_whole:
            self._publishing = all_gather_start(self._shard, self.group, out=self._flat)

    def published(self) -> None:
        if self._publishing is not None:
            self._publishing.wait()
            self._publishing = None

    def _start(self) -> None:
        self.finish_reductions()
        self._pending = [reduce_scatter_start(self._joined_gradients(self._padding), self.group)]

    def finish_reductions(self) -> None:
        for reduced in self._finished():
            self._sum = add(self._sum, reduced, self.weights[0].gradient_dtype)
            if self._reduced and self._replicas is not None:
                self._summing = all_reduce_start(self._sum, self._replicas)

    def finish(self) -> None:
        super().finish()
        if self._summing is not None:
            self._summing.wait()
            self._summing = None


def make_unit(weights: Sequence[ShardedParameter], dp_type: DataParallel, every_micro_batch: bool) -> Unit:
    """The unit of a module's matrices. They share one group; a group of one rank has nothing to shard."""
    group, ops = weights[0].sum_group, WEIGHT_OPS[dp_type]
    if ops.reduce is Collective.ALL_REDUCE or group is None:
        small = len(weights) > 1 and sum(int(weight.tensor.size) for weight in weights) <= JOINED_NUMBERS
        if group is not None and (every_micro_batch or small):
            return JoinedUnit(weights, group, every_micro_batch)
        return Unit(weights, group)
    return ShardedUnit(weights, weights[0].shard_group or group, every_micro_batch, keep_whole=ops.gather is None)
