"""The runtime's calls to a GPU, on a simulated one: its compute stream runs a call when it is
allowed to, and not before."""

import gc
import weakref
from collections.abc import Callable

import pytest

pytest.importorskip("paddle")

import paddle

from paddlenlp_galvatron.measure.stopwatch import Clock
from paddlenlp_galvatron.runtime import device, paddle_private

PINNED = object()


class Queue:
    """The device's queued work, in order, and the device's own time."""

    def __init__(self):
        self.waiting: list[Callable[[], None]] = []
        self.ms = 0.0

    def give(self, work: Callable[[], None]) -> None:
        self.waiting.append(work)

    def compute(self, ms: float) -> None:
        def work():
            self.ms += ms

        self.give(work)

    def go_on(self, count: int | None = None) -> None:
        """Let the device do the next things, or all."""
        for _ in range(len(self.waiting) if count is None else count):
            self.waiting.pop(0)()


class Host:
    """Numbers in page-locked memory, which the device reads when it comes to the copy."""

    def __init__(self, queue: Queue, numbers):
        self.queue, self.numbers = queue, numbers

    def cuda(self, blocking=True):
        assert not blocking, "a copy that blocks waits for all queues, messages included"
        lent, copied = weakref.ref(self), []
        self.queue.give(lambda: copied.append(lent().numbers))
        return copied

    def numpy(self):
        assert not self.queue.waiting, "read before the device has copied it"
        return self.numbers


@pytest.fixture
def queue(monkeypatch):
    queue = Queue()

    class Event:
        """As Paddle's class for CUDA."""

        def __init__(self, enable_timing=False, blocking=False, interprocess=False):
            self.timed, self.ms = enable_timing, None

        def record(self, stream=None):
            def come():
                self.ms = queue.ms

            queue.give(come)

        def query(self):
            return self.ms is not None

        def elapsed_time(self, end):
            assert self.timed and end.timed, "an event without timing has no time"
            assert end.query(), "an event is read that the device has not come to"
            return end.ms - self.ms

    def to_tensor(numbers, place=None):
        assert place is PINNED
        return Host(queue, numbers)

    monkeypatch.setattr(paddle.device.cuda, "Event", Event)
    monkeypatch.setattr(paddle, "CUDAPinnedPlace", lambda: PINNED)
    monkeypatch.setattr(paddle, "to_tensor", to_tensor)
    monkeypatch.setattr(paddle.device, "synchronize", queue.go_on)
    current = type("Stream", (), {"synchronize": staticmethod(queue.go_on)})
    monkeypatch.setattr(paddle.device, "current_stream", lambda: current)
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    monkeypatch.setattr(device, "_staged", type(device._staged)(maxlen=device._staged.maxlen))
    return queue


def test_a_mark_is_come_to_when_all_before_it_is_done(queue):
    queue.compute(2.0)
    mark = device.Mark()
    queue.compute(1.0)
    assert not mark.is_completed()
    queue.go_on(1)
    assert not mark.is_completed()
    queue.go_on(1)
    assert mark.is_completed() and queue.waiting


def test_samples_are_in_the_devices_ms_whatever_the_host_does(queue):
    clock = Clock()
    clock.start()
    for ms in (3.0, 5.0):
        queue.compute(ms)
        clock.sample()
    assert len(queue.waiting) == 5  # nothing was waited for
    assert clock.samples_ms()[:, 0].tolist() == [3.0, 5.0]


@pytest.mark.parametrize("copies", [3, 20])
def test_numbers_stay_until_the_device_has_copied_them_however_many_there_are(queue, copies):
    tensors = [device.to_device([number]) for number in range(copies)]
    gc.collect()
    queue.go_on()
    assert tensors == [[[number]] for number in range(copies)]


def test_numbers_that_were_copied_do_not_stay(queue):
    for number in range(20):
        device.to_device([number])
        queue.go_on()
    assert len(device._staged) == 1


def test_a_copy_to_the_host_waits_for_what_is_computed(queue, monkeypatch):
    def copy_later(tensor, place):
        assert place is PINNED
        queue.give(lambda: None)
        return Host(queue, tensor)

    monkeypatch.setattr(paddle_private, "copy_later", copy_later)
    monkeypatch.setattr(device, "on_device", lambda tensor: True)
    queue.compute(1.0)
    assert device.to_host([1.0]) == [1.0] and queue.ms == 1.0


def test_what_a_step_needs_is_taken_without_the_spare_where_there_is_not_as_much(monkeypatch):
    taken = []

    def empty(shape, dtype):
        if shape[0] > 3 * device.MIB:
            raise RuntimeError("Out of memory error on GPU 0.")
        taken.append(shape[0] / device.MIB)

    monkeypatch.setattr(device, "on_gpu", lambda: True)
    monkeypatch.setattr(paddle.device.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(paddle, "empty", empty)
    device.reserve(2.0, 1.0)
    device.reserve(2.0, 1.5)
    assert taken == [3.0, 2.0]
    with pytest.raises(RuntimeError, match="Out of memory"):
        device.reserve(4.0, 0.0)
