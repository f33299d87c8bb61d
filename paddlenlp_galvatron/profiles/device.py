"""The device of a rank: memory, peak and node, as its data sheet or the profiles say."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..base.limits import Positive, Ranks
from ..model import ModelShape
from ..model.shape import flops_per_token
from ..plan.strategy import Plan, Precision
from .data_sheet import DataSheet, sheet_of_driver


class Device(BaseModel):
    """A device. None: not known."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str | None = Field(None, description="as the driver, the CPU or the data sheet has it")
    is_gpu: bool = False
    memory_gib: Positive | None = Field(None, description="memory that programs can use, GiB")
    peak_16bit_tflops: Positive | None = Field(None, description="peak of bf16 and fp16 matrix products, TFLOP/s")
    peak_fp32_tflops: Positive | None = Field(None, description="peak of fp32 matrix products, TFLOP/s")
    gpus_per_node: Ranks | None = None
    host_link_gb_per_s: Positive | None = Field(None, description="GB/s a direction to the host's memory")

    @classmethod
    def of(cls, sheet: DataSheet) -> Device:
        return cls(
            name=sheet.device,
            is_gpu=True,
            memory_gib=sheet.memory.value,
            peak_16bit_tflops=sheet.matmul_16bit.value,
            peak_fp32_tflops=sheet.matmul_fp32.value,
            gpus_per_node=sheet.gpus_per_node,
            host_link_gb_per_s=sheet.host_link.value,
        )

    @classmethod
    def named(cls, name: str, memory_gib: float | None = None) -> Device:
        """A GPU by the full name that its driver gives, with its memory where the driver told it; the rest is known
        of the devices of shipped data sheets."""
        sheet = sheet_of_driver(name)
        known = cls.of(sheet) if sheet else cls(is_gpu=True)
        return known.model_copy(update={"name": name, "memory_gib": memory_gib or known.memory_gib})

    @classmethod
    def searched(cls, plan: Plan) -> Device:
        """The device that a plan was searched for, as its file describes it."""
        try:
            return cls.model_validate((plan.metadata.get("searched_from") or {}).get("device") or {})
        except ValidationError:  # written by someone else
            return cls()

    def peak_tflops(self, precision: Precision) -> float | None:
        return self.peak_fp32_tflops if precision is Precision.FP32 else self.peak_16bit_tflops

    def mfu(
        self,
        tokens_per_s: float,
        plan: Plan,
        shape: ModelShape,
        frozen: bool = False,
        document_tokens: float | None = None,
    ) -> float | None:
        """MFU, the same in every command: the share of the peak of a plan's devices that a model's own operations take,
        by `flops_per_token`. None where the peak is not known."""
        peak = self.peak_tflops(plan.assumed.mixed_precision)
        flops = flops_per_token(shape, plan.assumed.seq_length or 0, frozen, document_tokens)
        return tokens_per_s * flops / (plan.world_size * peak * 1e12) if peak else None
