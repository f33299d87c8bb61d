"""Which collectives a module calls, and on how many bytes. Prices (`model`) and counts (`traffic`) both come from here.

The runtime's order. Megatron-SP: all-gather before attention and before the MLP, reduce-scatter after each; backward
the mirror image. tp without it: all-reduce after each in forward, before each in backward. Ulysses: all-to-all of q,
k and v in, of the output out; the same in backward. Recompute repeats the forward's. Gradients of matrices are summed
over the sharding group; those of vectors together at the end of the step, over all ranks that saw other tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..model import ModelShape
from ..plan.strategy import Assumptions, DataParallel, LayerStrategy, VocabStrategy
from ..profiles.hardware import Collective
from ..profiles.memory import Role
from .placement import Group
from .states import FP32_BYTES, StateBytes
from .weights import Weights, head_weights, kv_width, layer_weights, table_weights


class Call(NamedTuple):
    """Equal collectives, as each rank of the group calls them; the message is as `Collective` defines it."""

    kind: Collective
    group: Group
    bytes: int  # of each
    times: int = 1


@dataclass(frozen=True, slots=True)
class Calls:
    """Collectives of one module on one rank."""

    forward: tuple[Call, ...] = ()  # each micro-batch, in the way of compute
    backward: tuple[Call, ...] = ()  # the same; recompute's included
    gather_forward: tuple[Call, ...] = ()  # ZeRO-3's weights: each micro-batch, beside forward
    gather_backward: tuple[Call, ...] = ()  # the same, beside backward
    reduce: tuple[Call, ...] = ()  # gradients, beside backward: of the last micro-batch, or of each
    finish: tuple[Call, ...] = ()  # gradients, once a step when all backward passes are done
    vectors: tuple[Call, ...] = ()  # gradients of norms and biases, then too; those of a whole stage in one message
    publish: tuple[Call, ...] = ()  # ZeRO-2's updated weights, once a step

    def __add__(self, other: Calls) -> Calls:
        return Calls(
            self.forward + other.forward,
            self.backward + other.backward,
            self.gather_forward + other.gather_forward,
            self.gather_backward + other.gather_backward,
            self.reduce + other.reduce,
            self.finish + other.finish,
            self.vectors + other.vectors,
            self.publish + other.publish,
        )


@dataclass(frozen=True, slots=True)
class Setting:
    """What a module's collectives depend on beside its strategy."""

    samples: int  # of one micro-batch, over the whole stage
    seq: int  # tokens of a sample
    stage_size: int  # ranks
    assumed: Assumptions
    states: StateBytes

    def token_bytes(self, width: int, parts: int) -> int:
        """Bytes of `width` numbers a token, for one of `parts` equal shares of the micro-batch."""
        return self.samples * self.seq * width * self.assumed.mixed_precision.bytes // parts


def layer_calls(model: ModelShape, strategy: LayerStrategy, setting: Setting) -> Calls:
    """Collectives of one decoder layer."""
    forward = _layer_seams(model, strategy, setting)
    # Backward meets each seam once, as forward does; recompute meets forward's once more.
    backward = tuple(call._replace(times=2 * call.times) for call in forward) if strategy.recompute else forward
    return Calls(forward, backward) + weight_calls(layer_weights(model, strategy.tp), strategy, setting)


def _layer_seams(model: ModelShape, strategy: LayerStrategy, setting: Setting) -> tuple[Call, ...]:
    if strategy.degree == 1:
        return ()
    if strategy.ulysses:
        q, kv = model.q_width, kv_width(model, strategy.degree)
        return tuple(
            Call(Collective.ALL_TO_ALL, Group.TENSOR, setting.token_bytes(width, setting.stage_size), times)
            for width, times in (((q, 4),) if kv == q else ((q, 2), (kv, 2)))
        )
    reduced, gathered, scattered = _seams(model, strategy, setting, times=2)
    return (gathered, scattered) if setting.assumed.sequence_parallel else (reduced,)


