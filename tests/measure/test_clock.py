"""Samples and the overlap coefficient on a GPU that does not exist: its queues and events are numbers here."""

import time

import numpy as np
import pytest

pytest.importorskip("paddle")

import paddle

from paddlenlp_galvatron.measure import computation, messages
from paddlenlp_galvatron.measure.computation import ComputationProfiler, computation_profile
from paddlenlp_galvatron.measure.journal import Journal
from paddlenlp_galvatron.measure.part import FakeGroups
from paddlenlp_galvatron.measure.stopwatch import MIN_SAMPLES, SERIES, Clock, Stopwatch, Timing
from paddlenlp_galvatron.plan import Precision
from paddlenlp_galvatron.profiles import Collective, ComputationProfile, Meta, Shape
from paddlenlp_galvatron.profiles.compute_time import ComputeTimes
from paddlenlp_galvatron.runtime import device, grouped


class Queue:
    """A device's stream: when its queue will be done, in its own ms, and how often the host waited for it."""

    def __init__(self):
        self.done_ms, self.waits, self.first = 0.0, 0, True

    def work(self, ms: float, first_ms: float | None = None) -> None:
        """Returns at once. `first_ms`: the first time, which loads kernels."""
        self.done_ms += first_ms if self.first and first_ms else ms
        self.first = False

    def wait(self) -> None:
        self.waits += 1


@pytest.fixture
def queue(monkeypatch):
    queue = Queue()

    class Event:
        """As Paddle's class for CUDA: made with timing or not, recorded in the current queue, ms as a float."""

        def __init__(self, enable_timing=False, blocking=False, interprocess=False):
            assert enable_timing, "an event without timing has no time"

        def record(self, stream=None):
            self.ms = queue.done_ms

        def elapsed_time(self, end):
            assert queue.waits, "an event is read that the device may not have come to"
            return end.ms - self.ms

    monkeypatch.setattr(paddle.device.cuda, "Event", Event)
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    monkeypatch.setattr(device, "synchronize", queue.wait)
    return queue


def test_laps_are_the_devices_and_the_host_waits_once_a_series(queue):
    watch = Clock()
    watch.start()
    for ms in (3.0, 5.0, 7.0):
        queue.work(ms)
        time.sleep(0.01)  # launching, which is hidden behind queued work
        watch.sample()
    assert queue.waits == 0
    assert watch.samples_ms()[:, 0].tolist() == [3.0, 5.0, 7.0]
    assert queue.waits == 1


def test_on_cpu_laps_are_the_hosts():
    watch = Clock()
    watch.start()
    time.sleep(0.02)
    watch.sample()
    [(wall_ms, processor_ms)] = watch.samples_ms()
    assert wall_ms >= 20 > processor_ms


def test_a_cold_lap_neither_counts_nor_says_how_many_follow(queue):
    stopwatch = Stopwatch(1, budget_ms=100)
    laps = stopwatch.time_independent(lambda: queue.work(5.0, first_ms=5000.0))
    assert len(laps) == 20 > MIN_SAMPLES
    assert np.all(laps == 5.0)
    queue.first = True
    together = stopwatch.time_collective(lambda: queue.work(5.0, first_ms=5000.0))
    assert len(together) >= 16 and np.all(together == 5.0)


