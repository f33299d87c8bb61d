"""A communication backend that does all as late as it may, and minds the rules that GPUs punish by wrong numbers.

`install()` puts it in the place of the calls that the runtime makes of `paddle.distributed`:

- an operation that is started is not done until it is waited for, or at a moment that a seed draws;
- its output holds NaN (bytes 0xFF) until it has been waited for, and may not be written to meanwhile;
- its input may be neither freed nor written to meanwhile;
- the calls on a group are compared across ranks, one by one: kind, type, size;
- allocated memory holds freed content, as an allocator's blocks do that are handed out again: NaN;
- work on the compute stream is done when the call returns, and is requested as such;
- nobody waits for all work of the device while a receive is posted, which may need a message yet to be sent;
- a group's first use is in `Groups.create`, by a call of the kind that is made of it later;
- `finish()` fails where something was started that nobody waited for.

Ranks exchange files in one folder. A rank that waits does the operation it waits for, and then, if that takes others,
all that it has started: on a GPU, too, a queue that waits keeps no other from continuing.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import ml_dtypes
import numpy as np
import paddle
import paddle.distributed as dist

from paddlenlp_galvatron.runtime import device
from paddlenlp_galvatron.runtime.groups import Groups

LIMIT_S = 60.0  # of a wait
PATIENCE_S = 0.003  # in which the other ranks may have come already
TURN_S = 0.0005
EARLY = 0.2  # share of the calls at which something that was started before is done
P2P, EXCHANGE, COLLECTIVE = "message", "all_to_all", "collective"  # kinds that NCCL connects for at first use
DTYPES = {
    paddle.float32: np.dtype(np.float32),
    paddle.float64: np.dtype(np.float64),
    paddle.float16: np.dtype(np.float16),
    paddle.bfloat16: np.dtype(ml_dtypes.bfloat16),
    paddle.int64: np.dtype(np.int64),
    paddle.int32: np.dtype(np.int32),
    paddle.uint8: np.dtype(np.uint8),  # of objects
}


class BrokenRule(AssertionError):
    """The runtime broke a rule of GPUs."""


def memory(tensor: Any) -> np.ndarray:
    """The tensor's own bytes, flat. Not through Paddle: nothing is copied and no version counted."""
    if not tensor.is_contiguous():
        raise BrokenRule(f"a tensor that is not contiguous: {tensor.shape}, strides {tensor.strides}")
    size = tensor.size * tensor.element_size()
    kind = ctypes.c_uint8 * size
    return np.frombuffer(kind.from_address(tensor.data_ptr()), np.uint8) if size else np.empty(0, np.uint8)


def as_used_before(allocate: Callable[..., Any]) -> Callable[..., Any]:
    """The same, but of memory that something else had: nothing may be read that was not written."""

    def allocated(*arguments: Any, **named: Any) -> Any:
        tensor = allocate(*arguments, **named)
        memory(tensor)[:] = 0xFF
        return tensor

    return allocated


class Held:
    """A tensor that an operation reads (`reads`) or writes. `kept`: bytes of the output that are the input, too."""

    def __init__(self, tensor: Any, reads: bool, kept: slice = slice(0)):
        self._tensor = weakref.ref(tensor)
        self._role = "an input" if reads else "the output"
        if not reads:
            before = memory(tensor)[kept].copy()
            memory(tensor)[:] = 0xFF
            memory(tensor)[kept] = before
        self._sum = crc32(memory(tensor))

    def bytes(self, what: str) -> np.ndarray:
        tensor = self._tensor()
        if tensor is None:
            raise BrokenRule(f"{what}: {self._role} was freed before it was waited for")
        found = memory(tensor)
        if crc32(found) != self._sum:
            raise BrokenRule(f"{what}: {self._role} was written to meanwhile")
        return found


def _own_place(tensor: Any, out: Any, group: Any) -> slice:
    """Where in the output of a gather in place its input lies: where NCCL wants it, at the rank's own place."""
    size, offset = memory(tensor).size, tensor.data_ptr() - out.data_ptr()
    if not 0 <= offset < memory(out).size:
        return slice(0)
    if offset != group.rank * size:
        raise BrokenRule(f"a gather's input lies at byte {offset} of its output, not at {group.rank * size}")
    return slice(offset, offset + size)


