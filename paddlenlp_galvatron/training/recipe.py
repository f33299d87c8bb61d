"""The update of weights: optimizer, rate, decay, clipping; and skipped steps. Parity's reference uses the same."""

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

    optim: Literal["adamw", "sgd"] = "adamw"
    learning_rate: Rate = 5e-5
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup", "polynomial"] = "linear"
    min_learning_rate: RateOrNone | None = 1e-5
    warmup_steps: CountOrNone = 0
    warmup_ratio: float = Field(0.0, ge=0, le=1)
    lr_warmup_fraction: float = Field(0.0, ge=0, le=1)
    decay_steps: Count | None = None
    weight_decay: RateOrNone = 0.0
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    adam_epsilon: Rate = 1e-8
    use_multi_tensor: bool | None = None
    max_grad_norm: Positive = 1.0

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
        """PaddleNLP's schedule, and its number of the first step."""
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
        make_states(optimizer)  # states made later would fragment freed blocks of a step
        return optimizer


class NonFiniteGuard:
    """Counts the skipped steps of this process."""

    def __init__(self, may_skip: bool, max_skipped: int, scaled: bool):
        """`scaled`: with fp16, gradients may overflow until the loss scale fits; the loss itself never does."""
        self._may_skip, self._most, self._scaled = may_skip, max_skipped, scaled
        self._latest: deque[bool] = deque(maxlen=max(1, 2 * self._most))  # whether each step was skipped
        self.advanced = False  # whether any step changed the weights
        self._told_of_zero = False

    def count(self, step: int, loss: float, norm: float) -> None:
        """Record a step, counted from 1. Raises GalvatronError if it may not be skipped, or too many were."""
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
        """Raise GalvatronError if all steps were skipped."""
        if self._latest and not self.advanced:
            raise GalvatronError(
                f"all {len(self._latest)} steps were skipped, their loss or gradients being NaN or Inf: nothing was "
                "trained, and no checkpoint is written; lower learning_rate, or look at the data"
            )
