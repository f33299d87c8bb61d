"""What the runtime cannot run yet, refused by name before anything starts."""

from __future__ import annotations

from collections.abc import Iterator

from ..plan import DataParallel, ModelShape, Plan, Precision, UserError


def require_supported(plan: Plan, model: ModelShape) -> None:
    """Raise UserError with every part of the plan or model that this version cannot train."""
    faults = list(_unsupported(plan, model))
    if faults:
        raise UserError(faults)


def _unsupported(plan: Plan, model: ModelShape) -> Iterator[str]:
    for index, layer in enumerate(plan.layers):
        if layer.dp_type is not DataParallel.DDP and plan.stage_size > layer.tp:
            yield f"dp_types_enc: layer {index} wants {layer.dp_type}, which is not trained yet; use ddp"
            break
    if plan.vocab.dp_type is not DataParallel.DDP and plan.stage_size > plan.vocab.tp:
        yield f"embed_sdp: the vocabulary layers want {plan.vocab.dp_type}, which is not trained yet; use ddp"
    if plan.assumed.mixed_precision is not Precision.FP32:
        yield f"mixed_precision: {plan.assumed.mixed_precision} is not trained yet; use fp32"
    if not plan.assumed.async_grad_reduce:
        yield "no_async_grad_reduce: reducing gradients every micro-batch is not trained yet; leave it off"
    if model.tied_embeddings:
        yield f"tie_word_embeddings: {model.name} ties embedding and LM head, which is not trained yet; untie them"
    for index, layer in enumerate(plan.layers):
        if model.kv_heads % layer.degree:
            yield (
                f"tp_sizes_enc: layer {index} has degree {layer.degree} but {model.name} has {model.kv_heads} kv heads;"
                " a degree above the kv heads is not trained yet"
            )
            break