def test_on_gpus_the_launch_of_a_layer_is_measured_on_one_that_takes_the_device_no_time(queue, shape, monkeypatch):
    asked = []

    class Part:
        """The host takes 2 µs for each token that there is, and 300 for each layer, backward twice that."""

        def __init__(self, shape, assumed, samples, extent, strategy):
            asked.append((shape.hidden_size, samples * assumed.seq_length))
            self.ms = 0.002 * assumed.seq_length + 0.3 * extent.layers
            self.again = self.ms if strategy.recompute else 0.0

        def forward(self):
            queue.work(self.ms)

        def backward(self):
            queue.work(2 * self.ms + self.again)

    monkeypatch.setattr(computation, "MeasuredPart", Part)
    profiler = ComputationProfiler([shape], Stopwatch(1, budget_ms=1), Journal())
    turn = profiler._launch()
    assert set(asked) == {(computation.NARROW["hidden_size"], computation.NARROW_TOKENS)}
    profiler.journal.get(computation.LAUNCH, lambda: turn)
    launch = computation_profile(profiler.journal, [shape], Precision.BF16, Meta()).launch
    assert (launch.forward_ms, launch.backward_ms) == pytest.approx((0.3, 0.6))
    assert launch.recompute_ms == pytest.approx(0.3, abs=0.05)


@pytest.mark.parametrize("kind", messages.STARTED)
def test_every_kind_runs_beside_work_in_the_types_of_training(kind, monkeypatch):
    monkeypatch.setattr(messages, "ALONE_MS", 1.0)
    asked = (Stopwatch(1), 0, (0, 1), FakeGroups(), kind, Precision.BF16, 2)
    assert messages.overlap_coefficient(*asked) >= 1


def test_on_gpus_every_kind_and_rank_takes_part_and_none_is_pinned(queue, monkeypatch):
    moved = []
    monkeypatch.setattr("paddlenlp_galvatron.runtime.device.host_processors", lambda: tuple(range(64)))
    monkeypatch.setattr("paddlenlp_galvatron.runtime.device.TOPOLOGY", "/nowhere/{}")
    monkeypatch.setattr("os.sched_setaffinity", lambda pid, processors: moved.append(processors))
    assert messages.overlapping_kinds() == [Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER]
    assert messages.overlapping_ranks(64) == tuple(range(64))
    with messages.pinned(63 % 8, 8, wanted=not device.on_gpu()):
        assert not moved
    with messages.pinned(63 % 8, 8):
        assert moved and set(moved[0]) == set(range(56, 64))


def test_a_profile_on_gpus_is_in_ms_and_has_the_launch(mixture, monkeypatch, tmp_path):
    """As it is taken there, by events; on a device whose queue is the host."""

    class Event:
        def __init__(self, enable_timing=False):
            assert enable_timing

        def record(self):
            self.ms = 1000 * time.perf_counter()

        def elapsed_time(self, end):
            return end.ms - self.ms

    monkeypatch.setattr(paddle.device.cuda, "Event", Event)
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    monkeypatch.setattr(computation, "on_gpu", lambda: True)
    monkeypatch.setattr(grouped, "has_kernel", lambda dtype: False)
    monkeypatch.setattr(device, "synchronize", lambda: None)
    monkeypatch.setattr(device, "to_device", paddle.to_tensor)
    monkeypatch.setattr(device, "to_host", lambda tensor: tensor.numpy())
    begin = time.perf_counter()
    profiler = ComputationProfiler([mixture], Stopwatch(1, budget_ms=1), Journal(), turns=1)
    profiler.measure([Shape(1, 32)], [1], lambda done: None)
    spent_ms = 1000 * (time.perf_counter() - begin)
    profile = computation_profile(profiler.journal, [mixture], Precision.FP32, Meta())
    read = ComputationProfile.load(profile.save(tmp_path), "fp32", mixture.hidden_size, mixture.heads)
    assert (read.launch, read.experts) == (profile.launch, profile.experts)
    call_ms, expert_ms, row_ms, _ = profile.experts[1].launch
    assert 0 < call_ms + expert_ms < spent_ms and row_ms == 0
    every = [profile.launch, *profile.passes.values()]
    assert all(0 < times.forward_ms + times.backward_ms < spent_ms for times in every)
    assert len(profile.passes) == 3 and profile.optimizer_ms_per_million > 0
    waiting, launch = ComputeTimes(profile).layer(0, 1, 32).launched(profile.launch, 0.0), profile.launch
    took_ms = waiting.forward_ms + waiting.backward_ms + (waiting.recompute_ms or 0.0)
    assert took_ms >= 0.999 * (launch.forward_ms + launch.backward_ms)


