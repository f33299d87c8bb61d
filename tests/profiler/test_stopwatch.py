import time

import numpy as np

from paddlenlp_galvatron.profiler.stopwatch import LEAST_LAPS, SERIES, Stopwatch, Timing


def test_waiting_counts_for_what_ranks_do_together_and_not_for_what_each_does_alone():
    stopwatch = Stopwatch(1, budget_ms=1)

    def wait() -> None:
        time.sleep(0.02)

    assert min(stopwatch.together(wait)) >= 20
    assert np.median(stopwatch.apart(wait)[:, 0]) < 10


def test_steps_are_told_apart():
    runs = []
    laps = Stopwatch(1, budget_ms=1).apart(lambda: runs.append("a"), lambda: runs.append("b"))
    assert laps.shape[1] == 2
    assert runs == ["a", "b"] * (len(runs) // 2)


def test_a_timing_is_the_median_and_its_spread_that_of_the_middle_half():
    timing = Timing.of(np.array([1.0, 2.0, 3.0, 4.0, 100.0]))
    assert timing == Timing(3.0, 2 / 3)


def test_when_the_time_budget_is_spent_laps_are_few():
    assert not Stopwatch(1, time_budget_s=1000).is_late()
    late = Stopwatch(1, budget_ms=1e6, time_budget_s=1e-9)
    assert late.is_late()
    assert len(late.apart(lambda: None)) == LEAST_LAPS
    assert len(late.together(lambda: None)) == SERIES


def test_what_ranks_do_together_beside_their_work_takes_as_long_as_alone_at_least():
    stopwatch = Stopwatch(1, budget_ms=1)

    def wait() -> None:
        time.sleep(0.02)

    assert min(stopwatch.together(wait)) >= 20
