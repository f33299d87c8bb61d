"""Collectives of a module by `plan.comm_points`: their bytes, for prices and for counts (`traffic`), and their times.

Gradients of matrices are reduced over the ranks that hold the same weights; those of vectors together at the end of the
step. Frozen weights have no such collectives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import add, attrgetter
from typing import NamedTuple

import numpy as np

from ..base.units import FP32_BYTES, MIB
from ..model import ModelShape, Split
from ..plan import Assumptions, Axis, DataParallel, LayerStrategy, Mesh, Strategy, VocabStrategy
from ..plan.comm_points import (
    EMBEDDING,
    HEAD,
    LOSS,
    WEIGHT_OPS,
    Collective,
    CommPoint,
    Message,
    block_points,
    comm_ops,
    repeated,
    summed_over,
)
from ..plan.mesh import SAMPLE_AXES, SHARDING, Ranks
from ..profiles.memory import Role
from ..profiles.network import Network, Place
from .weights import StateBytes, Weights, weights_of

Kind = tuple[Collective, tuple[Axis, ...], int, Message]  # axes, parts of all tokens, message

TWINS = (Axis.PIPELINE,)  # a rank of the first stage and its peer in the last
COPIES = (Axis.COPIES,)
PART, REPLICAS = (Axis.SHARDS,), (Axis.REPLICAS,)  # axes of ranks with the same weights; ZeRO shards over SHARDS


class Call(NamedTuple):
    """Equal collectives, as each rank of the group calls them; the message is as `Collective` defines it."""

    kind: Collective
    axes: tuple[Axis, ...]
    bytes: int  # bytes of each message
    times: int = 1


class Calls(NamedTuple):
    """Collectives of one module on one rank."""

    forward: tuple[Call, ...] = ()  # each micro-batch, not overlapped with compute
    backward: tuple[Call, ...] = ()  # the same, including recompute's
    beside: tuple[tuple[CommPoint, Call], ...] = ()  # each micro-batch, during backward's products after a point
    gather_forward: tuple[Call, ...] = ()  # ZeRO-3's weights: each micro-batch, during forward
    gather_backward: tuple[Call, ...] = ()  # the same, during backward
    reduce: tuple[Call, ...] = ()  # gradients, during backward: of the last micro-batch, or of each
    across: tuple[Call, ...] = ()  # gradients, across replicas of ZeRO's shards: during the last backward
    finish: tuple[Call, ...] = ()  # gradients, once a step when all backward passes are done
    vectors: tuple[Call, ...] = ()  # gradients of norms and biases, at the same time; one message per stage
    publish: tuple[Call, ...] = ()  # ZeRO-2's updated weights, once a step

    @property
    def points(self) -> tuple[Call, ...]:
        """All calls at communication points."""
        return *self.forward, *self.backward, *(call for _, call in self.beside)

    @property
    def alone(self) -> Calls:
        """These calls for software that keeps gathered tokens: nothing overlaps with matrix products."""
        scatters = tuple(call for _, call in self.beside if call.kind is Collective.REDUCE_SCATTER)
        return self._replace(backward=self.backward + scatters, beside=())

    @property
    def in_turn(self) -> Calls:
        """These calls for software that overlaps no collective of tensor and data parallelism."""
        backward = (*self.backward, *(call for _, call in self.beside))
        finish = self.finish + self.reduce + self.across
        return self._replace(backward=backward, beside=(), reduce=(), across=(), finish=finish)

    def __add__(self, other: Calls) -> Calls:  # type: ignore[override]
        """The sum of two sets of calls."""
        return Calls(*map(add, self, other))


# Reshardings of a token's hidden states between an MTP layer's layout and the vocabulary's: to the last norm and back,
# with the next token's embedding, and to the LM head.
MTP_CHANGES = 4


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """A stage and its micro-batches: everything besides its strategy on which a module's cost depends."""

    stage_size: int  # ranks
    micro_batch: int  # samples, over the whole stage
    several: bool  # micro-batches a step
    pipeline: int  # stages
    seq: int  # sequence length
    assumed: Assumptions
    states: StateBytes  # of the module's weights; frozen ones have no gradients
    layer_type: int = 0

    def gathered(self, number_bytes: int) -> int:
        """Bytes per number in all-gathers of weights (ZeRO) and tokens (Megatron-SP): Megatron-Core's fp8_param_gather,
        and Transformer Engine, which quantizes tokens before the all-gather. Other messages have 16 bits there."""
        return 1 if self.assumed.products else number_bytes


def layer_calls(model: ModelShape, strategy: LayerStrategy, setting: Setting) -> Calls:
    """Collectives of one decoder layer without those of its experts."""
    points = point_calls(model, strategy, setting, block_points(model), repeated(strategy.recompute))
    return points + weight_calls(weights_of(model.block, strategy.tp), strategy, setting)


