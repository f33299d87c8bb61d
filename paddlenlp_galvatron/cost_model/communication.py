"""Which collectives a layer calls, and on how many bytes. Prices (`layers`) and counts (`traffic`) both come from here.

The runtime's order. Megatron-SP: all-gather before attention and before the MLP, reduce-scatter after each; backward
the mirror image. tp without it: all-reduce after each in forward, before each in backward. Ulysses: all-to-all of q,
k and v in, of the output out; the same in backward. Recompute repeats the forward's. Gradients are summed over the
sharding group; under Megatron-SP those of the norms over the whole stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..plan.model import ModelShape
from ..plan.strategy import Assumptions, DataParallel, LayerStrategy, VocabStrategy
from ..profiles.hardware import Collective
from ..profiles.memory import Role
from .placement import Group
from .states import FP32_BYTES, StateBytes
from .weights import Weights, kv_width, layer_weights, table_weights


class Call(NamedTuple):
    """One collective, as each rank of the group calls it; the message is as `Collective` defines it."""

    kind: Collective
    group: Group
    bytes: int


@dataclass(frozen=True, slots=True)
class Calls:
    """Collectives of one layer on one rank."""

    forward: tuple[Call, ...] = ()  # each micro-batch, in the way of compute
    backward: tuple[Call, ...] = ()  # the same; recompute's included
    gather: tuple[Call, ...] = ()  # each micro-batch, once in forward and once in backward, beside compute: ZeRO-3
    reduce: tuple[Call, ...] = ()  # gradients, beside backward: after the last micro-batch, or after each
    publish: tuple[Call, ...] = ()  # updated weights, after the optimizer's step: ZeRO-2


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One micro-batch on a stage."""

    samples: int  # over the whole stage
    seq: int  # tokens of a sample
    stage_size: int  # ranks

    def bytes(self, width: int, parts: int, assumed: Assumptions) -> int:
        """Bytes of `width` numbers a token, for one of `parts` equal shares of the micro-batch."""
        return self.samples * self.seq * width * assumed.mixed_precision.bytes // parts


def layer_calls(
    model: ModelShape, strategy: LayerStrategy, batch: Microbatch, assumed: Assumptions, states: StateBytes
) -> Calls:
    """Collectives of one decoder layer."""
    forward, backward = _layer_seams(model, strategy, batch, assumed)
    if strategy.recompute:
        backward = (*backward, *forward)
    weights = layer_weights(model, strategy.tp)
    gather, reduce, publish = _weight_calls(weights, strategy, batch.stage_size, assumed, states)
    return Calls(forward, backward, gather, reduce, publish)


def _layer_seams(
    model: ModelShape, strategy: LayerStrategy, batch: Microbatch, assumed: Assumptions
) -> tuple[tuple[Call, ...], tuple[Call, ...]]:
    if strategy.degree == 1:
        return (), ()
    if strategy.ulysses:
        kv = kv_width(model, strategy.degree)
        widths = (model.hidden_size, kv, kv, model.hidden_size)
        exchange = tuple(
            Call(Collective.ALL_TO_ALL, Group.TENSOR, batch.bytes(width, batch.stage_size, assumed)) for width in widths
        )
        return exchange, exchange
    message = batch.bytes(model.hidden_size, batch.stage_size // strategy.degree, assumed)
    if assumed.sequence_parallel:
        gather, scatter = (
            Call(kind, Group.TENSOR, message) for kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
        )
        return (gather, scatter) * 2, (gather, scatter) * 2
    both = (Call(Collective.ALL_REDUCE, Group.TENSOR, message),) * 2
    return both, both


def vocab_calls(
    model: ModelShape,
    vocab: VocabStrategy,
    role: Role,
    batch: Microbatch,
    assumed: Assumptions,
    states: StateBytes,
) -> Calls:
    """Collectives of embedding and LM head (with last norm and loss), as far as a stage of this role has them."""
    forward: list[Call] = []
    backward: list[Call] = []
    if vocab.tp > 1:
        dp = batch.stage_size // vocab.degree
        message = batch.bytes(model.hidden_size, dp, assumed)
        reduced, gathered, scattered = (
            Call(kind, Group.TENSOR, message)
            for kind in (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
        )
        if role != "last":
            forward.append(scattered if assumed.sequence_parallel else reduced)
            backward += [gathered] if assumed.sequence_parallel else []
        if role != "first":
            # Cross entropy over a split vocabulary: maximum, sum of exponentials and target's logit of every token.
            tokens = batch.samples * batch.seq // dp
            loss = (Call(Collective.ALL_REDUCE, Group.TENSOR, tokens * FP32_BYTES),) * 3
            forward += [*([gathered] if assumed.sequence_parallel else []), *loss]
            backward.append(scattered if assumed.sequence_parallel else reduced)
    table = table_weights(model, vocab.tp)
    tables = 2 if role == "only" and not model.tied_embeddings else 1
    weights = Weights(tables * table, 0 if role == "first" else model.hidden_size)
    gather, reduce, publish = _weight_calls(weights, vocab, batch.stage_size, assumed, states)
    if model.tied_embeddings and role != "only":
        reduce = (*reduce, Call(Collective.ALL_REDUCE, Group.TIED, table * states.gradient))
    return Calls(tuple(forward), tuple(backward), gather, reduce, publish)


def _weight_calls(
    weights: Weights,
    strategy: LayerStrategy | VocabStrategy,
    stage_size: int,
    assumed: Assumptions,
    states: StateBytes,
) -> tuple[tuple[Call, ...], tuple[Call, ...], tuple[Call, ...]]:
    """Gathers of weights, reductions of gradients, gathers of updated weights."""
    reduce: list[Call] = []
    sharded = weights.all
    if assumed.sequence_parallel and strategy.tp > 1 and weights.replicated:
        sharded = weights.split
        reduce.append(Call(Collective.ALL_REDUCE, Group.STAGE, weights.replicated * states.gradient))
    if stage_size == strategy.tp:
        return (), tuple(reduce), ()
    gathered = Call(Collective.ALL_GATHER, Group.SHARDING, sharded * states.weight)
    if strategy.dp_type is DataParallel.DDP:
        reduce.append(Call(Collective.ALL_REDUCE, Group.SHARDING, sharded * states.gradient))
        return (), tuple(reduce), ()
    reduce.append(Call(Collective.REDUCE_SCATTER, Group.SHARDING, sharded * states.gradient))
    if strategy.dp_type is DataParallel.ZERO2:
        return (), tuple(reduce), (gathered,)
    return (gathered,), tuple(reduce), ()
