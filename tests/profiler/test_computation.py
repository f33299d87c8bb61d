from dataclasses import replace

import pytest

from paddlenlp_galvatron.plan import Precision
from paddlenlp_galvatron.plan.mesh import Axis
from paddlenlp_galvatron.profiler.journal import Journal
from paddlenlp_galvatron.profiler.layers.computation import MOST_TURNS, PINNED_TURNS, SMALL_MS, ComputationProfiler
from paddlenlp_galvatron.profiler.layers.summary import PassPoint, PassTimings, PassTurn, computation_profile, doubtful
from paddlenlp_galvatron.profiler.stopwatch import Stopwatch
from paddlenlp_galvatron.profiles import EMBEDDING, HEAD, Meta, PassKey, SeamKey, Shape


@pytest.fixture(scope="module")
def profile(shape, family):
    journal = Journal()
    profiler = ComputationProfiler([shape], family, Stopwatch(1, budget_ms=1), journal, sequence_parallel=True)
    ticks = []
    profiler.measure([Shape(1, 32), Shape(2, 32)], [1, 2], ticks.append)
    assert ticks == [0, 2, 4]
    return computation_profile(journal, [shape], Precision.FP32, Meta())


def test_every_part_is_timed_at_every_point_and_degree(profile):
    expected = {
        PassKey(part, batch, 32, tp) for part in ("layertype_0", EMBEDDING, HEAD) for batch in (1, 2) for tp in (1, 2)
    }
    assert set(profile.passes) == expected
    for key, times in profile.passes.items():
        assert times.forward_ms > 0 and times.backward_ms > 0
        assert (times.recompute_ms is not None) == (key.part == "layertype_0")


def test_plain_keys_are_the_passes_per_sample(profile):
    for batch in (1, 2):
        point = Shape(batch, 32)
        assert profile.layer_ms[0][point] * batch == profile.passes[PassKey("layertype_0", batch, 32)].forward_ms
        ends = sum(profile.passes[PassKey(part, batch, 32)].forward_ms for part in (EMBEDDING, HEAD))
        assert profile.other_ms[point] * batch == pytest.approx(ends)
    assert profile.optimizer_ms_per_million > 0


def test_layers_that_ranks_share_are_timed_beside_others(profile):
    assert set(profile.seams) == {
        SeamKey("layertype_0", batch, 32, axis) for batch in (1, 2) for axis in (Axis.ULYSSES, Axis.CONTEXT)
    }
    assert sum(times.forward_ms + times.backward_ms for times in profile.seams.values()) > 0


class Scripted(ComputationProfiler):
    """Every lap takes what `ms` says for the point."""

    def __init__(self, shape, ms, journal=None, **settings):
        super().__init__([shape], None, Stopwatch(1), journal or Journal(), **settings)
        self.ms, self.asked = ms, []

    def _layer(self, key):
        self.asked.append((key.batch, key.seq))
        return PassTurn([self.ms(key)], [1e-9], 0.0)

    _end = _layer

    def _shares(self, key):
        return {}

    def _optimizer_ms_per_million(self, point):
        return 1.0


def of_layer(profiler):
    return sorted({point.key.batch for point in map(PassPoint.from_name, dict(profiler.journal.items("time layer")))})


def test_points_that_a_line_tells_are_not_measured_and_others_are(shape):
    points = [Shape(batch, 32) for batch in range(1, 10)]
    straight = Scripted(shape, lambda key: 1 + 2 * key.batch)
    straight.measure(points, [1], lambda _: None)
    assert of_layer(straight) == [1, 3, 5, 7, 9]
    bent = Scripted(shape, lambda key: 10 if key.batch < 6 else 10 * (key.batch - 4))
    bent.measure(points, [1], lambda _: None)
    assert {4, 6} <= set(of_layer(bent)) < set(range(1, 10))
    every = Scripted(shape, lambda key: 1 + 2 * key.batch, adaptive=False)
    every.measure(points, [1], lambda _: None)
    assert of_layer(every) == list(range(1, 10))