def point_calls(
    model: ModelShape,
    strategy: Strategy,
    setting: Setting,
    points: frozenset[CommPoint],
    again: frozenset[CommPoint] = frozenset(),
) -> Calls:
    """Collectives at these communication points; backward repeats forward's at `again`."""
    mesh = strategy.mesh(setting.stage_size)

    def call(each: Kind, times: int = 1) -> Call:
        kind, axes, parts, message = each
        width, number = 1, FP32_BYTES
        if message is not Message.LOSS:
            width, number = attrgetter(message)(model), setting.assumed.number_types.sent.bytes
            if kind is Collective.ALL_GATHER and Axis.TENSOR in axes:
                number = setting.gathered(number)
        if message.repeats:
            width *= max(mesh.degree(Axis.ULYSSES, Axis.TENSOR) // model.kv_heads, 1)
        size = setting.micro_batch * setting.seq * width * number // parts
        return Call(kind, axes, size, times)

    forward, backward, beside = _counts(strategy.axes, mesh, setting.assumed.sequence_parallel, points, again)
    balance: tuple[Call, ...] = ()
    if model.router_aux_loss_coef and CommPoint.INTO_EXPERTS in points and mesh.degree(*SAMPLE_AXES) > 1:
        shares = setting.micro_batch * model.experts * FP32_BYTES  # shares of each sample and expert
        balance = (Call(Collective.ALL_REDUCE, SAMPLE_AXES, shares),)
    if not forward and not backward and not balance:
        return Calls()
    forward_calls, after = ([call(*item) for item in counts.items()] for counts in (forward, backward))
    products = [(point, call(each)) for point, each in beside]
    if not setting.states.gradient:  # frozen weights have no weight-gradient product to overlap with
        after += [each for _, each in products if each.kind is Collective.REDUCE_SCATTER]
        products = [each for each in products if each[1].kind is not Collective.REDUCE_SCATTER]
    return Calls((*forward_calls, *balance), tuple(after), tuple(products))


@lru_cache(maxsize=10_000)
def _counts(
    axes: tuple[tuple[Axis, int], ...],
    mesh: Mesh,
    sequence_parallel: bool,
    points: frozenset[CommPoint],
    again: frozenset[CommPoint],
) -> tuple[Counter[Kind], Counter[Kind], list[tuple[CommPoint, Kind]]]:
    """Numbers of equal collectives in forward, in backward and during backward's products."""
    forward: Counter[Kind] = Counter()
    backward: Counter[Kind] = Counter()
    beside: list[tuple[CommPoint, Kind]] = []
    for point, op, axis, apart in comm_ops(axes, sequence_parallel, points):
        parts = mesh.degree(*apart)
        if op.forward:
            forward[op.forward, (axis,), parts, point.message] += op.times
        if op.again and op.backward:
            beside.append((point, (op.backward, (axis,), parts, point.message)))
            if op.forward and point not in again:
                beside.append((point, (op.forward, (axis,), parts, point.message)))
        elif op.backward:
            backward[op.backward, (axis,), parts, point.message] += op.times
        if op.forward and point in again:
            backward[op.forward, (axis,), parts, point.message] += op.times
    return forward, backward, beside


def vocab_calls(model: ModelShape, vocab: VocabStrategy, role: Role, setting: Setting) -> Calls:
    """Collectives of embedding and of LM head (with last norm and loss), as far as a stage of this role has them. With
    MTP the last stage also looks up tokens and has two losses."""
    if setting.assumed.products:  # only layers use products in FP8
        setting = replace(setting, assumed=replace(setting.assumed, products=None))
    uses = (role != "last") + (role != "first") * model.mtp_layers  # uses of the embedding
    embedding = _embedding_calls(model, vocab, setting, uses) if uses else Calls()
    head, tied = _head_calls(model, vocab, setting) if role != "first" else Calls(), model.tied_embeddings
    if tied and role != "first":  # one table, reduced and published once, by the head
        embedding = embedding._replace(finish=(), publish=())
    if role == "only":  # the only stage uses the table until its last pass
        return embedding + (head._replace(reduce=(), across=(), finish=head.reduce + head.across) if tied else head)
    shared, alone = (embedding + head, Calls()) if tied else (embedding, head)
    gradient = setting.states.gradient
    if not gradient or not (tied or model.mtp_layers):
        return shared + alone
    twins = Call(Collective.ALL_REDUCE, TWINS, weights_of(model.embedding, vocab.tp).matrices * gradient)
    finish = twins, *shared.reduce, *shared.across, *shared.finish
    return shared._replace(reduce=(), across=(), finish=finish) + alone


def _embedding_calls(model: ModelShape, vocab: VocabStrategy, setting: Setting, uses: int) -> Calls:
    points = sum([point_calls(model, vocab, setting, EMBEDDING)] * uses, Calls())
    weights = weight_calls(weights_of(model.embedding, vocab.tp), vocab, setting)
    # A lookup needs no weights in backward, and its backward is the last pass: no compute is left to hide its
    # collectives.
    finish = weights.reduce + weights.across
    return points + Calls(gather_forward=weights.gather_forward, finish=finish, publish=weights.publish)


def _head_calls(model: ModelShape, vocab: VocabStrategy, setting: Setting) -> Calls:
    weights = weight_calls(weights_of(model.head, vocab.tp), vocab, setting)
    points = point_calls(model, vocab, setting, HEAD - LOSS)
    if vocab.pieces > 1:  # backward needs no tokens
        points = points.alone
    elif not setting.states.gradient:  # a frozen table has no gradient, for which tokens would be gathered again
        points = points._replace(beside=())
    loss = tuple(
        call._replace(bytes=FP32_BYTES * tokens, times=call.times * pieces)
        for call in point_calls(model, vocab, setting, LOSS).forward
        for tokens, pieces in Counter(vocab.piece_sizes(call.bytes // FP32_BYTES)).items()
    )
    return sum([points + Calls(loss)] * (1 + model.mtp_layers), weights)


def weight_calls(weights: Weights, strategy: Strategy, setting: Setting) -> Calls:
    """All-gathers of weights, reductions of gradients, all-gathers of updated weights."""
    sharing = strategy.mesh(setting.stage_size).degree(*SHARDING)
    sharded = matrix_calls(weights.matrices, strategy.dp_type, SHARDING, sharing, strategy.sharding, setting)
    if not setting.states.gradient:
        return sharded
    vectors = tuple(_vector_calls(weights, setting, sharing))
    reduce = tuple(  # k and v one after the other
        Call(Collective.ALL_REDUCE, COPIES, numbers * setting.states.gradient, times)
        for numbers, times in Counter(weights.copied_matrices).items()
    )
    if setting.assumed.sequence_parallel and isinstance(strategy, LayerStrategy) and strategy.tp > 1:
        reduce += tuple(
            Call(Collective.ALL_REDUCE, (Axis.TENSOR,), numbers * setting.states.gradient)
            for numbers in weights.whole_matrices
        )
    if sharing == 1 and not setting.assumed.async_grad_reduce:  # only their copies are reduced, once
        return Calls(across=reduce, vectors=vectors) + sharded
    return Calls(reduce=reduce, vectors=vectors) + sharded


def matrix_calls(
    numbers: int, dp_type: DataParallel, axes: tuple[Axis, ...], sharing: int, sharding: int | None, setting: Setting
) -> Calls:
    """Collectives of matrices with `numbers` elements that `sharing` ranks along these axes hold equally or that ZeRO
    shards over `sharding` of them."""
    if sharing == 1 or not numbers:
        return Calls()
    ops, states = WEIGHT_OPS[dp_type], setting.states
    shares = 1 if ops.reduce is Collective.ALL_REDUCE else sharding or sharing
    padded = -(-numbers // shares) * shares
    across: tuple[Call, ...] = ()
    if 1 < shares < sharing:
        axes, across = PART, (Call(Collective.ALL_REDUCE, REPLICAS, padded // shares * states.gradient),)
    gather = (Call(ops.gather, axes, padded * setting.gathered(states.weight)),) if ops.gather else ()
    if not states.gradient:
        return Calls(gather_forward=gather, gather_backward=gather)
    reduce = (Call(ops.reduce, axes, padded * states.gradient),)
    publish = (Call(ops.publish, axes, padded * setting.gathered(states.weight)),) if ops.publish else ()
    return Calls(gather_forward=gather, gather_backward=gather, reduce=reduce, across=across, publish=publish)


def _vector_calls(weights: Weights, setting: Setting, sharing: int) -> Iterator[Call]:
    """Reductions of the gradients of norms and biases."""
    gradient = setting.states.gradient
    for vector in weights.copied_vectors:
        yield Call(Collective.ALL_REDUCE, COPIES, vector * gradient)
    for count, split in (
        (weights.split_vectors, Split.COLUMN),
        (weights.whole_vectors, Split.WHOLE),
        (weights.head_vectors, Split.OWN),
    ):
        if not count:
            continue
        axes = summed_over(split, setting.assumed.sequence_parallel)
        if (sharing if axes == SHARDING else setting.stage_size) > 1:
            yield Call(Collective.ALL_REDUCE, axes, count * gradient)


@lru_cache(maxsize=100_000)
def place_of(axes: tuple[Axis, ...], mesh: Mesh, gpus_per_node: int, pipeline: int) -> Place:
    """Place of the groups along these axes of a stage: that of the group that spans most nodes."""
    members = mesh.groups(*axes)
    consecutive = members.shape[1] == 1 or bool(members[0, 1] - members[0, 0] == 1)
    offsets = {stage * mesh.size % gpus_per_node for stage in range(pipeline)}
    return Place(members.shape[1], max(_nodes(members + offset, gpus_per_node) for offset in offsets), consecutive)


def _nodes(members: Ranks, gpus_per_node: int) -> int:
    """Largest number of nodes that a row of rising ranks spans."""
    nodes = members // gpus_per_node
    return int((np.diff(nodes, axis=1) != 0).sum(axis=1).max(initial=0)) + 1


class Overlapped(NamedTuple):
    """Collectives that overlap with compute, in ms."""

    ms: float = 0.0  # one after the other
    slowed_ms: float = 0.0  # the same, each multiplied by its overlap coefficient

    def __add__(self, other: Overlapped) -> Overlapped:  # type: ignore[override]
        """The sum of two times."""
        return Overlapped(self.ms + other.ms, self.slowed_ms + other.slowed_ms)

    def with_compute(self, compute_ms: float) -> float:
        """The time of collectives and compute started together. While both run, each is slowed by the collectives'
        overlap coefficient (time-weighted mean). Never more than one after the other."""
        if compute_ms == 0 or self.ms == 0:
            return compute_ms + self.ms
        longer, shorter = max(compute_ms, self.ms), min(compute_ms, self.ms)
        return longer + min(self.slowed_ms / self.ms - 1, 1.0) * shorter


class CallTimes(NamedTuple):
    """The times of `Calls`, in ms."""

    forward_ms: float = 0.0
    backward_ms: float = 0.0
    gather_forward: Overlapped = Overlapped()
    gather_backward: Overlapped = Overlapped()
    reduce: Overlapped = Overlapped()
    across: Overlapped = Overlapped()
    finish_ms: float = 0.0  # includes gradients of vectors
    publish_ms: float = 0.0
    beside: tuple[tuple[CommPoint, Overlapped], ...] = ()  # times by call
    hidden_ms: float = 0.0  # the part of overlapped calls that products hide

    @classmethod
    def of(
        cls, calls: Calls, mesh: Mesh, pipeline: int, copies: int, sharding: int | None, network: Network
    ) -> CallTimes:
        """Times of the calls on this cluster. `copies`: ranks of a tp group that hold the same kv heads; `sharding`: as
        in strategies."""
        parted = mesh.parted(sharding) if sharding else mesh

        def each_ms(call: Call, joined: bool = False) -> float:
            if call.axes == TWINS:  # two ranks send each other the whole at the same time
                return network.send_ms(pipeline, call.bytes / MIB)
            grid = mesh.sharing(copies) if call.axes == COPIES else parted if call.axes in (PART, REPLICAS) else mesh
            ranks_placed = place_of(call.axes, grid, network.profile.gpus_per_node, pipeline)
            return call.times * network.collective_ms(call.kind, ranks_placed, call.bytes / MIB, joined)

        def total_ms(group: tuple[Call, ...], joined: bool = False) -> float:
            return sum([each_ms(call, joined) for call in group]) if group else 0.0

        def overlapped(group: tuple[Call, ...]) -> Overlapped:
            if not group:
                return Overlapped()
            each = [(each_ms(call), network.profile.overlap_of(call.kind)) for call in group]
            return Overlapped(sum([ms for ms, _ in each]), sum([ms * overlap for ms, overlap in each]))

        beside = tuple([(point, overlapped((call,))) for point, call in calls.beside])
        return cls(
            total_ms(calls.forward),
            total_ms(calls.backward),
            overlapped(calls.gather_forward),
            overlapped(calls.gather_backward),
            overlapped(calls.reduce),
            overlapped(calls.across),
            total_ms(calls.finish) + total_ms(calls.vectors, joined=True),
            total_ms(calls.publish),
            beside,
        )

    def slowed(self, times: float) -> CallTimes:
        """These times with those of communication points multiplied by `times`."""
        beside = tuple([(point, Overlapped(*(times * ms for ms in call))) for point, call in self.beside])
        return CallTimes(times * self.forward_ms, times * self.backward_ms, beside=beside)

    def behind(self, product_ms: Mapping[CommPoint, float]) -> CallTimes:
        """These times where backward includes the part of `beside` that products do not hide. `product_ms`: time of all
        products after a point for the gradients of their input or of their weights."""
        shown_ms = sum([call.with_compute(product_ms[point]) - product_ms[point] for point, call in self.beside])
        all_ms = sum([call.ms for _, call in self.beside])
        return self._replace(backward_ms=self.backward_ms + shown_ms, beside=(), hidden_ms=all_ms - shown_ms)
