"""This process's device: its memory by Paddle's byte-exact statistics, its queues, and on CPU its processors; each rank
of a host has its own if there are enough."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import paddle

from ..base.units import MIB, NS_PER_MS
from ..launch.gpus import used_mib
from ..launch.out_of_memory import is_out_of_memory
from ..launch.status import waiting
from . import paddle_private


def on_gpu() -> bool:
    """Whether this process computes on a GPU."""
    return str(paddle.device.get_device()).startswith("gpu")


def loads_kernels() -> bool:
    """Whether kernels are loaded at first use, which may wait for all queued work of the device."""
    return on_gpu()


def name() -> str:
    """PaddleNLP's name of the kind of device that this process computes on."""
    return "gpu" if on_gpu() else "cpu"


@contextmanager
def on_cpu() -> Iterator[None]:
    """Compute on the CPU inside the block."""
    previous = paddle.device.get_device()
    paddle.device.set_device("cpu")
    try:
        yield
    finally:
        paddle.device.set_device(previous)


def allocated_mib() -> float:
    """Current MiB of tensors."""
    if on_gpu():
        return float(paddle.device.cuda.memory_allocated()) / MIB
    return paddle_private.host_bytes() / MIB


def peak_mib() -> float:
    """Peak MiB of tensors since `reset_peak`."""
    if on_gpu():
        return float(paddle.device.cuda.max_memory_allocated()) / MIB
    return paddle_private.host_peak_bytes() / MIB


def reserved_mib() -> float:
    """Current MiB reserved by the allocator, including unused blocks; on CPU the same as `allocated_mib`."""
    return float(paddle.device.cuda.memory_reserved()) / MIB if on_gpu() else allocated_mib()


def reserved_peak_mib() -> float:
    """Peak MiB reserved by the allocator since `release`, including unused blocks; on CPU the same as `peak_mib`."""
    return float(paddle.device.cuda.max_memory_reserved()) / MIB if on_gpu() else peak_mib()


def beside_mib() -> float | None:
    """MiB of this rank's GPU in use outside Paddle's allocator: context, workspaces, communicators and other processes.
    None on CPU and if the driver does not report it."""
    gpu = gpu_number()
    used = None if gpu is None else used_mib(gpu)
    return None if used is None else used - float(paddle.device.cuda.memory_reserved()) / MIB


def synchronize() -> None:
    """Wait for all work of this rank's device. On CPU a call returns when its work is done."""
    if on_gpu():
        with waiting("work queued on its device"):  # includes messages from other ranks
            paddle.device.synchronize()


def gpu_number() -> int | None:
    """Index of this process's GPU among those of its node; None on CPU."""
    return int(str(paddle.device.get_device()).partition(":")[2]) if on_gpu() else None


def multiprocessors() -> int:
    """Number of streaming multiprocessors of this process's GPU."""
    return int(paddle.device.cuda.get_device_properties().multi_processor_count)


def use_in_thread(gpu: int | None) -> None:
    """Make this thread use this GPU. A new thread uses the node's first GPU, where even a query creates a context of
    half a GiB per rank."""
    if gpu is not None:
        paddle_private.use_gpu(gpu)


class Mark:
    """A mark on this rank's compute stream; waits like a group's task for all work before it. Uses Paddle's CUDA class,
    as the general class's arguments differ between versions."""

    def __init__(self, timed: bool = False):
        self.event: Any = None  # on CPU: calls return when their work is done
        self.since_1970_ns = time.time_ns()  # host clock, ahead of the device
        if on_gpu():
            self.event = paddle.device.cuda.Event(enable_timing=timed)
            self.event.record()

    def is_completed(self) -> bool:
        """Whether the device has reached this mark."""
        return self.event is None or bool(self.event.query())

    def wait(self) -> None:
        """Nothing to do: later work is queued behind it."""

    def ms_after(self, first: Mark) -> float:
        """Time between two timed marks that the device has reached."""
        if self.event is not None:
            return float(first.event.elapsed_time(self.event))
        return (self.since_1970_ns - first.since_1970_ns) / NS_PER_MS


def has_streams() -> bool:
    """Whether calls return before the device has done their work."""
    return on_gpu()


def event_here() -> Any:
    """An event of the current stream, after all queued work; None on CPU."""
    return paddle.device.current_stream().record_event() if has_streams() else None


def wait_in_stream(event: Any) -> None:
    """Let the current stream wait for an event of another stream."""
    if event is not None:
        paddle.device.current_stream().wait_event(event)