def test_what_cannot_be_is_measured_again_and_flagged(shape):
    broken = Scripted(shape, lambda key: 50 if key.batch == 3 else 100 * key.batch, adaptive=False)
    broken.measure([Shape(batch, 32) for batch in (1, 2, 3)], [1], lambda _: None)
    assert broken.asked.count((3, 32)) == 3 * MOST_TURNS  # three parts
    assert broken.asked.count((2, 32)) == 3 * PINNED_TURNS
    told = computation_profile(broken.journal, [shape], Precision.FP32, Meta()).meta
    assert "200 ms" in told.flags["layertype_0_bsz3_seq32_tp1"]
    assert {key.batch for key in doubtful(broken.journal)} == {3}


def test_a_time_that_spreads_is_measured_in_all_turns(shape):
    turns = iter([90.0, 50.0] * (PINNED_TURNS // 2) + [53.0])

    def ms(key):
        return next(turns) if key.part == "layertype_0" else 2 * SMALL_MS

    noisy = Scripted(shape, ms)
    noisy.measure([Shape(1, 32)], [1], lambda _: None)
    assert next(turns, None) is None
    assert computation_profile(noisy.journal, [shape], Precision.FP32, Meta()).layer_ms[0][1, 32] == 53
    assert noisy.asked.count((1, 32)) == MOST_TURNS + 2 * PINNED_TURNS


def test_what_is_small_is_measured_in_all_turns(shape):
    small = Scripted(shape, lambda key: SMALL_MS / 2)
    small.measure([Shape(1, 32)], [1], lambda _: None)
    assert small.asked.count((1, 32)) == 3 * MOST_TURNS


def test_more_turns_are_measured_beside_those_that_are_known(shape):
    journal = Journal()
    for turns in (1, 3):  # fewer and more than such a time would have
        again = Scripted(shape, lambda key, ms=SMALL_MS * turns: ms, journal=journal, turns=turns)
        again.measure([Shape(1, 32)], [1], lambda _: None)
        assert len(journal.items("time layertype_0 ")) == turns
    assert computation_profile(journal, [shape], Precision.FP32, Meta()).layer_ms[0][1, 32] == 3 * SMALL_MS


def test_the_median_turn_counts_and_the_spread_is_that_of_all():
    slow = PassTurn([8.0, 8.0, 8.0], [5.0, 5.0, 5.0], 4.0)
    quick = PassTurn([4.0, 4.0, 4.0], [5.0, 5.0, 5.0], 3.0)
    quickest = PassTurn([1.0, 1.0, 1.0], [5.0, 5.0, 5.0], 2.0)
    found = PassTimings.of_turns([slow, quick, quickest])
    assert (found.forward.ms, found.backward.ms, found.recompute_ms) == (4, 5, 3)
    assert found.forward.spread == pytest.approx(7 / 4) and found.backward.spread == 0


def test_over_lengths_time_of_a_token_is_a_line(shape):
    lengths = [Shape(1, seq) for seq in range(8, 64, 8)]
    profiler = Scripted(shape, lambda key: key.seq * (1 + 0.1 * key.seq))
    profiler.measure(lengths, [1], lambda _: None)
    assert sorted({seq for _, seq in profiler.asked}) == [8, 24, 40, 56]
    told = computation_profile(profiler.journal, [shape], Precision.FP32, Meta()).meta
    assert told.extra["fit_error"]["sequence"] == pytest.approx(0, abs=1e-9)


def test_every_layer_type_is_timed_at_the_length_that_it_sees(shape):
    profiler = Scripted(shape, lambda key: float(key.batch * key.seq))
    profiler.shapes = [shape, replace(shape, hidden_size=128, seq_length=16)]
    profiler.measure([Shape(1, 32), Shape(2, 32)], [1], lambda _: None)
    found = computation_profile(profiler.journal, profiler.shapes, Precision.FP32, Meta())
    assert found.layer_ms == {0: {(1, 32): 32, (2, 32): 32}, 1: {(1, 16): 16, (2, 16): 16}}
    assert {key.seq for key in found.passes if key.part == HEAD} == {16}
