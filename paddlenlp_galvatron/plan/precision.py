"""Number types, and those that a run stores, sends, computes in and sums gradients in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any, Literal

# Type of layers' matrix products, if it differs from that of weights and activations: FP8 has a byte per element, with
# scales per tensor or (MXFP8) per block.
Products = Literal["fp8"]


class Precision(StrEnum):
    """A number type: its name in options and files, its bytes, and its names in Paddle, numpy and safetensors."""

    FP32 = "fp32", 4, "float32", "F32"
    BF16 = "bf16", 2, "bfloat16", "BF16"
    FP16 = "fp16", 2, "float16", "F16"

    bytes: int
    dtype: str  # name in Paddle, numpy with ml_dtypes, and `torch_dtype` of a config.json
    code: str  # name in safetensors files

    def __new__(cls, name: str, *facts: Any) -> Precision:
        member = str.__new__(cls, name)
        member._value_, (member.bytes, member.dtype, member.code) = name, facts
        return member

    @property
    def mixed(self) -> bool:
        """Whether training in it keeps fp32 master weights."""
        return self is not Precision.FP32


@dataclass(frozen=True, slots=True)
class NumberTypes:
    """Number types of a run. Sizes of elements, messages and states follow from them."""

    stored: Precision  # weights, and activations between layers and for backward
    sent: Precision  # activations, weights and their gradients between ranks
    computed: Precision  # computation inside layers
    gradients: Precision  # sums over micro-batches, and what is reduced over ranks

    @classmethod
    @lru_cache(maxsize=16)
    def of(cls, precision: Precision = Precision.FP32, fp32_gradients: bool = False) -> NumberTypes:
        """The types of mixed precision on a device that computes in all of them."""
        return cls(precision, precision, precision, Precision.FP32 if fp32_gradients else precision)

    @property
    def casts(self) -> bool:
        """Whether layers cast at their edges."""
        return self.computed is not self.stored
