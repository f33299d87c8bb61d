"""Paddle's fused GPU kernels: which of them a plan assumes and this device has."""

import os
from dataclasses import dataclass
from typing import Any, Self

from paddle.incubate.nn.functional import fused_rms_norm

from ..base.errors import UserError
from ..base.processor import AVX512, lacks
from ..launch.gpus import FLASH_VERSION, THIRD, has_flash_attention_3
from ..plan import Assumptions, Plan
from . import device

ROWS_OF_OWN_QUERIES = (3, 2)  # the first Paddle whose flashmask takes as many rows as there are queries


@dataclass(frozen=True)
class Kernels:
    """Paddle's fused GPU kernels that replace plain operations."""

    flash_attention: bool = False
    fused_rope: bool = False
    fused_rms_norm: bool = False
    fused_cross_entropy: bool = False  # used where the vocabulary is split

    @classmethod
    def of(cls, assumed: Assumptions) -> Self:
        """Kernels that a plan assumes and this device has."""
        return cls(*(device.on_gpu() and bool(getattr(assumed, name)) for name in cls.__match_args__))

    def require_version(self, plan: Plan, version: str) -> None:
        """Raise UserError where a kernel of this version of Paddle does not support the plan, or is missing."""
        if self.flash_attention and os.environ.get(FLASH_VERSION) == THIRD and not has_flash_attention_3():
            raise UserError(
                f"{FLASH_VERSION}={THIRD}: FlashAttention 3 needs a GPU of Hopper's kind and Paddle 3.2 or newer; this "
                f"is Paddle {version}; unset the variable"
            )
        parallel = any(layer.context > 1 for layer in plan.layers)
        if self.flash_attention and parallel and tuple(map(int, version.split(".")[:2])) < ROWS_OF_OWN_QUERIES:
            raise UserError(
                f"cp_sizes_enc: flash attention of Paddle {version} refuses fewer queries than keys; install Paddle "
                f"{'.'.join(map(str, ROWS_OF_OWN_QUERIES))} or newer, or galvatron search --max_cp_deg 1"
            )


PLAIN = Kernels()


def rms_norm(x: Any, weight: Any, epsilon: float) -> Any:
    """[…, H], [H] -> […, H]: RMSNorm over the last dimension. Raises UserError: the kernel would end this process."""
    if not device.on_gpu() and lacks(AVX512):
        raise UserError(
            "use_fused_rms_norm: Paddle's kernel for CPUs needs AVX-512, which this processor lacks; leave it out"
        )
    return fused_rms_norm(x, weight, None, epsilon, x.ndim - 1)[0]
