import pytest

from paddlenlp_galvatron.profiler.computation import ComputationProfiler
from paddlenlp_galvatron.profiler.stopwatch import Stopwatch
from paddlenlp_galvatron.profiles import EMBEDDING, HEAD, Meta, PassKey, Shape


@pytest.fixture(scope="module")
def profile(shape, family):
    profiler = ComputationProfiler(shape, family, Stopwatch(1, budget_ms=1), sequence_parallel=True)
    ticks = []
    result = profiler.measure([Shape(1, 32), Shape(2, 32)], [1, 2], Meta(), lambda: ticks.append(1))
    assert len(ticks) == 4
    return result


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
