"""A whole training with failures, compared with runs in which failures are drawn."""

import heapq
from math import gamma

import numpy as np
import pytest

from paddlenlp_galvatron.planner.whole_run import Failures, WholeRun, spare_nodes

HOUR = 3600.0


class Drawn:
    """Times of failures of nodes that fail independently, by age, with Weibull times; shape 1 is exponential."""

    def __init__(self, random: np.random.Generator, nodes: int, mtbf_s: float, shape: float):
        self._draw = lambda: mtbf_s * nodes / gamma(1 + 1 / shape) * random.weibull(shape)
        # Nodes of any age: each has been replaced for a long time when the run begins.
        begin = 20 * mtbf_s * nodes
        self._next = []
        for _ in range(nodes):
            time = self._draw() * random.random()
            while time < begin:
                time += self._draw()
            self._next.append(time - begin)
        heapq.heapify(self._next)

    def after(self, time: float) -> float:
        """The first failure after this time."""
        while self._next[0] <= time:
            heapq.heapreplace(self._next, self._next[0] + self._draw())
        return self._next[0]


def simulated_s(work_s: float, failures: Failures, drawn: Drawn) -> float:
    now, done, restarting = 0.0, 0.0, False
    while done < work_s:
        step = failures.restart_s if restarting else min(failures.interval_s, work_s - done) + failures.save_s
        failed = drawn.after(now)
        if failed < now + step:
            now, restarting = failed, True
            continue
        now += step
        done += 0 if restarting else step - failures.save_s
        restarting = False
    return now


SETTINGS = [
    pytest.param(40, Failures(3.1 * HOUR, 30, 600), 1.0, id="as llama 3"),
    pytest.param(40, Failures(24 * HOUR, 120, 900), 1.0, id="a day between failures"),
    pytest.param(15, Failures(1 * HOUR, 200, 600), 1.0, id="an hour between failures"),
    pytest.param(40, Failures(6 * HOUR, 60, 1200), 0.7, id="weibull, early failures"),
    pytest.param(40, Failures(6 * HOUR, 60, 1200), 1.5, id="weibull, wear"),
]


@pytest.mark.parametrize(("days", "failures", "shape"), SETTINGS)
def test_time_and_range_are_those_of_drawn_failures(days: float, failures: Failures, shape: float) -> None:
    random = np.random.default_rng(7)
    work_s = days * 24 * HOUR
    runs = np.array([simulated_s(work_s, failures, Drawn(random, 48, failures.mtbf_s, shape)) for _ in range(100)])
    run = WholeRun.of(work_s, failures)
    assert run and run.days * 24 * HOUR == pytest.approx(runs.mean(), rel=0.02)
    inside = np.mean((runs >= run.days_low * 24 * HOUR) & (runs <= run.days_high * 24 * HOUR))
    assert inside >= (0.8 if shape >= 1 else 0.65)  # early failures spread more than the range says


@pytest.mark.parametrize(("days", "failures", "shape"), SETTINGS)
def test_the_interval_is_the_best_of_all(days: float, failures: Failures, shape: float) -> None:
    intervals = np.geomspace(failures.save_s / 10, failures.mtbf_s * 2, 4000)
    best = min(failures.expected_s(days, float(one)) for one in intervals)
    assert failures.expected_s(days) <= best * 1.0005


def test_llama_3_was_effective_for_more_than_nine_tenths() -> None:
    """arXiv 2407.21783, section 3.3.4: 419 unexpected interruptions in 54 days, storage of 2 TB/s, more than 90 % of
    the time effective. It does not give the time of a restart; any up to 15 minutes agrees."""
    for restart_s in (300, 600, 900):
        failures = Failures(54 * 24 * HOUR / 419, 405e9 * 12 / 2e12, restart_s)
        run = WholeRun.of(0.9 * 54 * 24 * HOUR, failures)
        assert run and 0.03 < run.lost < 0.10
        assert run.failures == pytest.approx(419, rel=0.1)


def test_spare_nodes_cover_nineteen_of_twenty_times() -> None:
    random = np.random.default_rng(1)
    for away in (0.05, 1.0, 7.7, 150.0):
        drawn = random.poisson(away, 20_000)
        nodes = spare_nodes(away)
        assert np.mean(drawn <= nodes) >= 0.945 and np.mean(drawn <= nodes - 2) < 0.95


def test_failures_faster_than_checkpoints_end_no_run() -> None:
    assert WholeRun.of(1e6, Failures(10, 1000, 600)) is None
