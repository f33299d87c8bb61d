"""How many bytes the collectives of `plan.comm_points` move: for prices (`model`) and for counts (`traffic`).

Gradients of matrices are summed over the sharding group; those of vectors together at the end of the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from operator import add
from typing import NamedTuple

from ..model import ModelShape, Split
from ..plan.comm_points import (
    EMBEDDING,
    HEAD,
    WEIGHT_OPS,
    Collective,
    CommPoint,
    Message,
    block_points,
    comm_ops,
    repeated,
    summed_over,
)
from ..plan.mesh import SHARDING, Axis, Mesh
from ..plan.strategy import Assumptions, DataParallel, LayerStrategy, Strategy, VocabStrategy
from ..profiles.memory import Role
from .weights import FP32_BYTES, StateBytes, Weights, head_weights, layer_weights, table_weights

Kind = tuple[Collective, tuple[Axis, ...], int, Message]  # of a message, over axes, parts of all tokens, its width

TWINS = (Axis.PIPELINE,)  # a rank of the first stage and its peer of the last
COPIES = (Axis.COPIES,)


class Call(NamedTuple):
    """Equal collectives, as each rank of the group calls them; the message is as `Collective` defines it."""

    kind: Collective
    axes: tuple[Axis, ...]
    bytes: int  # of each
    times: int = 1


class Calls(NamedTuple):
    """Collectives of one module on one rank."""

    forward: tuple[Call, ...] = ()  # each micro-batch, in the way of compute
    backward: tuple[Call, ...] = ()  # the same; recompute's included
    gather_forward: tuple[Call, ...] = ()  # ZeRO-3's weights: each micro-batch, beside forward
    gather_backward: tuple[Call, ...] = ()  # the same, beside backward
    reduce: tuple[Call, ...] = ()  # gradients, beside backward: of the last micro-batch, or of each
    finish: tuple[Call, ...] = ()  # gradients, once a step when all backward passes are done
    vectors: tuple[Call, ...] = ()  # gradients of norms and biases, then too; those of a whole stage in one message
    publish: tuple[Call, ...] = ()  # ZeRO-2's updated weights, once a step

    def also(self, other: Calls) -> Calls:
        """These and the other's."""
        return Calls(*map(add, self, other))

    @property
    def frozen(self) -> Calls:
        """Those of a module whose weights do not learn."""
        return Calls(self.forward, self.backward, self.gather_forward, self.gather_backward)


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings on which a module's collectives depend, besides its strategy."""

    samples: int  # of one micro-batch, over the whole stage
    seq: int  # sequence length
    stage_size: int  # ranks
    assumed: Assumptions
    states: StateBytes


def layer_calls(model: ModelShape, strategy: LayerStrategy, setting: Setting) -> Calls:
    """Collectives of one decoder layer, but for those of its experts."""
    weights = weight_calls(layer_weights(model, strategy.tp), strategy, setting)
    return block_calls(model, strategy, setting).also(weights)


def block_calls(model: ModelShape, strategy: LayerStrategy, setting: Setting) -> Calls:
    """Those at its communication points: whatever its data parallelism."""
    return _point_calls(model, strategy, setting, block_points(model), repeated(strategy.recompute))


