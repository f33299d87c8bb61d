"""Static memory of a rank of a stage: weights, and with gradients and optimizer the model states."""

from __future__ import annotations

from ..model.lora import Adapters, factors
from ..plan import LayerStrategy, ModelShape, Plan, VocabStrategy
from ..plan.strategy import DataParallel
from .module_memory import MIB
from .states import StateBytes
from .task import frozen_states
from .weights import Weights, head_weights, layer_weights, table_weights


def held_mib(plan: Plan, shape: ModelShape, stage: int, adapters: Adapters | None = None) -> tuple[float, float]:
    """(weights, states) of each rank of a stage in MiB, sharded as the plan says; a tied table counts once a stage.

    Gradients are whole where they are summed over micro-batches before they are reduced. With `adapters` all weights
    are frozen, and the adapters whole.
    """
    last = plan.pipeline - 1
    held: list[tuple[LayerStrategy | VocabStrategy, Weights]] = [
        (layer, layer_weights(shape, layer.tp)) for layer in (plan.layers[index] for index in plan.stage_layers(stage))
    ]
    tp = plan.vocab.tp
    if stage == 0:
        held.append((plan.vocab, table_weights(shape, tp)))
    if stage == last:
        head = head_weights(shape, tp)
        has_table = shape.tied_embeddings and stage == 0
        held.append((plan.vocab, Weights(whole_vectors=head.whole_vectors) if has_table else head))
    per_weight = StateBytes.of(plan.assumed.mixed_precision, bool(plan.assumed.fp32_gradients))
    whole = plan.assumed.async_grad_reduce and plan.micro_batches > 1
    weights = states = 0.0
    if adapters:
        for layer in (plan.layers[index] for index in plan.stage_layers(stage)):
            own = sum(one.numbers_on(layer.tp) for of in shape.block.weights for one in factors(of, adapters.rank))
            weights += own * per_weight.weight
            states += own * per_weight.held(DataParallel.DDP, 1, whole_gradients=True)
        per_weight = frozen_states(per_weight)
    for strategy, module in held:
        sharding = plan.stage_size // strategy.tp
        shares = sharding if strategy.dp_type is DataParallel.ZERO3 else 1
        weights += per_weight.weight * (module.matrices / shares + module.vectors)
        states += module.matrices * per_weight.held(strategy.dp_type, sharding, whole)
        states += module.vectors * per_weight.held(DataParallel.DDP, 1, whole_gradients=True)
    return weights / MIB, states / MIB
