"""The collectives of a strategy and their places: tables that the runtime executes and the cost model prices.

Tokens are communicated at *communication points* before and after parts of a module. At a point an axis may have an
operation: a collective in forward and its counterpart in backward; recompute repeats forward's. A module's weights have
separate operations over the axes along which ranks share them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from functools import lru_cache
from typing import NamedTuple

from ..model import ModelShape, Recompute, Split
from .layout import token_axes
from .mesh import STAGE, Axis
from .strategy import DataParallel


class Collective(StrEnum):
    """Kinds of collective, by their names in keys of profiles, each with the meaning of its "message"."""

    ALL_REDUCE = "allreduce"  # the buffer that every rank holds before and after
    ALL_GATHER = "allgather"  # the gathered buffer
    REDUCE_SCATTER = "reducescatter"  # the buffer before it is scattered
    ALL_TO_ALL = "all2all"  # everything that one rank sends, including the part to itself
    SEND = "p2p"  # the message of a rank to its peer in the next stage; the group's size is the number of stages


class Message(StrEnum):
    """Elements per token of a message: the model's width of this name."""

    HIDDEN = "hidden_size"
    QUERIES = "q_width"
    KEY_PRODUCTS = "k_product_width"
    KEYS = "k_width"
    VALUES = "v_width"
    CONTEXT = "context_width"
    LATENT_QUERIES = "latents.q_lora_rank"
    LATENTS = "latents.kv_lora_rank"
    LATENT_KEY = "latents.qk_rope_head_dim"
    LOSS = "one, in fp32"

    @property
    def repeats(self) -> bool:
        """Whether it is per kv head, so that several ranks share it if more ranks than kv heads split them."""
        return self in (Message.KEY_PRODUCTS, Message.KEYS, Message.VALUES)


class CommPoint(Enum):
    """A place at which a module communicates tokens."""

    INTO_ATTENTION = "behind the norm in front of attention", Message.HIDDEN
    LATENT_QUERY = "behind the norm of the latents of queries", Message.LATENT_QUERIES
    LATENT = "behind the norm of the latents of keys and values", Message.LATENTS
    LATENT_KEY = "behind the projection to the key that all heads share", Message.LATENT_KEY
    QUERY = "behind q's projection", Message.QUERIES
    KEY = "behind k's", Message.KEY_PRODUCTS
    VALUE = "behind v's", Message.VALUES
    ALL_KEYS = "behind k's positions, in front of attention's core", Message.KEYS
    ALL_VALUES = "in front of attention's core", Message.VALUES
    CONTEXT = "in front of the output projection", Message.CONTEXT
    OUT_OF_ATTENTION = "behind the output projection", Message.HIDDEN
    INTO_MLP = "behind the norm in front of the MLP", Message.HIDDEN
    OUT_OF_MLP = "behind the MLP's last projection", Message.HIDDEN
    INTO_EXPERTS = "behind the norm in front of the router", Message.HIDDEN
    OUT_OF_EXPERTS = "behind the sum of a token's experts", Message.HIDDEN
    OUT_OF_EMBEDDING = "behind the lookup", Message.HIDDEN
    INTO_HEAD = "behind the last norm", Message.HIDDEN
    LOSS = "behind the logits", Message.LOSS

    def __init__(self, _: str, message: Message):
        self.message = message


EVERYWHERE = frozenset(CommPoint)
EMBEDDING = frozenset([CommPoint.OUT_OF_EMBEDDING])
LOSS = frozenset([CommPoint.LOSS])
HEAD = LOSS | {CommPoint.INTO_HEAD}
BLOCK = EVERYWHERE - EMBEDDING - HEAD
OF_MLP = frozenset([CommPoint.INTO_MLP, CommPoint.OUT_OF_MLP])
OF_EXPERTS = frozenset([CommPoint.INTO_EXPERTS, CommPoint.OUT_OF_EXPERTS])
OF_LATENTS = frozenset([CommPoint.LATENT_QUERY, CommPoint.LATENT, CommPoint.LATENT_KEY])
CORE = frozenset([CommPoint.ALL_KEYS, CommPoint.ALL_VALUES])  # points where each rank computes only its own heads


def block_points(model: ModelShape) -> frozenset[CommPoint]:
    """The communication points of a model's layers."""
    lacking = (OF_MLP if not model.mlp_size else frozenset()) | (OF_EXPERTS if not model.experts else frozenset())
    if not model.latents:
        return BLOCK - lacking - OF_LATENTS
    unused = CommPoint.INTO_ATTENTION if model.latents.q_lora_rank else CommPoint.LATENT_QUERY
    return BLOCK - lacking - {CommPoint.VALUE, unused}


# Points whose operations backward repeats with a recomputed part. Attention ends before its point, norms before theirs,
# and the MLP's part begins at the MLP's norm.
REPEATED = {
    Recompute.FULL: BLOCK,
    Recompute.NORMS: frozenset[CommPoint](),
    Recompute.ATTENTION: frozenset([CommPoint.CONTEXT]),
    Recompute.MLP: frozenset([CommPoint.INTO_MLP]),
    Recompute.SUBLAYER: OF_MLP | OF_EXPERTS,
    Recompute.GATE_UP: frozenset[CommPoint](),
}


@lru_cache(maxsize=100)
def repeated(recompute: Recompute) -> frozenset[CommPoint]:
    """Points whose forward operations backward repeats."""
    return frozenset[CommPoint]().union(*(REPEATED[member] for member in recompute))


