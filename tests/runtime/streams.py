"""Simulates how GPUs would run the calls of ranks: queues of work, and who waits for whom.

A GPU has a queue for computation and one for each direction of each communicator. A call returns when its work is
queued; a message starts when both ranks have come to it, and a device's queues wait where a call made them. A copy
between host and device, or the reading of a value, is different: it waits for all queues of its device, all of them
wait for it, and the host waits, too (CUDA's legacy default stream, which Paddle's copies use).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paddlenlp_galvatron.plan.precision import NumberTypes

COMPUTE, HOST = "compute", "host"


@dataclass(frozen=True)
class Call:
    """Calls of a host to its device, in order."""

    kind: str  # compute, send, receive, wait (for a message, before the next computation), host (traffic with it)
    name: str = ""  # of a pass, for its time; of the communicator and direction, for a message or its wait
    number: int = 0  # of the message on it


@dataclass(eq=False)
class Work:
    """An entry of a queue."""

    after: list[Work]
    ms: float = 0.0
    pair: tuple[str, int] | None = None  # of a message: both sides have it
    queued_ms: float = 0.0
    followers: list[Work] = field(default_factory=list)
    in_front: Work | None = None  # the entry before it in the same connection
    begin: float | None = None
    end: float | None = None


@dataclass
class Device:
    """A rank and its device."""

    calls: Sequence[Call]
    next: int = 0
    host_ms: float = 0.0
    blocked: Work | None = None
    queues: dict[str, Work] = field(default_factory=dict)  # the last work of each
    barrier: Work | None = None  # of traffic with the host
    connection: Work | None = None  # the last work, where all queues share one
    messages: dict[tuple[str, int], Work] = field(default_factory=dict)


def replay(
    programs: Sequence[Sequence[Call]], time_ms: Callable[[str], float], one_connection: bool = False
) -> float | None:
    """When the last of the ranks is done, in ms, each pass taking `time_ms`; None where they wait for ever.

    `one_connection`: all queues reach the device through one, where work begins in the order of the calls
    (CUDA_DEVICE_MAX_CONNECTIONS=1). Where there are more queues than connections some share one, which orders less.
    """
    devices = [Device(program) for program in programs]
    sides: dict[tuple[str, int], list[Work]] = {}

    def queue(device: Device, name: str, work: Work) -> None:
        work.after += [*device.queues.values()] if name == HOST else [w for w in [device.queues.get(name)] if w]
        work.after += [device.barrier] if device.barrier and device.barrier is not work else []
        work.queued_ms = device.host_ms
        device.queues[name] = work
        if one_connection and name != HOST:
            work.in_front, device.connection = device.connection, work
        for before in [*work.after, *([work.in_front] if work.in_front else [])]:
            before.followers.append(work)
        settle([work])

    def issue(device: Device, call: Call) -> None:
        computed = [work for work in [device.queues.get(COMPUTE)] if work]
        key = (call.name, call.number)
        if call.kind == COMPUTE:
            queue(device, COMPUTE, Work([], time_ms(call.name)))
        elif call.kind == "wait":
            queue(device, COMPUTE, Work([device.messages[key]]))
        elif call.kind == HOST:
            device.blocked = device.barrier = Work([])
            queue(device, HOST, device.blocked)
        else:
            device.messages[key] = Work(computed, pair=key)
            sides.setdefault(key, []).append(device.messages[key])
            queue(device, f"{call.kind} {call.name}", device.messages[key])

    def settle(works: list[Work]) -> None:
        """Start and end all work that can, and then the work behind it."""
        while works:
            work = works.pop()
            in_front = [work.in_front.begin] if work.in_front else []
            before = [one.end for one in work.after] + in_front
            if work.begin is None and None not in before:
                work.begin = max([work.queued_ms, *(ms for ms in before if ms is not None)])
                works += work.followers
            both = sides[work.pair] if work.pair else [work]
            begun = [side.begin for side in both if side.begin is not None]
            if work.end is None and len(begun) == (2 if work.pair else 1):
                for side in both:
                    side.end = max(begun) + side.ms
                    works += side.followers

    progress = True
    while progress:
        progress = False
        for device in devices:
            while device.next < len(device.calls) and not (device.blocked and device.blocked.end is None):
                if device.blocked and device.blocked.end is not None:
                    device.host_ms, device.blocked = max(device.host_ms, device.blocked.end), None
                issue(device, device.calls[device.next])
                device.next += 1
                progress = True
    last = [work.end for device in devices for work in device.queues.values()]
    if any(end is None for end in last) or any(device.next < len(device.calls) for device in devices):
        return None
    return max(end for end in last if end is not None)


class Memory:
    """A device's, as an allocator has it that gives nothing back: it asks the device for missing memory, which waits
    for all queues. Tensors of a pass, of a micro-batch in flight, and messages that are received take one each."""

    def __init__(self, traffic: Callable[[], None]):
        self._traffic = traffic
        self.held = self.peak = self.taken = 0

    def hold(self, more: int) -> None:
        self.held += more
        self.peak = max(self.peak, self.held)
        self._reach(self.held)

    def reserve(self, more: float, spare: float) -> None:
        self._traffic()
        self._reach(self.held + more + spare)

    def _reach(self, wanted: float) -> None:
        if wanted > self.taken:
            self.taken = wanted
            self._traffic()


class Recorder:
    """Stands for a rank's stage and for `paddle.distributed`, and writes down the pipeline's calls."""

    def __init__(self, index: int, stages: int, chunks: int = 1):
        import paddle

        self.index, self.is_first, self.is_last, self.has_mtp = index, index == 0, index == stages - 1, False
        self.boundary_shape, self.calls = [1, 1], []
        self.numbers = NumberTypes.of()
        self.chains = [type("Chain", (), {"last_backward": False})() for _ in range(chunks)]
        self.load = type("Load", (), {"padding": type("Padding", (), {"fills": True})()})
        does_nothing = dict.fromkeys(("fetch_ahead", "next_backward", "reserve"), lambda *_: None)
        self.window = type("Window", (), does_nothing)()
        self.memory = Memory(self.traffic)
        self._numbers: dict[str, int] = {}
        self._weight = paddle.ones([1, 1])
        self._weight.stop_gradient = False

    # ---- a stage ---------------------------------------------------------------------------------------------------

    def forward(self, x: Any, ids: Any, labels: Any, chunk: int = 0, ends: Any = None, pairs: Any = None) -> Any:
        self.memory.hold(2)  # one while the pass runs, one until its backward
        self.calls.append(Call("compute", "forward"))
        self.memory.hold(-1)
        out = self._weight * (1.0 if x is None else x)
        return out.sum() if self.is_last and chunk == len(self.chains) - 1 else out

    def expect_gradient(self, scale: float) -> None:
        """The head computes gradients next to losses: in the same pass."""

    def take(self, tokens: Any) -> list[None]:
        self.traffic()
        return [None] * len(tokens)

    def accumulate_gradients(self) -> None:
        self.memory.hold(1)
        self.calls.append(Call("compute", "backward"))
        self.memory.hold(-2)

    # ---- communication -----------------------------------------------------------------------------------------------

    def isend(self, tensor: Any, peer: int, group: Any) -> Any:
        return self._message("send", group)

    def irecv(self, tensor: Any, peer: int, group: Any) -> Any:
        tensor.fill_(1.0)
        return self._message("receive", group)

    def traffic(self, *_: Any, **__: Any) -> None:
        self.calls.append(Call(HOST))

    def _message(self, kind: str, group: Any) -> Any:
        number = self._numbers[group.name] = self._numbers.get(group.name, -1) + 1
        self.calls.append(Call(kind, group.name, number))
        recorder = self

        class Task:
            def is_completed(self) -> bool:
                return False

            def wait(self) -> bool:
                recorder.calls.append(Call("wait", group.name, number))
                return True

        return Task()