class Task:
    """As Paddle's tasks are."""

    def __init__(self, backend: Backend, group: Any, kind: str, header: dict[str, Any], peers: Sequence[int]):
        self.backend, self.group, self.peers = backend, group, peers
        self.number = backend.numbers[group.id]
        backend.numbers[group.id] += 1
        self.header = header | {"kind": kind}
        self.what = f"{kind} {self.number} of group {group.id} {group.ranks} on rank {backend.rank}"
        self.input: Held | None = None
        self.output: Held | None = None
        self.dtype: np.dtype = np.dtype(np.uint8)
        self.mine: np.ndarray | None = None  # in-place: the input, as the tensor is overwritten
        self.compute: Callable[[list[tuple[dict[str, Any], np.ndarray]]], np.ndarray] | None = None
        self.given = self.done = False

    def give(self) -> None:
        """Give the others this rank's contribution. A device reads its input now."""
        if self.given:
            return
        self.given = True
        if self.input is not None and self.mine is None:
            self.mine = self.input.bytes(self.what).copy()
        if self.compute is None and self.mine is None:
            return
        content = json.dumps(self.header).encode() + b"\n" + (b"" if self.mine is None else self.mine.tobytes())
        for peer in self.peers:
            self.backend.post(self.group, self.number, peer, content)

    def is_completed(self) -> bool:
        if self.given and self.compute is None:  # a message that has left
            self._end()
        return self.done

    def _end(self) -> None:
        self.done = True
        self.backend.under_way.discard(self)

    def wait(self, *_: Any) -> bool:
        if self.done:
            return True
        self.backend.do(self)
        if self.compute is not None:
            contributions = self.backend.collect(self)
            if self.input is not None:
                self.input.bytes(self.what)
            assert self.output is not None
            out = self.output.bytes(self.what)
            out[:] = np.ascontiguousarray(self.compute(contributions)).view(np.uint8).ravel()
        self._end()
        return True

    synchronize = wait


