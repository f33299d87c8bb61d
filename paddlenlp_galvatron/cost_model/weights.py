"""Weights that a rank holds by tensor-parallel degree, and the bytes of their states by dtype and ZeRO stage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from ..base.units import FP32_BYTES, MIB
from ..model import Fused, LayerKind, ModelShape, Recompute, Split
from ..plan.precision import NumberTypes
from ..plan.schedule import chunks_in_flight
from ..plan.strategy import DataParallel, Experts, LayerStrategy, Plan
from ..profiles.analytic import layer_numbers_per_token

if TYPE_CHECKING:
    from ..model.lora import Adapters

ROUNDED = 9 / 8  # page-locked memory / activations in it, at most
MOMENT_BYTES = 2 * FP32_BYTES  # AdamW's two moments, fp32 with multi_precision


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes per parameter, unsharded."""

    weight: int
    gradient: int
    optimizer: int  # moments, and the fp32 master weight of a 16-bit one

    @classmethod
    def of(cls, numbers: NumberTypes) -> StateBytes:
        """fp32: 4 + 4 + 8. 16-bit: 2 + 2 (4 when gradients are accumulated in fp32) + 4 + 8."""
        master = FP32_BYTES if numbers.stored.mixed else 0
        return cls(numbers.stored.bytes, numbers.gradients.bytes, MOMENT_BYTES + master)

    @property
    def frozen(self) -> StateBytes:
        """Bytes of a frozen weight."""
        return StateBytes(self.weight, 0, 0)

    def held(self, dp_type: DataParallel, sharding: int, whole_gradients: bool) -> float:
        """Bytes per parameter that a rank keeps if states are sharded over `sharding` ranks.

        ZeRO-2 shards optimizer states and gradients, ZeRO-3 also weights. With `whole_gradients` gradients stay whole,
        as they are summed over micro-batches before their reduction.
        """
        weight, gradient, optimizer = float(self.weight), float(self.gradient), float(self.optimizer)
        if dp_type is not DataParallel.DDP:
            optimizer /= sharding
            if not whole_gradients:
                gradient /= sharding
        if dp_type is DataParallel.ZERO3:
            weight /= sharding
        return weight + gradient + optimizer


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters of one module on one rank of a tp group. ZeRO shards the matrices; vectors stay whole everywhere."""

    matrices: int = 0
    split_vectors: int = 0  # biases of column-split matrices
    whole_vectors: int = 0  # norms
    head_vectors: int = 0  # replicated but used on own heads: norms of q and k
    whole_matrices: tuple[int, ...] = ()  # matrices that no rank splits: projections to latents
    copied_matrices: tuple[int, ...] = ()  # matrices that `copies` ranks of the tp group hold: kv heads
    copied_vectors: tuple[int, ...] = ()  # split vectors that `copies` ranks hold
    copies: int = 1
    largest: int = 0  # elements of the largest matrix

    @property
    def vectors(self) -> int:
        return self.split_vectors + self.whole_vectors + self.head_vectors

    @property
    def all(self) -> int:
        return self.matrices + self.vectors


@lru_cache(maxsize=1024)
def weights_of(kind: LayerKind, tp: int) -> Weights:
    """Weights of a layer on one of `tp` ranks. Ranks beyond the number of kv heads share them; vocabularies are
    padded."""
    matrices = [weight for weight in kind.weights if weight.sharded]
    vectors = [weight for weight in kind.weights if not weight.sharded]
    shared = {weight for weight in kind.weights if weight.axis is not None and weight.parts(tp) < tp}

    def vectors_of(*splits: Split) -> int:
        return sum(vector.numbers_on(tp) for vector in vectors if vector.split in splits)

    return Weights(
        matrices=sum(matrix.numbers_on(tp) for matrix in matrices),
        split_vectors=vectors_of(Split.COLUMN, Split.ROW),
        whole_vectors=vectors_of(Split.WHOLE),
        head_vectors=vectors_of(Split.OWN),
        whole_matrices=tuple(matrix.numbers for matrix in matrices if matrix.axis is None),
        copied_matrices=tuple(matrix.numbers_on(tp) for matrix in matrices if matrix in shared),
        copied_vectors=tuple(vector.numbers_on(tp) for vector in vectors if vector in shared),
        copies=max((tp // weight.parts(tp) for weight in shared), default=1),
        largest=max((matrix.numbers_on(tp) for matrix in matrices), default=0),
    )


@lru_cache(maxsize=256)
def adapter_weights(model: ModelShape, tp: int, rank: int) -> Weights:
    """The adapters of one decoder layer on one of `tp` ranks. All are unsharded, as vectors are."""
    from ..model.lora import factors_of  # here: most plans have no adapters

    factors = weights_of(factors_of(model.block, rank), tp)
    return Weights(
        split_vectors=factors.matrices,
        whole_vectors=factors.whole_vectors,
        head_vectors=factors.head_vectors,
        copied_vectors=factors.copied_matrices,
        copies=factors.copies,
    )


def expert_weights(model: ModelShape, experts: Experts) -> Weights:
    """Expert weights of a rank, priced as three stacked matrices."""
    numbers = model.routed.parameters // experts.ranks
    return Weights(matrices=numbers, largest=numbers // 3)


@lru_cache(maxsize=256)
def expert_factors(model: ModelShape, experts: Experts, rank: int) -> tuple[int, int]:
    """Elements of the first and of the second factors of one layer's experts on one rank."""
    from ..model.lora import factors_of

    numbers = [weight.numbers_on(experts.etp) for weight in factors_of(model.routed, rank).weights]
    return sum(numbers[::2]) // experts.ep, sum(numbers[1::2]) // experts.ep


