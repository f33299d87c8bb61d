"""Adds to Paddle's gloo backend the operations that hybrid parallelism on CPU processes needs. NCCL needs none of it.

`install()` completes `ProcessGroupGloo` in place, so that the rest of the runtime makes the same
`paddle.distributed` calls on every backend:

- a rank's timeout is its launcher's: gloo's 30 s end a run whose ranks share processors; - every group has its own
rendezvous keys: gloo writes them without the group's name, so groups would read each other's addresses and hang;
- send and receive run on a worker thread per group: gloo's send blocks until the peer receives. A group carries
  point-to-point traffic in one direction only (gloo counts operations per group, not per direction);
- reduce-scatter, all-to-all and all-gather into a tensor are made of gloo's all-reduce and all-gather;
- fp16 is reduced in fp32.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import os
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import base
from paddle.base import core
from paddle.distributed import collective, parallel

from ..base.errors import UserError
from ..launch.faults import wait_limit_s
from ..launch.status import waiting
from ..launch.store import GROUP

# Calls that block until other ranks take part.
AT_ONCE = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
BLOCKING = ("all_reduce", "all_gather", "broadcast", "reduce", "gather", "scatter", "barrier")

REACHED_AT = "galvatron/reached"  # keys of the store, by node
REACH_S = 10.0
LATER_S = 60.0  # gloo's timeout exceeds all others, as its error is least informative

_new_process_group = collective._new_process_group_impl
_kept: list[Any] = []  # groups live as long as the process: gloo's threads use them
COMMUNICATOR = "_ZN6paddle11distributed16ProcessGroupGloo14GetCommContextEv"  # ProcessGroupGloo::GetCommContext()
SET_TIMEOUT = "_ZN4gloo7Context10setTimeoutENSt6chrono8durationIlSt5ratioILl1ELl1000EEEE"  # argument in milliseconds
CLASS = "_ZTVN4gloo10rendezvous7ContextE"  # its virtual table; objects point behind its first two words
HELD = 16  # offset in a pybind11 object of the address of the C++ object
WORDS = 16  # words of a communicator to search for its context
GLOO_IN = ("libs/libphi_core.so", "libs/libphi.so")  # path in Paddle's folder, by its version


def install() -> None:
    """Complete Paddle's gloo process groups, if they will be used: call before
    `paddle.distributed.init_parallel_env`."""
    gloo = core.ProcessGroupGloo
    runs = parallel._is_cpuonly(os.environ.get("PADDLE_DISTRI_BACKEND", "auto"))  # the condition of init_parallel_env
    if not runs or hasattr(gloo, "galvatron_installed"):
        return
    collective._new_process_group_impl = parallel._new_process_group_impl = _group_with_own_keys
    methods = {
        "galvatron_installed": True,
        "blocking_send": gloo.send,
        "blocking_recv": gloo.recv,
        "native_all_reduce": gloo.all_reduce,
        "all_reduce": _all_reduce,
        "send": _send,
        "recv": _receive,
        "all_gather_into_tensor": lambda group, out, tensor, sync_op=True: group.all_gather(tensor, out),
        "reduce_scatter_tensor": _reduce_scatter_tensor,
        "all_to_all_single": _all_to_all_single,
    }
    for name, method in methods.items():
        setattr(gloo, name, method)
    for name in BLOCKING:
        setattr(gloo, name, _waiting(name, getattr(gloo, name)))
    for name in AT_ONCE:  # a CPU has no stream
        setattr(gloo, f"{name}_on_calc_stream", getattr(gloo, name))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _interface(_own_address()))  # gloo would use the host name's


# ---- groups ------------------------------------------------------------------------------------------------------


def _group_with_own_keys(
    backend: str,
    store: Any,
    rank: int,
    world_size: int,
    group_name: str,
    pg_options: Any,
    group_id: int = 0,
    **rest: Any,
) -> Any:
    if backend != "gloo":
        return _new_process_group(backend, store, rank, world_size, group_name, pg_options, group_id, **rest)
    with _reached(store, rank, world_size) if group_id == 0 else contextlib.nullcontext():
        store.set(GROUP, str(group_id))
        group = core.ProcessGroupGloo.create(store, rank, world_size, group_id)
        set_gloo_limit(group, wait_limit_s() + LATER_S)
    _kept.append(group)
    return group


@contextlib.contextmanager
def _reached(store: Any, rank: int, world_size: int) -> Iterator[None]:
    """Check that the first ranks of all nodes can connect to each other; all leave the context together. Raises
    UserError, as gloo would retry for minutes."""
    local = len(os.environ.get("PADDLE_TRAINER_ENDPOINTS", "").split(","))  # ranks of this node, by our launcher
    node, local_rank = divmod(rank, local)
    if local_rank or local == world_size:
        yield
        return
    with socket.create_server((_own_address(), 0), backlog=world_size) as listener:
        store.set(f"{REACHED_AT}/{node}", "{}:{}".format(*listener.getsockname()))
        for other in {*range(world_size // local)} - {node}:
            address, port = store.get(f"{REACHED_AT}/{other}").decode().split(":")
            try:
                socket.create_connection((address, int(port)), REACH_S).close()
            except ConnectionError:
                continue  # its rank has ended: gloo detects that at once
            except OSError as error:
                raise UserError(
                    f"MASTER_ADDR: node {node} does not reach node {other} at {address}, where ranks listen: {error}; "
                    "let nodes reach each other's ports there, or name an address of node 0 on a network where they do"
                ) from None
        yield


def _waiting(name: str, method: Any) -> Any:
    """Wraps the method: while it runs, the rank's status names the operation."""

    def waited(group: Any, *arguments: Any, **named: Any) -> Any:
        with waiting(f"{name} of {group.size()} ranks"):
            return method(group, *arguments, **named)

    return waited


