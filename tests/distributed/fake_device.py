"""Lets ranks compute on the device of `fixtures/fake_device.cc` as on a GPU, and counts calls that wait for all of
it."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.autograd import PyLayer
from paddle.base import core

from paddlenlp_galvatron.runtime import device
from paddlenlp_galvatron.runtime.paddle_private import part_of

TESTS = Path(__file__).parents[1]
SOURCE = TESTS / "fixtures" / "fake_device.cc"
FOLDER = "FAKE_DEVICE_FOLDER"  # variable: where ranks have their mailboxes
LIBRARIES = "CUSTOM_DEVICE_ROOT"  # variable of Paddle: where it finds devices
LIMIT = "FAKE_DEVICE_LIMIT_S"  # variable: of a host's wait, after which its rank ends
IN_PLACE = ("add_", "scale_", "sgd_", "adamw_", "fused_adam_")  # operators that the runtime lets change windows


def built() -> Path | None:
    """The folder of the library, made where it is missing or old; None without a compiler, or Paddle's statistics."""
    compiler = shutil.which("g++")
    if compiler is None or not hasattr(core, "device_empty_cache"):
        return None
    headers = Path(paddle.__file__).parent / "include"
    library = TESTS.parent / "build" / f"fake_device-{paddle.__version__}" / "libfake_device.so"
    if not library.exists() or library.stat().st_mtime < SOURCE.stat().st_mtime:
        library.parent.mkdir(parents=True, exist_ok=True)
        part = library.with_name(f"{os.getpid()}.part")
        command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-pthread", f"-I{headers}", SOURCE, "-o", part]
        subprocess.run(command, check=True)
        part.rename(library)
    return library.parent


class Counts(NamedTuple):
    """A rank's calls to its device."""

    allocations: int
    frees: int
    waits: int

    def since(self, before: Counts) -> Counts:
        return Counts(*(now - then for now, then in zip(self, before, strict=True)))


class FakeDevice:
    """This rank's."""

    def __init__(self) -> None:
        [library] = Path(os.environ[LIBRARIES]).glob("*.so")
        self._library = ctypes.CDLL(str(library))

    def counts(self) -> Counts:
        numbers = (ctypes.c_long * 3)()
        self._library.fake_counts(numbers)
        return Counts(*numbers)

    def install(self) -> None:
        """Let the runtime compute on it as on a GPU. Before groups are made."""
        device.loads_kernels = device.has_streams = lambda: True
        device.synchronize = paddle.device.synchronize
        device.allocated_mib = lambda: paddle.device.memory_allocated() / device.MIB
        device.peak_mib = lambda: paddle.device.max_memory_allocated() / device.MIB
        device.reserved_peak_mib = lambda: paddle.device.max_memory_reserved() / device.MIB
        device.reset_peak = paddle.device.reset_max_memory_allocated
        device.release = release
        device.reserve = reserve
        for name in IN_PLACE:
            setattr(paddle._C_ops, name, in_place(getattr(paddle._C_ops, name)))
        paddle.assign = into(paddle.assign)
        paddle._C_ops.embedding = embedding(paddle._C_ops.embedding)
        dist.stream.alltoall_single = from_device(dist.stream.alltoall_single)


def reserve(mib: float, spare_mib: float) -> None:
    """As the runtime's on a GPU."""
    paddle.device.empty_cache()
    paddle.empty([int((mib + spare_mib) * device.MIB)], "uint8")


def release() -> None:
    """As the runtime's on a GPU."""
    paddle.device.empty_cache()
    paddle.device.reset_max_memory_reserved()


def memory(tensor: Any) -> np.ndarray:
    """The tensor's own bytes, when its device has come to them."""
    paddle.device.current_stream().synchronize()
    size = tensor.size * tensor.element_size()
    return np.frombuffer((ctypes.c_uint8 * size).from_address(tensor.data_ptr()), np.uint8)


# ---- what Paddle's CPU kernels don't do for another device ---------------------------------------------------------


def in_place(operator: Callable[..., Any]) -> Callable[..., Any]:
    """The same where it changes its tensors: a CPU kernel's results lie elsewhere, but windows are to see them."""

    def call(*arguments: Any, **named: Any) -> Any:
        given = [each for one in arguments for each in (one if isinstance(one, list) else [one])]
        tensors = [each for each in given if isinstance(each, paddle.Tensor) and each.shape]
        places = [part_of(tensor, 0, int(tensor.size)) for tensor in tensors]  # tensors of `detach` move with a window
        result = operator(*arguments, **named)
        for tensor, place in zip(tensors, places, strict=True):
            if tensor.data_ptr() != place.data_ptr():
                memory(place)[:] = memory(tensor)
                place._share_buffer_to(tensor)
        return result

    return call


def into(assign: Callable[..., Any]) -> Callable[..., Any]:
    """`paddle.assign`, whose output stays where it is."""

    def call(x: Any, output: Any = None) -> Any:
        if output is None:
            return assign(x)
        memory(output)[:] = memory(x)
        return output

    return call


def embedding(operator: Callable[..., Any]) -> Callable[..., Any]:
    """The same with a gradient on the device."""

    class Embedding(PyLayer):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, ids: Any, table: Any, *rest: Any) -> Any:
            ctx.ids, ctx.shape = ids, table.shape
            return operator(ids, table, *rest)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return None, paddle.scatter_nd_add(paddle.zeros(ctx.shape, grad.dtype), ctx.ids.unsqueeze(-1), grad)

    return Embedding.apply  # type: ignore[no-any-return]


def from_device(exchange: Callable[..., Any]) -> Callable[..., Any]:
    """The same with tensors of no rows, which kernels leave on the CPU."""

    def call(out: Any, tensor: Any, *rest: Any, **named: Any) -> Any:
        return exchange(out, tensor if tensor.size else paddle.empty(tensor.shape, tensor.dtype), *rest, **named)

    return call
