"""RMSNorm in one kernel, Paddle's."""

from __future__ import annotations

from typing import Any

from paddle.incubate.nn.functional import fused_rms_norm

from ..base.errors import UserError
from ..base.processor import AVX512, lacks
from . import device


def rms_norm(x: Any, weight: Any, epsilon: float) -> Any:
    """[…, H], [H] -> […, H]: RMSNorm over the last dimension. Raises UserError: the kernel would end this process."""
    if not device.on_gpu() and lacks(AVX512):
        raise UserError(
            "use_fused_rms_norm: Paddle's kernel for CPUs needs AVX-512, which this processor lacks; leave it out"
        )
    return fused_rms_norm(x, weight, None, epsilon, x.ndim - 1)[0]
