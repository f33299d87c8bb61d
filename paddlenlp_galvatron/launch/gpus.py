"""The GPUs of this node, as Paddle sees them and as the system does."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import paddle

DEVICES = Path("/dev")


def gpu_count() -> int:
    """GPUs of this node that Paddle can use."""
    return int(paddle.device.cuda.device_count()) if paddle.is_compiled_with_cuda() else 0


def unused_gpus() -> list[str]:
    """NVIDIA's device files on this node, where Paddle was built for CPUs alone and nobody hides them."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
    if hidden or paddle.is_compiled_with_cuda():
        return []
    return sorted(str(path) for path in DEVICES.glob("nvidia[0-9]*"))


def gpu_name() -> str:
    """Name of the first GPU, such as NVIDIA H100 80GB HBM3."""
    return str(paddle.device.cuda.get_device_name())


def used_mib(gpu: int) -> float | None:
    """MiB of a visible GPU that are in use, by whatever process, as its driver counts them; None: it does not tell."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run([*words, "-i", visible[gpu] if visible else str(gpu)], capture_output=True, text=True)
        return float(answer.stdout)
    except (OSError, ValueError):
        return None
