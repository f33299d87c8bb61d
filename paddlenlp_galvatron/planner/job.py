"""A whole training: its days and cost at a predicted speed, and its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from ..base.limits import Positive
from ..cost_model.costs import Task
from ..options.group import Options
from ..plan import ModelShape

DAY_S, HOUR_S = 24 * 3600, 3600
STORED_BYTES = 12  # of a weight in a checkpoint: itself and two moments, in fp32


class JobOptions(Options):
    """The whole training."""

    panel = "Training"

    tokens: float | None = Field(
        None,
        gt=0,
        le=1e18,
        allow_inf_nan=False,
        description="tokens of an epoch, for days and cost; unset: those of dataset_name_or_path",
    )
    num_train_epochs: Positive = Field(1.0, description="how often the tokens are trained on")
    price_per_gpu_hour: Positive | None = Field(None, description="price of a GPU for an hour, in any currency")
    save_gb_per_s: Positive | None = Field(
        None, description="GB/s at which the storage takes a checkpoint from all ranks together"
    )


@dataclass(frozen=True, slots=True)
class Job:
    """What a training takes. None: not known, as nobody says the tokens, the price or the speed of the storage."""

    days: float | None
    cost: float | None  # in the currency of the price
    checkpoint_gb: float
    save_s: float | None

    @classmethod
    def of(
        cls,
        options: JobOptions,
        shape: ModelShape,
        task: Task,
        gpus: int,
        tokens_per_s: float | None,
        usual: float | None = None,
    ) -> Job:
        """`tokens_per_s`: None where no plan fits. `usual`: tokens where nobody says how many."""
        tokens, price, speed = options.tokens or usual, options.price_per_gpu_hour, options.save_gb_per_s
        seconds = options.num_train_epochs * tokens / tokens_per_s if tokens and tokens_per_s else None
        stored_gb = _checkpoint_gb(shape, task)
        return cls(
            days=seconds / DAY_S if seconds else None,
            cost=price * gpus * seconds / HOUR_S if price and seconds else None,
            checkpoint_gb=stored_gb,
            save_s=stored_gb / speed if speed else None,
        )

    @property
    def checkpoint(self) -> str:
        saved = f", {self.save_s:.3g} s to save" if self.save_s else ""
        return f"a checkpoint has {self.checkpoint_gb:.3g} GB{saved}"

    def __str__(self) -> str:
        days = f"{self.days:.3g} days" if self.days else ""
        cost = f"cost {self.cost:,.0f}" if self.cost else ""
        return "; ".join(filter(None, (days, cost, self.checkpoint)))


def _checkpoint_gb(shape: ModelShape, task: Task) -> float:
    """GB of a checkpoint: the weights that learn, and their moments."""
    if task.adapter_rank is None:
        return shape.parameters * STORED_BYTES / 1e9
    sizes = (sum(weight.shape) for weight in shape.block.weights if weight.linear)
    return shape.layers * task.adapter_rank * sum(sizes) * STORED_BYTES / 1e9