def _own_address() -> str:
    return os.environ.get("PADDLE_CURRENT_ENDPOINT", "127.0.0.1:0").rsplit(":", 1)[0]


def _interface(address: str) -> str:
    """Name of the network interface that has an IPv4 address."""
    siocgifaddr = 0x8915  # ioctl: the address of an interface, in bytes 20 to 24 of struct ifreq (linux/sockios.h)
    wanted = socket.inet_aton(socket.gethostbyname(address))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                if fcntl.ioctl(probe, siocgifaddr, struct.pack("256s", name.encode()))[20:24] == wanted:
                    return name
    raise UserError(f"MASTER_ADDR: no network interface of this node has the address {address}")


# ---- point to point ------------------------------------------------------------------------------------------------


class _Task:
    """A running operation, like Paddle's own tasks."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: Exception | None = None

    def finish(self, error: Exception | None = None) -> None:
        self._error = error
        self._done.set()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self, *_: Any) -> bool:
        if not self._done.is_set():
            with waiting("a neighbouring stage's message"):
                self._done.wait()
        if self._error is not None:
            raise self._error
        return True

    synchronize = wait


def _finished() -> _Task:
    task = _Task()
    task.finish()
    return task


class _Worker:
    """Runs the transfers of one group in order."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Any, _Task] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        atexit.register(self._stop)

    def submit(self, transfer: Any) -> _Task:
        task = _Task()
        self._jobs.put((transfer, task))
        return task

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            transfer, task = job
            try:
                transfer().wait()
                task.finish()
            except Exception as error:  # raised where the task is waited for
                task.finish(error)
            del job, transfer

    def _stop(self) -> None:
        self._jobs.put(None)
        self._thread.join(timeout=1)


_workers: dict[int, _Worker] = {}


def _worker(group: Any) -> _Worker:
    if id(group) not in _workers:
        _workers[id(group)] = _Worker()
    return _workers[id(group)]


def _send(group: Any, tensor: Any, target: int, sync_op: bool = True) -> _Task:
    return _worker(group).submit(partial(group.blocking_send, tensor.detach(), target, True))


def _receive(group: Any, tensor: Any, source: int, sync_op: bool = True) -> _Task:
    return _worker(group).submit(partial(group.blocking_recv, tensor, source, True))


# ---- collectives -----------------------------------------------------------------------------------------------------