class Backend:
    """The rules of one rank."""

    def __init__(self, folder: Path, rank: int, seed: int):
        self.folder, self.rank = folder, rank
        self.numbers: defaultdict[int, int] = defaultdict(int)  # calls so far, by group
        self.queues: defaultdict[int, deque[Task]] = defaultdict(deque)  # not yet given, by group
        self.under_way: set[Task] = set()
        self.first_uses: set[tuple[int, str]] = set()
        self.log: defaultdict[int, list[str]] = defaultdict(list)
        self.warming_up = False
        self._random = random.Random(f"{seed}/{rank}")

    # ---- functions that the runtime calls ------------------------------------------------------------------------

    def all_reduce(
        self, tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, sync_op: bool = True, **how: bool
    ) -> Task | None:
        group = group or dist.get_group(0)
        if group.rank < 0:  # as Paddle: who is no member does nothing
            return None
        task = self._task(group, COLLECTIVE, "all_reduce", tensor, extra={"op": int(op)})
        before = memory(tensor).copy()
        task.mine, task.output = before, Held(tensor, reads=False)

        def compute(parts: list[tuple[dict[str, Any], np.ndarray]]) -> np.ndarray:
            arrays = [part.view(task.dtype) for _, part in parts]
            wide = [array.astype(np.float32) if array.dtype.itemsize == 2 else array for array in arrays]
            if int(op) not in (int(dist.ReduceOp.SUM), int(dist.ReduceOp.MAX)):
                raise BrokenRule(f"{task.what}: an operator that is not known here")
            total = np.maximum.reduce(wide) if int(op) == int(dist.ReduceOp.MAX) else np.add.reduce(wide)
            return total.astype(task.dtype)

        return self._started(task, compute, sync_op, **how)

    def all_gather(self, out: Any, tensor: Any, group: Any = None, sync_op: bool = True, **how: bool) -> Task:
        group = group or dist.get_group(0)
        if isinstance(out, list):  # of one tensor a rank, as Paddle's gather of objects gives
            joined = paddle.empty([len(group.ranks), *tensor.shape], tensor.dtype)
            task = self.all_gather(joined, tensor, group)
            out += joined.unbind()
            return task
        task = self._task(group, COLLECTIVE, "all_gather", tensor)
        self._require(task, out.size == tensor.size * len(group.ranks))
        task.input, task.output = Held(tensor, reads=True), Held(out, reads=False, kept=_own_place(tensor, out, group))
        return self._started(task, lambda parts: np.concatenate([part for _, part in parts]), sync_op, **how)

    def reduce_scatter(
        self, out: Any, tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, sync_op: bool = True, **how: bool
    ) -> Task:
        task = self._task(group, COLLECTIVE, "reduce_scatter", tensor)
        self._require(task, out.size * len(group.ranks) == tensor.size and int(op) == int(dist.ReduceOp.SUM))
        task.input, task.output = Held(tensor, reads=True), Held(out, reads=False)

        def compute(parts: list[tuple[dict[str, Any], np.ndarray]]) -> np.ndarray:
            arrays = [part.view(task.dtype).reshape(len(group.ranks), -1)[group.rank] for _, part in parts]
            return np.add.reduce([array.astype(np.float32) for array in arrays]).astype(task.dtype)

        return self._started(task, compute, sync_op, **how)

    def all_to_all(
        self,
        out: Any,
        tensor: Any,
        out_split_sizes: list[int] | None = None,
        in_split_sizes: list[int] | None = None,
        group: Any = None,
        sync_op: bool = True,
        **how: bool,
    ) -> Task:
        count = len(group.ranks)
        send = in_split_sizes or [tensor.shape[0] // count] * count
        receive = out_split_sizes or [out.shape[0] // count] * count
        row = int(np.prod(tensor.shape[1:])) * tensor.element_size()
        extra = {"send": send, "row": row, "elements": None}
        task = self._task(group, EXCHANGE, "all_to_all", tensor, extra)
        self._require(task, sum(send) == tensor.shape[0] and sum(receive) == out.shape[0])
        task.input, task.output = Held(tensor, reads=True), Held(out, reads=False)

        def compute(parts: list[tuple[dict[str, Any], np.ndarray]]) -> np.ndarray:
            mine = []
            for (header, part), rows in zip(parts, receive, strict=True):
                first = sum(header["send"][: group.rank])
                self._require(task, header["send"][group.rank] == rows and header["row"] == row)
                mine.append(part[first * row : (first + rows) * row])
            return np.concatenate(mine)

        return self._started(task, compute, sync_op, **how)

    def send(self, tensor: Any, peer: int, group: Any) -> Task:
        task = self._task(group, P2P, "message", tensor, peers=[peer])
        task.input = Held(tensor, reads=True)
        return self._started(task, None, sync_op=False)

    def receive(self, buffer: Any, peer: int, group: Any) -> Task:
        task = self._task(group, P2P, "message", buffer, peers=[peer])
        task.output = Held(buffer, reads=False)
        task.given = True  # nothing to give
        return self._started(task, lambda parts: parts[0][1], sync_op=False)

    # ---- how it is done ------------------------------------------------------------------------------------------

    def _task(
        self,
        group: Any,
        use: str,
        kind: str,
        tensor: Any,
        extra: dict[str, Any] | None = None,
        peers: Sequence[int] | None = None,
    ) -> Task:
        others = [rank for rank in group.ranks if rank != self.rank] if peers is None else peers
        header = {"dtype": str(tensor.dtype), "elements": tensor.size} | (extra or {})
        task = Task(self, group, kind, header, others)
        task.dtype = DTYPES[tensor.dtype]
        if self.warming_up:
            self.first_uses.add((group.id, use))
        elif (group.id, use) not in self.first_uses:
            raise BrokenRule(f"{task.what}: the first {use} of this group, outside Groups.create")
        self.log[group.id].append(kind)
        return task

    def _require(self, task: Task, holds: bool) -> None:
        if not holds:
            raise BrokenRule(f"{task.what}: sizes do not fit together")

    def _started(self, task: Task, compute: Any, sync_op: bool, use_calc_stream: bool = False) -> Task:
        if use_calc_stream and not sync_op:
            raise BrokenRule(f"{task.what}: on the compute stream, but not as sync_op")
        task.compute = compute
        self.under_way.add(task)
        self.queues[task.group.id].append(task)
        if sync_op:
            task.wait()
        if self._random.random() < EARLY:
            self._give_all(self._random.choice([*self.queues]))
        return task

    def do(self, task: Task) -> None:
        """Give a task and what stands before it on its group."""
        queue = self.queues[task.group.id]
        while task in queue:
            queue.popleft().give()

    def _give_all(self, group: int) -> None:
        while self.queues[group]:
            self.queues[group].popleft().give()

    def post(self, group: Any, number: int, peer: int, content: bytes) -> None:
        path = self.folder / f"{group.id}.{number}.{self.rank}.{peer}"
        part = path.with_name(f"{path.name}.part")
        part.write_bytes(content)
        part.rename(path)

    def collect(self, task: Task) -> list[tuple[dict[str, Any], np.ndarray]]:
        """The contributions of each rank of the group, in the order of ranks; of a message the sender's alone."""
        begun = time.monotonic()
        found: dict[int, bytes] = {}
        while missing := [peer for peer in task.peers if peer not in found]:
            for peer in missing:
                path = self.folder / f"{task.group.id}.{task.number}.{peer}.{self.rank}"
                if path.exists():
                    found[peer] = path.read_bytes()
                    path.unlink()
            waited = time.monotonic() - begun
            if waited > PATIENCE_S:
                for group in list(self.queues):
                    self._give_all(group)
            if waited > LIMIT_S:
                raise BrokenRule(f"{task.what}: ranks {missing} did not come within {LIMIT_S:.0f} s")
            if len(found) < len(task.peers):
                time.sleep(max(TURN_S, waited / 4))
        parts = {peer: self._part(task, peer, content) for peer, content in found.items()}
        if task.mine is not None:
            parts[self.rank] = task.header, task.mine
        return [parts[rank] for rank in sorted(parts, key=task.group.ranks.index)]

    def _part(self, task: Task, peer: int, content: bytes) -> tuple[dict[str, Any], np.ndarray]:
        line, _, rest = content.partition(b"\n")
        header = json.loads(line)
        same = ("kind", "dtype", "elements", "op")
        theirs, ours = ([reported.get(name) for name in same] for reported in (header, task.header))
        if theirs != ours:
            raise BrokenRule(f"{task.what}: {ours} here, but rank {peer} calls {theirs}")
        return header, np.frombuffer(rest, np.uint8)

    def synchronize(self, *_: Any) -> None:
        """In place of a call that waits for all streams of a device."""
        if posted := [task.what for task in self.under_way if task.output is not None and task.header["kind"] == P2P]:
            raise BrokenRule(f"the device is waited for while {posted[0]} is posted")

    def finish(self) -> None:
        """Nothing may be under way, and all ranks must have called the same on each group."""
        if self.under_way:
            raise BrokenRule(f"never waited for: {sorted(task.what for task in self.under_way)[:5]}")
        (self.folder / f"log.{self.rank}").write_text(json.dumps(self.log))


def install(folder: Path, seed: int) -> Backend:
    """Before groups are made."""
    backend = Backend(folder, int(os.environ["PADDLE_TRAINER_ID"]), seed)
    dist.stream.all_reduce, dist.stream.all_gather = backend.all_reduce, backend.all_gather
    dist.stream.reduce_scatter, dist.stream.alltoall_single = backend.reduce_scatter, backend.all_to_all
    dist.isend, dist.irecv = backend.send, backend.receive
    device.synchronize = device.release = device.reserve = backend.synchronize  # type: ignore[assignment]
    paddle.empty, paddle.empty_like = as_used_before(paddle.empty), as_used_before(paddle.empty_like)
    create = Groups.create

    def warm_up(groups: Groups, *arguments: Any, **named: Any) -> None:
        backend.warming_up = True
        create(groups, *arguments, **named)
        backend.warming_up = False

    Groups.create = warm_up  # type: ignore[method-assign]
    return backend


def require_same_calls(folder: Path, world_size: int) -> None:
    """After a launch: no message was left unread, and the ranks of each group called the same in the same order."""
    logs = [json.loads((folder / f"log.{rank}").read_text()) for rank in range(world_size)]
    for group in {group for log in logs for group in log}:
        called = {tuple(log[group]) for log in logs if group in log}
        assert len(called) == 1, f"group {group}: {[len(calls) for calls in called]} calls"
    unread = [path.name for path in folder.iterdir() if not path.name.startswith("log.")]
    assert not unread, f"messages that nobody read: {unread[:5]}"
