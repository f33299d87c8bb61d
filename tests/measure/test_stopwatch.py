import time

import numpy as np

from paddlenlp_galvatron.measure.stopwatch import MIN_SAMPLES, SERIES, Stopwatch, Timing


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
