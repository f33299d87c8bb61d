"""How weights are updated: optimizer, learning rate, decay and clipping. The same for a plan and its oracle."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Recipe(BaseModel):
    """Optimizer settings by PaddleNLP's names."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    optimizer: Literal["adamw", "sgd"] = Field("adamw", description="Paddle's optimizer")
    learning_rate: float = Field(3e-4, gt=0, description="highest learning rate")
    min_learning_rate: float = Field(3e-5, ge=0, description="learning rate of the last step")
    warmup_steps: int = Field(0, ge=0, description="steps of linear rise from 0")
    decay_steps: int = Field(0, ge=0, description="step at which the cosine reaches the minimum; 0: constant rate")
    weight_decay: float = Field(0.01, ge=0, description="AdamW's; never on norms and biases")
    max_grad_norm: float = Field(1.0, gt=0, description="global norm to which gradients are clipped")

    def rate_at(self, step: int) -> float:
        """Learning rate of a step counted from 0: linear warm-up, then half a cosine."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if not self.decay_steps:
            return self.learning_rate
        done = min(1.0, (step - self.warmup_steps) / max(1, self.decay_steps - self.warmup_steps))
        low, high = min(self.min_learning_rate, self.learning_rate), self.learning_rate
        return low + (high - low) * (1 + math.cos(math.pi * done)) / 2

    def build(self, parameters: list[Any], decaying: Iterable[str], grad_clip: Any = None) -> Any:
        """Paddle's optimizer over Paddle parameters; `decaying` names those under weight decay."""
        import paddle

        rate = paddle.optimizer.lr.LambdaDecay(1.0, self.rate_at)
        if self.optimizer == "sgd":
            return paddle.optimizer.SGD(rate, parameters=parameters, grad_clip=grad_clip)
        names = frozenset(decaying)
        return paddle.optimizer.AdamW(
            rate,
            parameters=parameters,
            weight_decay=self.weight_decay,
            grad_clip=grad_clip,
            apply_decay_param_fun=lambda name: name in names,
        )


def next_rate(optimizer: Any, step: int | None = None) -> None:
    """Go to the next step's learning rate, or to that of a step counted from 0."""
    optimizer._learning_rate.step(step)