def _seams(
    model: ModelShape, strategy: LayerStrategy | VocabStrategy, setting: Setting, times: int = 1
) -> tuple[Call, Call, Call]:
    """All-reduce, all-gather and reduce-scatter of the tokens of a dp share."""
    message = setting.token_bytes(model.hidden_size, setting.stage_size // strategy.degree)
    return (
        Call(Collective.ALL_REDUCE, Group.TENSOR, message, times),
        Call(Collective.ALL_GATHER, Group.TENSOR, message, times),
        Call(Collective.REDUCE_SCATTER, Group.TENSOR, message, times),
    )


def vocab_calls(model: ModelShape, vocab: VocabStrategy, role: Role, setting: Setting) -> Calls:
    """Collectives of embedding and of LM head (with last norm and loss), as far as a stage of this role has them."""
    embedding = _embedding_calls(model, vocab, setting) if role != "last" else Calls()
    head = _head_calls(model, vocab, setting) if role != "first" else Calls()
    if not model.tied_embeddings:
        return embedding + head
    table = table_weights(model, vocab.tp).matrices
    if role == "only":  # one table, reduced and published once, by the head; it is used until the step's last pass
        head = Calls(
            head.forward,
            head.backward,
            head.gather_forward,
            head.gather_backward,
            finish=head.reduce,
            vectors=head.vectors,
            publish=head.publish,
        )
        return Calls(embedding.forward, embedding.backward, embedding.gather_forward) + head
    twins = Call(Collective.ALL_REDUCE, Group.TWINS, table * setting.states.gradient)
    calls = embedding + head
    return Calls(
        calls.forward,
        calls.backward,
        calls.gather_forward,
        calls.gather_backward,
        finish=(twins, *calls.reduce, *calls.finish),
        vectors=calls.vectors,
        publish=calls.publish,
    )


def _embedding_calls(model: ModelShape, vocab: VocabStrategy, setting: Setting) -> Calls:
    forward: tuple[Call, ...] = ()
    backward: tuple[Call, ...] = ()
    if vocab.tp > 1:
        reduced, gathered, scattered = _seams(model, vocab, setting)
        forward = (scattered,) if setting.assumed.sequence_parallel else (reduced,)
        backward = (gathered,) if setting.assumed.sequence_parallel else ()
    weights = weight_calls(table_weights(model, vocab.tp), vocab, setting)
    # A lookup needs no weights in backward, and its backward is the last pass of all: nothing is left to hide behind.
    return Calls(forward, backward, weights.gather_forward, finish=weights.reduce, publish=weights.publish)


def _head_calls(model: ModelShape, vocab: VocabStrategy, setting: Setting) -> Calls:
    forward: tuple[Call, ...] = ()
    backward: tuple[Call, ...] = ()
    if vocab.tp > 1:
        reduced, gathered, scattered = _seams(model, vocab, setting)
        tokens = setting.samples * setting.seq // (setting.stage_size // vocab.degree)
        # Cross entropy over a split vocabulary: maximum, sum of exponentials and target's logit of every token.
        loss = Call(Collective.ALL_REDUCE, Group.TENSOR, tokens * FP32_BYTES, times=3)
        forward = (gathered, loss) if setting.assumed.sequence_parallel else (loss,)
        backward = (scattered,) if setting.assumed.sequence_parallel else (reduced,)
    return Calls(forward, backward) + weight_calls(head_weights(model, vocab.tp), vocab, setting)


def weight_calls(weights: Weights, strategy: LayerStrategy | VocabStrategy, setting: Setting) -> Calls:
    """Gathers of weights, reductions of gradients, gathers of updated weights."""
    vectors = tuple(_vector_calls(weights, strategy, setting))
    gradient, weight = setting.states.gradient, setting.states.weight
    reduce = tuple(  # k and v one after the other
        Call(Collective.ALL_REDUCE, Group.COPIES, numbers * gradient, times)
        for numbers, times in Counter(weights.copied_matrices).items()
    )
    sharding = setting.stage_size // strategy.tp
    if sharding == 1:
        return Calls(reduce=reduce, vectors=vectors)
    if strategy.dp_type is DataParallel.DDP:
        whole = Call(Collective.ALL_REDUCE, Group.SHARDING, weights.matrices * gradient)
        return Calls(reduce=(*reduce, whole), vectors=vectors)
    padded = -(-weights.matrices // sharding) * sharding
    reduce = (*reduce, Call(Collective.REDUCE_SCATTER, Group.SHARDING, padded * gradient))
    gather = (Call(Collective.ALL_GATHER, Group.SHARDING, padded * weight),)
    if strategy.dp_type is DataParallel.ZERO2:
        return Calls(reduce=reduce, vectors=vectors, publish=gather)
    return Calls(gather_forward=gather, gather_backward=gather, reduce=reduce, vectors=vectors)


def _vector_calls(weights: Weights, strategy: LayerStrategy | VocabStrategy, setting: Setting) -> Iterator[Call]:
    """Sums of the gradients of norms and biases."""
    gradient = setting.states.gradient
    for vector in weights.copied_vectors:
        yield Call(Collective.ALL_REDUCE, Group.COPIES, vector * gradient)
    # Plain tp computes the norms' gradients alike on all ranks of a tp group; else each has seen its own tokens.
    alike = strategy.tp > 1 and not setting.assumed.sequence_parallel
    for count, group in (
        (weights.split_vectors, Group.SHARDING),
        (weights.whole_vectors, Group.SHARDING if alike else Group.STAGE),
        (weights.head_vectors, Group.STAGE),
    ):
        ranks = setting.stage_size if group is Group.STAGE else setting.stage_size // strategy.tp
        if count and ranks > 1:
            yield Call(Collective.ALL_REDUCE, group, count * gradient)
