"""How weights are updated: optimizer, rate, decay, clipping; which steps are left out. A plan's oracle has the same."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Iterable
from functools import cached_property
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from ..base.errors import GalvatronError, UserError
from ..base.limits import Count, CountOrNone, Positive, Rate, RateOrNone
from ..options.group import Options


class Recipe(Options):
    """Optimizer and schedule by PaddleNLP's names and with its defaults."""

    panel = "Optimizer and schedule"

    optim: Literal["adamw", "sgd"] = Field("adamw", description="adamw or sgd")
    learning_rate: Rate = Field(5e-5, description="highest learning rate")
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup", "polynomial"] = Field(
        "linear", description="linear, cosine, constant, constant_with_warmup or polynomial"
    )
    min_learning_rate: RateOrNone | None = Field(
        1e-5,
        description="lowest learning rate of linear and cosine; in fine-tuning, if it is not given, they fall to 0",
    )
    warmup_steps: CountOrNone = Field(0, description="number of steps in which the learning rate rises linearly from 0")
    warmup_ratio: float = Field(0.0, ge=0, le=1, description="warmup_steps as a share of all steps, rounded down")
    lr_warmup_fraction: float = Field(0.0, ge=0, le=1, description="warmup_steps as a share of decay_steps")
    decay_steps: Count | None = Field(None, description="step at which the lowest rate is reached; unset: the last")
    weight_decay: RateOrNone = Field(0.0, description="weight decay of AdamW; never applied to norms and biases")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's decay of the mean gradient")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="AdamW's decay of the mean squared gradient")
    adam_epsilon: Rate = Field(1e-8, description="constant that AdamW adds to the divisor of an update")
    use_multi_tensor: bool | None = Field(
        None, description="let AdamW update all tensors in a few kernels; unset: on GPUs only"
    )
    max_grad_norm: Positive = Field(1.0, description="global norm to which gradients are clipped")

    @model_validator(mode="after")
    def _one_warmup(self) -> Self:
        if self.lr_warmup_fraction and (self.warmup_steps or self.warmup_ratio):
            raise ValueError("lr_warmup_fraction: is given with warmup_steps or warmup_ratio; give one of them")
        return self

    def over(self, steps: int) -> Self:
        """Returns the options for a run of `steps` steps: warm-up and decay as numbers of steps.

        PaddleNLP's Trainer rounds `warmup_ratio` down (create_scheduler); Megatron-LM's fraction is of the decay
        (get_optimizer_param_scheduler), and need not make whole steps.
        """
        decay = self.decay_steps or steps
        warmup = self.warmup_steps or int(self.warmup_ratio * steps)
        return self.model_copy(update={"warmup_steps": warmup, "decay_steps": decay})

    def rate_at(self, step: int) -> float:
        """Learning rate of a step counted from 0, by PaddleNLP's schedules."""
        schedule, first = self._schedule
        schedule.last_epoch = first + step
        return float(schedule.get_lr())

    @cached_property
    def _schedule(self) -> tuple[Any, int]:
        """PaddleNLP's schedule, and what it calls the first step."""
        from paddlenlp.trainer.trainer_utils import get_scheduler
        from paddlenlp.transformers import CosineAnnealingWithWarmupDecay, LinearAnnealingWithWarmupDecay

        annealing = {"cosine": CosineAnnealingWithWarmupDecay, "linear": LinearAnnealingWithWarmupDecay}
        kind, lowest = self.lr_scheduler_type, self.min_learning_rate
        # A run without an end cannot decay; nor can a decay that ends with the warm-up.
        decay = self.decay_steps or 0
        warmup = self.warmup_steps or self.lr_warmup_fraction * decay
        steps = decay if decay > warmup else warmup + 1
        if kind in annealing and self.decay_steps and lowest is not None:
            lowest = min(lowest, self.learning_rate)
            schedule = annealing[kind](self.learning_rate, lowest, warmup, steps, last_epoch=0)
        else:  # without a lowest rate PaddleNLP's Trainer has another rule, which begins a step earlier
            kind = "constant_with_warmup" if kind in annealing and not self.decay_steps else kind
            schedule = get_scheduler(kind, self.learning_rate, warmup, steps)
        return schedule, schedule.last_epoch

    def build(self, parameters: list[Any], decaying: Iterable[str], grad_clip: Any = None) -> Any:
        """Paddle's optimizer over Paddle parameters; `decaying` names those under weight decay."""
        import paddle

        rate = paddle.optimizer.lr.LambdaDecay(1.0, self.rate_at)
        if self.optim == "sgd":
            return paddle.optimizer.SGD(rate, parameters=parameters, grad_clip=grad_clip)
        from ..runtime import device
        from ..runtime.paddle_private import MultiTensorAdamW, make_states

        names = frozenset(decaying)
        largest = max((int(parameter.size) for parameter in parameters), default=0)
        fits = largest <= MultiTensorAdamW.MOST
        together = device.on_gpu() and fits if self.use_multi_tensor is None else self.use_multi_tensor
        if together and not fits:
            raise UserError(
                f"use_multi_tensor: its kernel takes at most {MultiTensorAdamW.MOST} numbers in a tensor, but this "
                f"rank has one of {largest}; leave the option out"
            )
        optimizer = (MultiTensorAdamW if together else paddle.optimizer.AdamW)(
            rate,
            self.adam_beta1,
            self.adam_beta2,
            self.adam_epsilon,
            parameters=parameters,
            weight_decay=self.weight_decay,
            grad_clip=grad_clip,
            apply_decay_param_fun=lambda name: name in names,
        )
        make_states(optimizer)  # they stay: made behind a step, they would lie in its freed blocks
        return optimizer


