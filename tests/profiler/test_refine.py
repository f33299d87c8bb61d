import pytest

from paddlenlp_galvatron.profiler.refine import coarse, falling, misses, uncertain
from paddlenlp_galvatron.profiler.stopwatch import Timing


def test_a_grid_is_begun_with_the_first_and_every_second_point_back_from_the_last():
    assert coarse([1, 2, 4, 8]) == [1, 2, 8]
    assert coarse([1, 2, 3]) == [1, 3]
    assert coarse([7]) == [7]


def test_points_are_wanted_beside_those_that_the_others_do_not_tell():
    grid = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    line = {x: 2 + 3 * x for x in (1, 3, 5, 7, 9)}
    assert max(misses(line).values()) == pytest.approx(0)
    assert uncertain(grid, line, 0.05) == []
    bent = line | {3: 1.5 * line[3]}
    assert 2 in uncertain(grid, bent, 0.05) and 4 in uncertain(grid, bent, 0.05)
    assert 8 not in uncertain(grid, bent, 0.2)
    assert uncertain([1, 2], {1: 1.0, 2: 9.0}, 0.05) == []


def test_time_that_falls_beyond_its_spread_cannot_be():
    def timings(*pairs):
        return {float(size): Timing(*pair) for size, pair in enumerate(pairs)}

    assert falling(timings((1.0, 0.0), (2.0, 0.0), (3.0, 0.0))) == {}
    assert falling(timings((1.0, 0.0), (0.5, 0.0), (0.6, 0.0), (3.0, 0.0))) == {1: 1.0, 2: 1.0}
    assert falling(timings((1.0, 0.6), (0.8, 0.5))) == {}
    assert falling(timings((1.0, 0.0), (0.97, 0.0))) == {}  # as steady as laps ever are
