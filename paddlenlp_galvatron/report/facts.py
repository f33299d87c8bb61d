"""The facts of a plan and its prediction: one record, rendered as text, JSON, pages, differences and scalings."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf

from ..cost_model import CostModel, Prediction
from ..cost_model.costs import Load
from ..plan import ModelShape, Plan, Precision
from ..profiles.reserve import gpu_sheet
from .breakdown import TIME, StageBreakdown, breakdown
from .measured import flops_per_token


@dataclass(frozen=True)
class PlanFacts:
    """A plan, and its prediction under a cost model."""

    plan: Plan
    prediction: Prediction
    cost: CostModel
    shape: ModelShape | None  # of a model whose layers are alike
    budget_mib: float = inf  # memory of a device

    @cached_property
    def stages(self) -> list[StageBreakdown]:
        return breakdown(self.plan, self.cost, self.prediction, self.budget_mib)

    @property
    def fullest(self) -> int:
        """The stage with least memory left."""
        return max(range(self.plan.pipeline), key=lambda stage: self.prediction.stages[stage].memory.total_mib)

    @property
    def busiest(self) -> int:
        """The stage that works longest."""
        return max(range(self.plan.pipeline), key=lambda stage: self.stages[stage].busy_ms)

    @property
    def memory_mib(self) -> float:
        """Memory of a device of the fullest stage."""
        return self.prediction.stages[self.fullest].memory.total_mib

    @property
    def mean_time_ms(self) -> dict[str, float]:
        """Terms of a step, averaged over the stages."""
        return {key: sum(stage.time_ms[key] for stage in self.stages) / len(self.stages) for key in TIME}

    @property
    def tokens_per_s(self) -> float:
        return self.prediction.samples_per_s * (self.plan.assumed.seq_length or 0)

    @property
    def mfu(self) -> float | None:
        """None where the device's peak or the shape of all layers is not known."""
        sheet = gpu_sheet(self.cost.device)
        if self.shape is None or sheet is None or self.plan.assumed.mixed_precision is Precision.FP32:
            return None
        flops_per_s = self.tokens_per_s * flops_per_token(self.shape, self.plan.assumed.seq_length or 0)
        return flops_per_s / self.plan.world_size / (sheet.matmul_16bit.value * 1e12)

    @property
    def device_word(self) -> str:
        """`GPU`, where the devices are known to be some; else `rank`."""
        return "GPU" if self.cost.reserve.parts else "rank"

    @property
    def speed_words(self) -> str:
        """`9,656 tokens/s/GPU, MFU 46.2%`."""
        words = f"{self.tokens_per_s / self.plan.world_size:,.0f} tokens/s/{self.device_word}"
        words += f", MFU {self.mfu:.1%}" if self.mfu else ""
        return words + (f"; {self.cost.load}" if self.cost.load else "")


def load_summary(load: Load | None) -> dict[str, float] | None:
    """`load` of every JSON answer; None: a model without experts, or a plan whose file does not tell it."""
    return load and load._asdict()