def _all_reduce(group: Any, tensor: Any, op: Any, sync_op: bool = True) -> Any:
    if tensor.dtype != paddle.float16:
        return group.native_all_reduce(tensor, op, sync_op)
    whole = tensor.detach().astype("float32")  # gloo's own fp16 arithmetic gives wrong numbers
    group.native_all_reduce(whole, op, True).wait()
    paddle.assign(whole.astype(tensor.dtype), output=tensor)
    return _finished()


def _reduce_scatter_tensor(group: Any, out: Any, tensor: Any, op: Any, sync_op: bool = True) -> _Task:
    """Reduces in place, like other backends: a copy would be as large as all gradients of a layer."""
    whole = tensor.detach()
    group.all_reduce(whole, op, True).wait()
    rows = whole.shape[0] // group.size()
    paddle.assign(whole[group.rank() * rows : (group.rank() + 1) * rows].reshape(out.shape), output=out)
    return _finished()


class SentRows(list[int]):
    """Rows that a rank sends to each rank of its group, in Paddle's form, and the rows that others send: gloo would
    exchange them."""

    def __init__(self, rows: Sequence[Sequence[int]], rank: int):
        super().__init__(rows[rank])
        self.of_all = np.array(rows)


def _all_to_all_single(
    group: Any, out: Any, tensor: Any, out_sizes: list[int], in_sizes: SentRows | list[int], sync_op: bool = True
) -> _Task:
    """Every rank gathers everything and keeps its own rows: correct, not fast."""
    size, rank = group.size(), group.rank()
    width = tensor.shape[1:]
    if not isinstance(in_sizes, SentRows):
        everything = paddle.empty([size * tensor.shape[0], *width], tensor.dtype)
        group.all_gather(tensor.detach(), everything).wait()
        by_rank = everything.reshape([size, size, tensor.shape[0] // size, *width])
        paddle.assign(by_rank[:, rank].reshape(out.shape), output=out)
        return _finished()
    sizes = in_sizes.of_all
    longest = int(sizes.sum(axis=1).max())
    padded = tensor.detach()
    if tensor.shape[0] < longest:
        padded = paddle.zeros([longest, *width], tensor.dtype)
        padded[: tensor.shape[0]] = tensor.detach()
    rows = paddle.empty([size * longest, *width], tensor.dtype)
    group.all_gather(padded, rows).wait()
    starts = sizes[:, :rank].sum(axis=1)
    parts = [
        rows[source * longest + int(starts[source]) : source * longest + int(starts[source] + sizes[source, rank])]
        for source in range(size)
    ]
    paddle.assign(paddle.concat(parts).reshape(out.shape), output=out)
    return _finished()


def set_gloo_limit(group: Any, limit_s: float) -> None:
    """Set the timeout of a gloo group."""
    with suppress(AttributeError), _memory() as word:
        communicator = ctypes.CDLL(base.libpaddle.__file__)[COMMUNICATOR]
        communicator.restype, communicator.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        gloo = _gloo()
        behind_class = ctypes.addressof(ctypes.c_char.in_dll(gloo, CLASS)) + 16
        start = communicator(word(id(group) + HELD))
        for address in {word(start + 8 * index) for index in range(WORDS)}:
            if word(address) == behind_class:
                gloo[SET_TIMEOUT](ctypes.c_void_p(address), ctypes.c_int64(round(1000 * limit_s)))


def _gloo() -> ctypes.CDLL:
    """Raises AttributeError."""
    folder = Path(base.libpaddle.__file__).parents[1]
    for library in (ctypes.CDLL(str(folder / name)) for name in GLOO_IN if (folder / name).exists()):
        if hasattr(library, SET_TIMEOUT):
            return library
    raise AttributeError(SET_TIMEOUT)


@contextmanager
def _memory() -> Iterator[Callable[[int], int]]:
    """Returns a reader of the 8 bytes at an address; it gives 0 for unmapped memory."""
    handle = os.open("/proc/self/mem", os.O_RDONLY)

    def word(address: int) -> int:
        with suppress(OSError, OverflowError, struct.error):
            return int(struct.unpack("=Q", os.pread(handle, 8, address))[0])
        return 0

    try:
        yield word
    finally:
        os.close(handle)
