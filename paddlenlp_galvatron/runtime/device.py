"""Memory of this process's device, by Paddle's own byte-exact statistics: the GPU's, or the host's on CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import paddle
from paddle.base import core

DEVICES = Path("/dev")
MIB = 2**20


def on_gpu() -> bool:
    """Whether this process computes on a GPU."""
    return str(paddle.device.get_device()).startswith("gpu")


def name() -> str:
    """Of the kind of device that this process computes on, as PaddleNLP calls it."""
    return "gpu" if on_gpu() else "cpu"


@contextmanager
def on_cpu() -> Iterator[None]:
    """Meanwhile this process computes on the CPU."""
    before = paddle.device.get_device()
    paddle.device.set_device("cpu")
    try:
        yield
    finally:
        paddle.device.set_device(before)


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
    """What the first GPU calls itself, such as NVIDIA H100 80GB HBM3."""
    return str(paddle.device.cuda.get_device_name())


def allocated_mib() -> float:
    """MiB that tensors hold now."""
    if on_gpu():
        return float(paddle.device.cuda.memory_allocated()) / MIB
    return float(core.host_memory_stat_current_value("Allocated", 0)) / MIB


def peak_mib() -> float:
    """Most MiB that tensors held since `reset_peak`."""
    if on_gpu():
        return float(paddle.device.cuda.max_memory_allocated()) / MIB
    return float(core.host_memory_stat_peak_value("Allocated", 0)) / MIB


def reserved_peak_mib() -> float:
    """Most MiB that the allocator took from the GPU since `release`, what no tensor held included; on CPU the same as
    `peak_mib`."""
    return float(paddle.device.cuda.max_memory_reserved()) / MIB if on_gpu() else peak_mib()


def synchronize() -> None:
    """Wait for what was started on this rank's device. On CPU everything has been done when a call returns."""
    if on_gpu():
        paddle.device.synchronize()


def release() -> None:
    """Give back what the allocator reserved and no tensor holds; `reserved_peak_mib` starts anew."""
    if on_gpu():
        paddle.device.cuda.empty_cache()
        paddle.device.cuda.reset_max_memory_reserved()


def reset_peak() -> None:
    """Start a new peak from what is held now."""
    if on_gpu():
        paddle.device.cuda.reset_max_memory_allocated()
    else:
        core.host_memory_stat_reset_peak_value("Allocated", 0)
