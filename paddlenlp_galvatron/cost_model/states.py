"""Bytes of model states: what Paddle's AdamW with fp32 master weights keeps, by dtype and ZeRO stage."""

from __future__ import annotations

from dataclasses import dataclass

from ..plan.strategy import DataParallel, Precision

FP32_BYTES = 4
MOMENT_BYTES = 2 * FP32_BYTES  # AdamW's two moments, fp32 with multi_precision


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes per parameter, unsharded."""

    weight: int
    gradient: int
    optimizer: int  # moments, and the fp32 master weight of a 16-bit one

    @classmethod
    def of(cls, precision: Precision, fp32_gradients: bool = False) -> StateBytes:
        """fp32: 4 + 4 + 8. 16-bit: 2 + 2 (4 when gradients are accumulated in fp32) + 4 + 8."""
        full = precision is Precision.FP32
        gradient = FP32_BYTES if full or fp32_gradients else precision.bytes
        return cls(precision.bytes, gradient, MOMENT_BYTES + (0 if full else FP32_BYTES))

    def held(self, dp_type: DataParallel, sharding: int, whole_gradients: bool) -> float:
        """Bytes per parameter that a rank keeps, its states sharded over `sharding` ranks.

        ZeRO-2 shards optimizer states and gradients, ZeRO-3 weights too; with `whole_gradients` (they are summed over
        micro-batches before they are reduced) gradients stay whole.
        """
        weight, gradient, optimizer = float(self.weight), float(self.gradient), float(self.optimizer)
        if dp_type is not DataParallel.DDP:
            optimizer /= sharding
            if not whole_gradients:
                gradient /= sharding
        if dp_type is DataParallel.ZERO3:
            weight /= sharding
        return weight + gradient + optimizer