def _point_calls(
    model: ModelShape,
    strategy: Strategy,
    setting: Setting,
    points: frozenset[CommPoint],
    again: frozenset[CommPoint] = frozenset(),
) -> Calls:
    """Collectives at these communication points, of which backward repeats those of forward at some."""
    mesh = strategy.mesh(setting.stage_size)

    def calls(messages: Counter[Kind]) -> Iterator[Call]:
        for (kind, axes, parts, message), times in messages.items():
            width, each = 1, FP32_BYTES
            if message is not Message.LOSS:
                width, each = getattr(model, message), setting.assumed.mixed_precision.bytes
            if message is Message.KEYS:
                width *= max(mesh.degree(Axis.ULYSSES, Axis.TENSOR) // model.kv_heads, 1)
            size = setting.samples * setting.seq * width * each // parts
            yield Call(kind, axes, size, times)

    forward, backward = _messages(strategy.axes, mesh, setting.assumed.sequence_parallel, points, again)
    if not forward and not backward:
        return Calls()
    return Calls(tuple(calls(forward)), tuple(calls(backward)))


@lru_cache(maxsize=10_000)
def _messages(
    axes: tuple[tuple[Axis, int], ...],
    mesh: Mesh,
    sequence_parallel: bool,
    points: frozenset[CommPoint],
    again: frozenset[CommPoint],
) -> tuple[Counter[Kind], Counter[Kind]]:
    """In forward and in backward."""
    forward: Counter[Kind] = Counter()
    backward: Counter[Kind] = Counter()
    for point, op, axis, apart in comm_ops(axes, sequence_parallel, points):
        parts = mesh.degree(*apart)
        if op.forward:
            forward[op.forward, (axis,), parts, point.message] += op.times
        if op.backward:
            backward[op.backward, (axis,), parts, point.message] += op.times
        if op.forward and point in again:
            backward[op.forward, (axis,), parts, point.message] += op.times
    return forward, backward


def vocab_calls(model: ModelShape, vocab: VocabStrategy, role: Role, setting: Setting) -> Calls:
    """Collectives of embedding and of LM head (with last norm and loss), as far as a stage of this role has them."""
    embedding = _embedding_calls(model, vocab, setting) if role != "last" else Calls()
    head = _head_calls(model, vocab, setting) if role != "first" else Calls()
    if not model.tied_embeddings:
        return embedding.also(head)
    table = table_weights(model, vocab.tp).matrices
    if role == "only":  # one table, reduced and published once, by the head; it is used until the step's last pass
        return embedding._replace(finish=(), publish=()).also(head._replace(reduce=(), finish=head.reduce))
    twins, calls = Call(Collective.ALL_REDUCE, TWINS, table * setting.states.gradient), embedding.also(head)
    return calls._replace(reduce=(), finish=(twins, *calls.reduce, *calls.finish))


def _embedding_calls(model: ModelShape, vocab: VocabStrategy, setting: Setting) -> Calls:
    points = _point_calls(model, vocab, setting, EMBEDDING)
    weights = weight_calls(table_weights(model, vocab.tp), vocab, setting)
    # A lookup needs no weights in backward, and its backward is the last pass of all: nothing is left to hide behind.
    return points.also(Calls(gather_forward=weights.gather_forward, finish=weights.reduce, publish=weights.publish))


def _head_calls(model: ModelShape, vocab: VocabStrategy, setting: Setting) -> Calls:
    weights = weight_calls(head_weights(model, vocab.tp), vocab, setting)
    return _point_calls(model, vocab, setting, HEAD).also(weights)


def weight_calls(weights: Weights, strategy: Strategy, setting: Setting) -> Calls:
    """Gathers of weights, reductions of gradients, gathers of updated weights."""
    sharding = strategy.mesh(setting.stage_size).degree(*SHARDING)
    vectors = tuple(_vector_calls(weights, setting, sharding))
    reduce = tuple(  # k and v one after the other
        Call(Collective.ALL_REDUCE, COPIES, numbers * setting.states.gradient, times)
        for numbers, times in Counter(weights.copied_matrices).items()
    )
    sharded = matrix_calls(weights.matrices, strategy.dp_type, sharding, SHARDING, setting)
    return Calls(reduce=reduce, vectors=vectors).also(sharded)


def matrix_calls(numbers: int, dp_type: DataParallel, sharding: int, axes: tuple[Axis, ...], setting: Setting) -> Calls:
    """Those of matrices of so many numbers that `sharding` ranks along these axes share."""
    if sharding == 1 or not numbers:
        return Calls()
    ops = WEIGHT_OPS[dp_type]
    shares = 1 if ops.reduce is Collective.ALL_REDUCE else sharding
    padded = -(-numbers // shares) * shares
    reduce = (Call(ops.reduce, axes, padded * setting.states.gradient),)
    gather = (Call(ops.gather, axes, padded * setting.states.weight),) if ops.gather else ()
    publish = (Call(ops.publish, axes, padded * setting.states.weight),) if ops.publish else ()
    return Calls(gather_forward=gather, gather_backward=gather, reduce=reduce, publish=publish)


def _vector_calls(weights: Weights, setting: Setting, sharding: int) -> Iterator[Call]:
    """Sums of the gradients of norms and biases."""
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
        if (sharding if axes == SHARDING else setting.stage_size) > 1:
            yield Call(Collective.ALL_REDUCE, axes, count * gradient)