def expert_adapter_weights(model: ModelShape, experts: Experts, rank: int) -> Weights:
    """Adapters of one layer's experts on one rank; ZeRO shards them like the experts."""
    factors = expert_factors(model, experts, rank)
    return Weights(matrices=sum(factors), largest=max(factors))


def held_mib(plan: Plan, shape: ModelShape, stage: int, adapters: Adapters | None = None) -> tuple[float, float]:
    """(weights, states) of each rank of a stage in MiB, sharded as in the plan; a tied table counts once per stage.

    Gradients are whole where they are summed over micro-batches before their reduction; optimizer states in host memory
    do not count (`offloaded_mib`). With `adapters` all weights are frozen.
    """
    last = plan.pipeline - 1
    learn = StateBytes.of(plan.assumed.number_types)
    if plan.assumed.offload_optimizer:
        learn = replace(learn, optimizer=0)
    base = learn.frozen if adapters else learn
    held: list[tuple[StateBytes, DataParallel, int, Weights]] = []  # weights and the ranks that share them
    for layer, kind in ((plan.layers[index], shape.of(index)) for index in plan.stage_layers(stage)):
        held.append((base, layer.dp_type, layer.shards(plan.stage_size), weights_of(kind.block, layer.tp)))
        experts = layer.experts
        of_experts = experts.dp_type, experts.shards(plan.stage_size)
        if kind.experts:
            held.append((base, *of_experts, expert_weights(kind, experts)))
        if adapters:
            held.append((learn, DataParallel.DDP, 1, adapter_weights(kind, layer.tp, adapters.rank)))
        if adapters and kind.experts:
            held.append((learn, *of_experts, expert_adapter_weights(kind, experts, adapters.rank)))
    tp = plan.vocab.tp
    vocab = base, plan.vocab.dp_type, plan.vocab.as_layer().shards(plan.stage_size)
    if stage == 0:
        held.append((*vocab, weights_of(shape.embedding, tp)))
    if stage == last:
        head = weights_of(shape.head, tp)
        has_table = shape.tied_embeddings and stage == 0
        held.append((*vocab, replace(head, matrices=0) if has_table else head))
    whole = plan.assumed.async_grad_reduce and plan.micro_batches > 1
    weights = states = 0.0
    for per_weight, dp_type, sharding, module in held:
        shares = sharding if dp_type is DataParallel.ZERO3 else 1
        weights += per_weight.weight * (module.matrices / shares + module.vectors)
        states += module.matrices * per_weight.held(dp_type, sharding, whole)
        states += module.vectors * per_weight.held(DataParallel.DDP, 1, whole_gradients=True)
    return weights / MIB, states / MIB


def offloaded_mib(plan: Plan, shape: ModelShape, stage: int, adapters: Adapters | None = None) -> float:
    """Upper bound in MiB of offloaded optimizer states and of activations of micro-batches in flight, for each rank of
    a stage, with balanced experts."""
    whole = replace(plan, assumed=replace(plan.assumed, offload_optimizer=None))
    states_mib = held_mib(whole, shape, stage, adapters)[1] - held_mib(plan, shape, stage, adapters)[1]
    if not any(plan.layers[index].offload for index in plan.stage_layers(stage)):
        return states_mib
    chunks = [plan.chunk_layers(stage, chunk) for chunk in range(plan.chunks)]
    away_mib = [sum(_away_mib(plan, shape.of(index), plan.layers[index]) for index in chunk) for chunk in chunks]
    moments = chunks_in_flight(plan.schedule, stage, plan.pipeline, plan.micro_batches, plan.chunks)
    return states_mib + max(sum(count * mib for count, mib in zip(held, away_mib, strict=True)) for held in moments)


def _away_mib(plan: Plan, kind: ModelShape, layer: LayerStrategy) -> float:
    """MiB of a micro-batch's activations that a layer offloads."""
    assumed, seq = plan.assumed, plan.assumed.seq_length or 0
    numbers, scalars = layer_numbers_per_token(kind, seq, layer.tp, assumed.sequence_parallel, assumed.fused)
    if kind.experts:
        kept = kind.routed.kept(Fused.NONE)
        numbers += kind.experts_per_token / layer.tp * (kept.tokens * layer.experts.etp + kept.split)
    if layer.recompute is Recompute.FULL:
        numbers, scalars = kind.hidden_size / (layer.tp if assumed.sequence_parallel else 1), 0.0
    tokens = plan.micro_batch * seq * layer.tp / plan.stage_size
    size_bytes: float = numbers * assumed.number_types.stored.bytes + scalars * FP32_BYTES
    return ROUNDED * layer.offload / 100 * tokens * size_bytes / MIB