PRODUCT_MS, START_MS = 1.0, 0.05  # a product of 4096 on an H100; the time of Python to start a message
MIB_PER_MS = 100.0  # NVLink: 4 MiB are sent in less time than it takes to start them


class Gpu:
    """When each of its queues, and the host, will be done with their work, in ms."""

    def __init__(self, overlaps: bool = True):
        self.overlaps = overlaps
        self.host = self.computing = self.sending = 0.0

    def once(self, operation) -> float:
        """As the stopwatch's."""
        self.host = self.computing = self.sending = 0.0
        operation()
        return max(self.host, self.computing, self.sending)

    def product(self, *_):
        before = [self.computing, self.host] + ([] if self.overlaps else [self.sending])
        self.computing = max(before) + PRODUCT_MS

    def start(self, given, group):
        self.host += START_MS
        begin = max(self.host, self.computing, self.sending)  # behind queued computation
        self.sending = begin + given.size * 2 / 2**20 / MIB_PER_MS
        end = self.sending

        class Message:
            def wait(_):
                self.computing = max(self.computing, end)

        return Message()


def coefficient(gpu, monkeypatch) -> float:
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    monkeypatch.setattr(paddle, "matmul", gpu.product)
    monkeypatch.setitem(messages.STARTED, Collective.ALL_REDUCE, gpu.start)
    asked = (gpu, 0, (0, 1), FakeGroups(), Collective.ALL_REDUCE, Precision.BF16, 2)
    return messages.overlap_coefficient(*asked)


def test_a_device_that_overlaps_all_has_a_coefficient_of_one(monkeypatch):
    assert coefficient(Gpu(), monkeypatch) == pytest.approx(1.0, abs=0.05)


def test_a_device_that_overlaps_nothing_has_a_coefficient_of_two(monkeypatch):
    assert coefficient(Gpu(overlaps=False), monkeypatch) == pytest.approx(2.0, abs=0.05)


def test_waiting_counts_for_what_ranks_do_together_and_not_for_what_each_does_alone():
    stopwatch = Stopwatch(1, budget_ms=1)

    def wait() -> None:
        time.sleep(0.02)

    assert min(stopwatch.time_collective(wait)) >= 20
    assert np.median(stopwatch.time_independent(wait)[:, 0]) < 10


def test_steps_are_distinguished():
    runs = []
    laps = Stopwatch(1, budget_ms=1).time_independent(lambda: runs.append("a"), lambda: runs.append("b"))
    assert laps.shape[1] == 2
    assert runs == ["a", "b"] * (len(runs) // 2)


def test_the_median_of_the_rounds_means_counts_and_their_spread_is_reported():
    assert Timing.of_samples(np.array([1.0, 2.0, 3.0, 4.0, 100.0])) == Timing(3.0, 2 / 3)
    rounds = [[8.0, 8.0], [1.0, 7.0], [2.0, 2.0]]
    assert Timing.of_rounds(rounds) == Timing(4.0, 3 / 4)
    assert Timing.of_rounds(rounds, 25).ms == 3.0


def test_when_the_time_budget_is_spent_laps_are_few():
    assert not Stopwatch(1, time_budget_s=1000).is_late()
    late = Stopwatch(1, budget_ms=1e6, time_budget_s=1e-9)
    assert late.is_late()
    assert len(late.time_independent(lambda: None)) == MIN_SAMPLES
    assert len(late.time_collective(lambda: None)) == SERIES


def test_what_ranks_do_together_beside_their_work_takes_as_long_as_alone_at_least():
    stopwatch = Stopwatch(1, budget_ms=1)

    def wait() -> None:
        time.sleep(0.02)

    assert min(stopwatch.time_collective(wait)) >= 20