class NonFiniteGuard:
    """Counts the steps of this process that were left out."""

    def __init__(self, may_skip: bool, max_skipped: int, scaled: bool):
        """`scaled`: fp16's gradients overflow now and then until the loss scale fits; the loss itself does not."""
        self._may_skip, self._most, self._scaled = may_skip, max_skipped, scaled
        self._latest: deque[bool] = deque(maxlen=max(1, 2 * self._most))  # whether each step was left out
        self.advanced = False  # whether any step changed the weights
        self._told_of_zero = False

    def count(self, step: int, loss: float, norm: float) -> None:
        """Take note of a step, counted from 1. Raises GalvatronError where it may not be left out, or too many were."""
        skipped = not math.isfinite(norm)
        if skipped and not self._may_skip and not (self._scaled and math.isfinite(loss)):
            raise GalvatronError(
                f"step {step}: the loss is {loss}, the norm of the gradients {norm}; lower learning_rate, look at the "
                "data of this step, or pass --on_nonfinite skip to leave such steps out"
            )
        if norm == 0.0 and not self._told_of_zero:
            self._told_of_zero = True
            sys.stderr.write(
                f"warning: step {step}: the norm of the gradients is exactly 0, so nothing is trained; lower "
                "learning_rate and resume from an earlier checkpoint, or look at the data\n"
            )
        self._latest.append(skipped)
        self.advanced |= not skipped
        if (count := sum(self._latest)) > self._most:
            raise GalvatronError(
                f"step {step}: {count} of the latest {len(self._latest)} steps were skipped, more than --max_skipped "
                f"{self._most}: the loss is {loss}, the norm of the gradients {norm}; lower learning_rate, look at the "
                "data, or resume from an earlier checkpoint"
            )

    def require_progress(self) -> None:
        """Raise GalvatronError where all steps were left out."""
        if self._latest and not self.advanced:
            raise GalvatronError(
                f"all {len(self._latest)} steps were skipped, their loss or gradients being NaN or Inf: nothing was "
                "trained, and no checkpoint is written; lower learning_rate, or look at the data"
            )