class Op(Enum):
    """Kinds of operation at a communication point."""

    GATHER = "a rank's tokens -> all of the group's", Collective.ALL_GATHER, Collective.REDUCE_SCATTER
    SHARE = "the same, which are kept", Collective.ALL_GATHER, Collective.REDUCE_SCATTER
    SCATTER = "parts of sums over all tokens -> sums over a rank's", Collective.REDUCE_SCATTER, Collective.ALL_GATHER
    REPLICATE = "the same tokens on every rank, whose gradients are parts of sums", None, Collective.ALL_REDUCE
    REDUCE = "parts of sums -> sums on every rank", Collective.ALL_REDUCE, None
    TAKE = "the same tokens on every rank -> a rank's own", None, Collective.ALL_GATHER
    GIVE = "a rank's own tokens -> the same on every rank", Collective.ALL_GATHER, None
    TO_HEADS = "all heads of a rank's tokens -> a rank's heads of all tokens", *[Collective.ALL_TO_ALL] * 2
    TO_TOKENS = "and back", *[Collective.ALL_TO_ALL] * 2
    GATHER_CHUNKS = "a rank's two chunks of each sample -> all", Collective.ALL_GATHER, Collective.REDUCE_SCATTER
    LOSS = "logits of a rank's vocabulary -> losses", Collective.ALL_REDUCE, None

    def __init__(self, _: str, forward: Collective | None, backward: Collective | None):
        self.forward, self.backward = forward, backward
        self.times = 3 if self.name == "LOSS" else 1  # maximum, sum of exponentials, logit of the target
        self.again = self.name == "GATHER"  # its result is not kept: backward gathers again, with or without recompute
        self.whole = Collective.ALL_TO_ALL is not forward  # a message has all tokens of the group, not only a rank's


_INTO = (CommPoint.INTO_ATTENTION, CommPoint.LATENT_QUERY, CommPoint.LATENT, CommPoint.INTO_MLP, CommPoint.INTO_HEAD)
GATHERS = frozenset(_INTO)  # Megatron-SP gathers tokens for products here
_KEY = CommPoint.LATENT_KEY  # no matrix product reads these tokens
_OUT_OF = (CommPoint.OUT_OF_ATTENTION, CommPoint.OUT_OF_MLP, CommPoint.OUT_OF_EMBEDDING)
_LOSS = {CommPoint.LOSS: Op.LOSS}
_EXPERTS = {CommPoint.INTO_EXPERTS: Op.TAKE, CommPoint.OUT_OF_EXPERTS: Op.GIVE}
TENSOR_PARALLEL = dict.fromkeys((*_INTO, _KEY), Op.REPLICATE) | dict.fromkeys(_OUT_OF, Op.REDUCE) | _EXPERTS | _LOSS
MEGATRON_SP = dict.fromkeys(_INTO, Op.GATHER) | {_KEY: Op.SHARE} | dict.fromkeys(_OUT_OF, Op.SCATTER) | _LOSS
CONTEXT_PARALLEL = dict.fromkeys((CommPoint.ALL_KEYS, CommPoint.ALL_VALUES), Op.GATHER_CHUNKS)
ULYSSES = dict.fromkeys((CommPoint.QUERY, CommPoint.KEY, CommPoint.VALUE), Op.TO_HEADS) | {
    CommPoint.CONTEXT: Op.TO_TOKENS,
    _KEY: Op.SHARE,  # a rank has its heads of all tokens
}


class CommOp(NamedTuple):
    """An operation of a strategy at a communication point."""

    point: CommPoint
    op: Op
    axis: Axis  # axis of the collective
    apart: tuple[Axis, ...]  # axes whose ranks send different tokens or heads


@lru_cache(maxsize=1000)
def comm_ops(
    axes: tuple[tuple[Axis, int], ...], sequence_parallel: bool, points: frozenset[CommPoint] = EVERYWHERE
) -> tuple[CommOp, ...]:
    """The operations of a strategy with these axes at these communication points."""
    tables = {
        Axis.TENSOR: MEGATRON_SP if sequence_parallel else TENSOR_PARALLEL,
        Axis.ULYSSES: ULYSSES,
        Axis.CONTEXT: CONTEXT_PARALLEL,
    }
    between = token_axes(sequence_parallel)

    def apart(point: CommPoint, op: Op, axis: Axis) -> tuple[Axis, ...]:
        cut = STAGE if point in CORE else between
        return tuple(other for other in cut if not (op.whole and other is axis))

    return tuple(
        CommOp(point, op, axis, apart(point, op, axis))
        for axis, degree in axes
        if degree > 1
        for point, op in tables[axis].items()
        if point in points
    )


@dataclass(frozen=True, slots=True)
class WeightOps:
    """Collectives for the matrices of a module, over the axes along which ranks share them."""

    reduce: Collective  # gradients, after the last backward
    gather: Collective | None = None  # weights, before each pass
    publish: Collective | None = None  # weights, after the optimizer


WEIGHT_OPS = {
    DataParallel.DDP: WeightOps(Collective.ALL_REDUCE),
    DataParallel.ZERO2: WeightOps(Collective.REDUCE_SCATTER, publish=Collective.ALL_GATHER),
    DataParallel.ZERO3: WeightOps(Collective.REDUCE_SCATTER, gather=Collective.ALL_GATHER),
}

SPLIT_BY = {Split.COLUMN: Axis.TENSOR, Split.ROW: Axis.TENSOR}  # axes that split weights


@lru_cache(maxsize=100)
def summed_over(split: Split, sequence_parallel: bool) -> tuple[Axis, ...]:
    """Axes over which the gradient of a weight is reduced: those that do not split it. Ranks of plain tensor
    parallelism compute equal gradients of whole weights, except weights used on own heads. Gradients of a projection to
    latents are reduced over TENSOR first, so that ZeRO shards all matrices in the same way."""
    alike = Axis.TENSOR if split is Split.WHOLE and not sequence_parallel else None
    return tuple(axis for axis in STAGE if axis not in (SPLIT_BY.get(split), alike))