class CopyStream:
    """A stream besides the compute stream; on CPU the same."""

    def __init__(self) -> None:
        self._stream = paddle.device.Stream() if has_streams() else None

    @contextmanager
    def after(self, event: Any) -> Iterator[None]:
        """Queue the block's calls on this stream, after an event."""
        if self._stream is None:
            yield
            return
        self._stream.wait_event(event)
        with paddle.device.stream_guard(self._stream):
            yield


def on_device(tensor: Any) -> bool:
    """Whether a tensor lies in a device's own memory."""
    return bool(tensor.place.is_gpu_place() or tensor.place.is_custom_place())


def finish_computing() -> None:
    """Wait for the compute queue of this rank's device; messages may still be in flight."""
    if on_gpu():
        paddle.device.current_stream().synchronize()


# Copies between host and GPU use page-locked memory, at the bus's speed and on the compute stream. Paddle copies other
# memory in CUDA's default queue, which waits for all queues, including messages. Paddle's allocator keeps the
# page-locked memory of the largest copy for reuse.
_staged: deque[tuple[Any, Mark]] = deque()  # arrays with copies in flight, and the mark after each copy


def to_device(numbers: Any) -> Any:
    """A tensor of a NumPy array's numbers, or of nested lists'."""
    if not on_gpu():
        return paddle.to_tensor(numbers)
    while _staged and _staged[0][1].is_completed():
        _staged.popleft()
    pinned = paddle.to_tensor(numbers, place=paddle.CUDAPinnedPlace())
    copied = pinned.cuda(blocking=False)
    _staged.append((pinned, Mark()))
    return copied


def to_host(tensor: Any) -> Any:
    """A copy of a tensor as a NumPy array."""
    if has_streams() and not on_device(tensor):
        synchronize()  # copies to it may be queued
    if not on_gpu() or not on_device(tensor):
        return tensor.numpy()
    staged = paddle_private.copy_later(tensor, paddle.CUDAPinnedPlace())
    finish_computing()
    return staged.numpy()


def reserve(mib: float, spare_mib: float) -> None:
    """Return unused blocks to the GPU and allocate `mib` in one block for later tensors; `spare_mib` more if free.
    Synchronises the device. Raises an error if `mib` are not free."""
    if on_gpu():
        paddle.device.cuda.empty_cache()
        try:
            paddle.empty([int((mib + spare_mib) * MIB)], "uint8")
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            paddle.empty([int(mib * MIB)], "uint8")


def release() -> None:
    """Free the allocator's unused memory and reset `reserved_peak_mib`."""
    if on_gpu():
        paddle.device.cuda.empty_cache()
        paddle.device.cuda.reset_max_memory_reserved()


def reset_peak() -> None:
    """Reset the peak to the current memory."""
    if on_gpu():
        paddle.device.cuda.reset_max_memory_allocated()
    else:
        paddle_private.reset_host_peak()


PLACE = {"PADDLE_RANK_IN_NODE": "0", "PADDLE_LOCAL_SIZE": "1"}  # variables; their values for a process alone
TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


@cache
def host_processors() -> tuple[int, ...]:
    """The processors that the ranks of this host share, read once."""
    return tuple(sorted(os.sched_getaffinity(0)))


def processor_shares(ranks: int) -> list[list[int]]:
    """The processors of each of `ranks` on this host; none where there are fewer processors than ranks.

    One thread of each core, if there are enough cores: threads of a core slow each other down."""
    processors = _one_a_core()
    if len(processors) < ranks:
        processors = list(host_processors())
    each = len(processors) // ranks
    return [processors[each * index : each * (index + 1)] for index in range(ranks if each else 0)]


def pin_rank() -> None:
    """Pin this rank, if it computes on CPU, to its share of the processors.

    A single rank on its host is not pinned.
    """
    index, ranks = (int(os.environ.get(name, alone)) for name, alone in PLACE.items())  # the launcher's numbers
    if not on_gpu() and ranks > 1 and index < len(parts := processor_shares(ranks)):
        _move(parts[index])


@contextmanager
def pinned(index: int, ranks: int, wanted: bool = True) -> Iterator[None]:
    """Inside the context, run all threads of this process on the share of rank `index` of `ranks` on this host, if
    wanted and possible."""
    cores = sorted(os.sched_getaffinity(0))
    parts = processor_shares(ranks)
    if not wanted or index >= len(parts):
        yield
        return
    _move(parts[index])
    try:
        yield
    finally:
        _move(cores)


def _one_a_core() -> list[int]:
    first: dict[str, int] = {}  # first thread of each core
    for processor in host_processors():
        path = Path(TOPOLOGY.format(processor))
        first.setdefault(path.read_text() if path.exists() else str(processor), processor)
    return list(first.values())


def _move(processors: Sequence[int]) -> None:
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # the process may have ended
            os.sched_setaffinity(int(thread.name), processors)
