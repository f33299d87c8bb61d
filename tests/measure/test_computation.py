from dataclasses import replace

import pytest

from paddlenlp_galvatron.measure import computation
from paddlenlp_galvatron.measure.computation import ComputationProfiler, PassRound, computation_profile
from paddlenlp_galvatron.measure.journal import Journal
from paddlenlp_galvatron.measure.stopwatch import ROUNDS, Stopwatch
from paddlenlp_galvatron.plan import Precision
from paddlenlp_galvatron.plan.mesh import Axis
from paddlenlp_galvatron.profiles import EMBEDDING, HEAD, CommPointKey, Meta, PassKey, Shape


@pytest.fixture(scope="module")
def profile(shape, family):
    journal = Journal()
    profiler = ComputationProfiler([shape], Stopwatch(1, budget_ms=1), journal, sequence_parallel=True)
    ticks = []
    profiler.measure([Shape(1, 32), Shape(2, 32)], [1, 2], ticks.append)
    assert (ticks[0], ticks[-1]) == (0, 4) and ticks == sorted(ticks)
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
    assert set(profile.points) == {CommPointKey("layertype_0", 1, 32, axis) for axis in (Axis.ULYSSES, Axis.CONTEXT)}
    assert sum(times.forward_ms + times.backward_ms for times in profile.points.values()) > 0


class Scripted(ComputationProfiler):
    """Every sample takes the time that `ms` gives for the point."""

    def __init__(self, shape, ms, journal=None, **settings):
        super().__init__([shape], Stopwatch(1), journal or Journal(), **settings)
        self.ms, self.asked = ms, []

    def _pass_round(self, key):
        self.asked.append((key.batch, key.seq))
        return PassRound([self.ms(key)], [1e-9], 0.0)

    def _shares(self, key):
        return {}

    def _points(self, key, shared):
        return PassRound([0.0], [0.0])

    def _optimizer_ms_per_million(self, point):
        return 1.0


def batches(profiler):
    return sorted({key.batch for key in computation.rounds_of(profiler.journal)})


def test_sizes_between_others_are_measured_where_asked(shape):
    points = [Shape(batch, 32) for batch in range(1, 18)]
    for adaptive, expected in ((True, [1, 4, 17]), (False, list(range(1, 18)))):
        profiler = Scripted(shape, lambda key: 1 + 2 * key.batch, adaptive=adaptive)
        profiler.measure(points, [1], lambda _: None)
        assert batches(profiler) == expected
    lengths = Scripted(shape, lambda key: 1.0)
    lengths.measure([Shape(1, seq) for seq in range(8, 64, 8)], [1], lambda _: None)
    assert sorted({seq for _, seq in lengths.asked}) == [8, 16, 56]
    close = Scripted(shape, lambda key: 1.0)
    close.measure([Shape(1, seq) for seq in (32, 48, 64)], [1], lambda _: None)
    assert sorted({seq for _, seq in close.asked}) == [32, 48, 64]  # which the search needs


def test_what_spreads_over_its_rounds_is_measured_in_more(shape):
    steady, noisy = iter([50.0, 51.0, 52.0]), iter([90.0, 50.0, 52.0, 51.0])
    of_parts = {"layertype_0": noisy, EMBEDDING: steady}
    profiler = Scripted(shape, lambda key: next(of_parts[key.part]) if key.part in of_parts else 10.0)
    profiler.measure([Shape(1, 32)], [1], lambda _: None)
    assert next(steady, None) is next(noisy, None) is None
    assert profiler.asked.count((1, 32)) == 4 + 2 * ROUNDS
    reported = computation_profile(profiler.journal, [shape], Precision.FP32, Meta())
    assert reported.layer_ms[0][1, 32] == 51.5
    assert reported.meta.spread["layertype_0_bsz1_seq32_tp1"] == pytest.approx(10.75 / 51.5)


def test_more_turns_are_measured_beside_those_that_are_known(shape):
    journal = Journal()
    for turns in (1, 4):
        again = Scripted(shape, lambda key, ms=20.0 * turns: ms, journal=journal, turns=turns)
        again.measure([Shape(1, 32)], [1], lambda _: None)
        assert len(journal.items("time layertype_0 ")) == turns
    assert computation_profile(journal, [shape], Precision.FP32, Meta()).layer_ms[0][1, 32] == 80


def test_times_of_experts_are_those_that_explain_what_was_measured(mixture):
    def ms(key: PassKey) -> float:
        if not key.part.startswith("experts"):
            return 10.0
        return 0.5 + 0.25 * int(key.part.removeprefix("experts")) / key.tp + 0.01 * 2 * key.seq / key.tp

    profiler = Scripted(mixture, ms)
    profiler.measure([Shape(1, 32), Shape(4, 32)], [1, 2, 4], lambda _: None)
    found = computation_profile(profiler.journal, [mixture], Precision.FP32, Meta())
    assert found.experts.keys() == {1, 4} and {key.part for key in found.passes} == {"layertype_0", EMBEDDING, HEAD}
    for degree, times in found.experts.items():
        assert times.forward == pytest.approx((0.5, 0.25 / degree, 0.01 / degree, 0))
        assert times.backward == pytest.approx((1e-9, 0, 0, 0)) and times.launch == (0, 0, 0, 0)
    assert min(computation.fitted([(1, 8, 2.0), (1, 64, 1.0), (2, 8, 1.5), (2, 64, 0.5)])) == 0  # noise is no gain


def test_every_layer_type_is_timed_at_the_length_that_it_sees(shape):
    profiler = Scripted(shape, lambda key: float(key.batch * key.seq))
    profiler.shapes = [shape, replace(shape, hidden_size=128, seq_length=16)]
    profiler.measure([Shape(1, 32), Shape(2, 32)], [1], lambda _: None)
    found = computation_profile(profiler.journal, profiler.shapes, Precision.FP32, Meta())
    assert found.layer_ms == {0: {(1, 32): 32, (2, 32): 32}, 1: {(1, 16): 16, (2, 16): 16}}
    assert {key.seq for key in found.passes if key.part == HEAD} == {16}
