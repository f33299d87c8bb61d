"""Static memory of a rank of a stage: weights, and with gradients and optimizer the model states."""

from __future__ import annotations

from ..model.lora import Adapters
from ..plan import ModelShape, Plan
from ..plan.strategy import DataParallel
from .experts import expert_weights
from .module_memory import MIB
from .task import adapter_weights, frozen_states
from .weights import StateBytes, Weights, head_weights, layer_weights, table_weights


def held_mib(plan: Plan, shape: ModelShape, stage: int, adapters: Adapters | None = None) -> tuple[float, float]:
    """(weights, states) of each rank of a stage in MiB, sharded as the plan says; a tied table counts once a stage.

    Gradients are whole where they are summed over micro-batches before they are reduced. With `adapters` all weights
    are frozen, and the adapters whole.
    """
    last = plan.pipeline - 1
    layers = [plan.layers[index] for index in plan.stage_layers(stage)]
    held: list[tuple[DataParallel, int, Weights]] = [  # with the ranks that share them
        (layer.dp_type, plan.stage_size // layer.tp, layer_weights(shape, layer.tp)) for layer in layers
    ]
    if shape.experts:
        of_layers = [layer.experts for layer in layers]
        held += [(some.dp_type, plan.stage_size // some.ranks, expert_weights(shape, some)) for some in of_layers]
    tp = plan.vocab.tp
    vocab = plan.vocab.dp_type, plan.stage_size // tp
    if stage == 0:
        held.append((*vocab, table_weights(shape, tp)))
    if stage == last:
        head = head_weights(shape, tp)
        has_table = shape.tied_embeddings and stage == 0
        held.append((*vocab, Weights(whole_vectors=head.whole_vectors) if has_table else head))
    per_weight = StateBytes.of(plan.assumed.mixed_precision, bool(plan.assumed.fp32_gradients))
    whole = plan.assumed.async_grad_reduce and plan.micro_batches > 1
    weights = states = 0.0
    if adapters:
        for layer in layers:
            own = adapter_weights(shape, layer.tp, adapters.rank).all
            weights += own * per_weight.weight
            states += own * per_weight.held(DataParallel.DDP, 1, whole_gradients=True)
        per_weight = frozen_states(per_weight)
    for dp_type, sharding, module in held:
        shares = sharding if dp_type is DataParallel.ZERO3 else 1
        weights += per_weight.weight * (module.matrices / shares + module.vectors)
        states += module.matrices * per_weight.held(dp_type, sharding, whole)
        states += module.vectors * per_weight.held(DataParallel.DDP, 1, whole_gradients=True)
    return weights / MIB, states / MIB
