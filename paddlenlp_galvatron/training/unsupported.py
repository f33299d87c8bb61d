"""Refuses by name features of PaddleNLP's Trainer that a plan's engine handles itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from paddlenlp.trainer import Trainer

from ..plan import UserError

T = TypeVar("T")

STEP = "the plan's engine runs a step, and its loss is the cross entropy of the next token"
LOADER = "every rank takes the same global batches; give data sets and data_collator"
UNSUPPORTED = {
    "criterion": STEP,
    "compute_loss": STEP,
    "training_step": STEP,
    "training_pipeline_step": STEP,
    "compute_metrics": "logits are never gathered; evaluate() gives loss and perplexity",
    "preprocess_logits_for_metrics": "logits are never gathered; evaluate() gives loss and perplexity",
    "evaluation_loop": "the plan's engine evaluates; call evaluate()",
    "prediction_step": "the plan's engine evaluates; call evaluate()",
    "prediction_pipeline_step": "the plan's engine evaluates; call evaluate()",
    "predict": "call save_model() and predict with PaddleNLP",
    "get_test_dataloader": "call save_model() and predict with PaddleNLP",
    "optimizers": "the optimizer is over the parts of weights that a rank holds; choose it in args: optim, …",
    "create_optimizer": "the optimizer is over the parts of weights that a rank holds; choose it in args: optim, …",
    "create_scheduler": "choose the schedule in args: lr_scheduler_type, …",
    "create_optimizer_and_scheduler": "choose both in args: optim, lr_scheduler_type, …",
    "get_train_dataloader": LOADER,
    "get_eval_dataloader": LOADER,
}


def refuse_arguments(given: Mapping[str, Any]) -> None:
    """Raise UserError for arguments of PaddleNLP's Trainer that a plan has no use for, TypeError for unknown ones."""
    if unknown := given.keys() - UNSUPPORTED.keys():
        raise TypeError(f"GalvatronTrainer got an unexpected keyword argument {min(unknown)!r}")
    _refuse([name for name, value in given.items() if value is not None and value != (None, None)])


def refuse_overrides(trainer: type[Any]) -> None:
    """Raise UserError for methods of a sub-class that nobody would call."""
    _refuse([name for name in vars(trainer) if name in UNSUPPORTED])


def without_unsupported(trainer: type[T]) -> type[T]:
    """A trainer whose methods that are not there say so."""
    for name in UNSUPPORTED.keys() & vars(Trainer).keys() - vars(trainer).keys():
        setattr(trainer, name, _refusal(name))
    return trainer


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UserError(f"{name}: is not available under a plan: {UNSUPPORTED[name]}")

    return refuse


def _refuse(names: list[str]) -> None:
    if names:
        raise UserError(f"{name}: cannot be overridden under a plan: {UNSUPPORTED[name]}" for name in names)
