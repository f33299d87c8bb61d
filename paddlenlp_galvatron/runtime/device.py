"""Memory of this process's device, by Paddle's own byte-exact statistics: the GPU's, or the host's on CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import paddle

from ..launch.status import waiting
from . import paddle_private

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


def allocated_mib() -> float:
    """MiB that tensors hold now."""
    if on_gpu():
        return float(paddle.device.cuda.memory_allocated()) / MIB
    return paddle_private.host_bytes() / MIB


def peak_mib() -> float:
    """Most MiB that tensors held since `reset_peak`."""
    if on_gpu():
        return float(paddle.device.cuda.max_memory_allocated()) / MIB
    return paddle_private.host_peak_bytes() / MIB


def reserved_peak_mib() -> float:
    """Most MiB that the allocator took from the GPU since `release`, what no tensor held included; on CPU the same as
    `peak_mib`."""
    return float(paddle.device.cuda.max_memory_reserved()) / MIB if on_gpu() else peak_mib()


def synchronize() -> None:
    """Wait for what was started on this rank's device. On CPU everything has been done when a call returns."""
    if on_gpu():
        with waiting("what its device was given to do"):  # others' messages are among it
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
        paddle_private.reset_host_peak()
