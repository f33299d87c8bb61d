"""Lookups of profiles between and beyond their points: exact at each, physical elsewhere, else an error."""

from dataclasses import replace

import pytest
from cost_examples import COMPUTATION, HARDWARE, MEMORY, SEQ
from hypothesis import assume, given
from hypothesis import strategies as st

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.plan.mesh import Axis
from paddlenlp_galvatron.profiles import Collective, HardwareProfile, LayerMemory, MessageGroup, Variant
from paddlenlp_galvatron.profiles.computation import CommPointKey, CommPointTimes, PassKey, PassTimes, Shape
from paddlenlp_galvatron.profiles.compute_time import ComputeTimes, TimeMode
from paddlenlp_galvatron.profiles.curves import Curve
from paddlenlp_galvatron.profiles.memory_use import MemoryMode, MemoryUse
from paddlenlp_galvatron.profiles.network import Network, Place

points = st.dictionaries(st.integers(1, 1000).map(float), st.floats(1e-3, 1e3), min_size=1, max_size=8)


@given(points, st.floats(0, 5000), st.floats(0, 5000))
def test_a_curve_meets_its_points_and_stays_physical(measured, low, high):
    curve = Curve.through(measured.items())
    for x, y in measured.items():
        assert curve(x) == pytest.approx(y)
    assert curve.latency >= 0
    assume(low <= high)
    if high <= min(measured) or low >= max(measured):  # beyond the points: rising, never faster than through the origin
        assert 0 <= curve(low) <= curve(high) * (1 + 1e-12)
        assert curve(high) * low <= curve(low) * high * (1 + 1e-9) + 1e-9
    between = [y for x, y in measured.items() if x <= high] + [y for x, y in measured.items() if x >= high]
    if min(measured) <= high <= max(measured):
        assert min(between) * (1 - 1e-9) <= curve(high) <= max(between) * (1 + 1e-9)


def test_one_point_is_a_proportion_and_a_line_is_a_line():
    assert Curve.through([(4, 2.0)])(10) == 5
    line = Curve.through((x, 0.3 + 0.05 * x) for x in (2, 3, 8))
    for x in (0, 1, 2.5, 5, 100):
        assert line(x) == pytest.approx(0.3 + 0.05 * x)


def test_attention_grows_with_the_square_of_the_sequence_in_sequence_mode():
    def layer(seq: int) -> float:
        return seq / 100 + (seq / 1000) ** 2

    lengths = (1024, 2048, 4096, 8192)
    profile = replace(COMPUTATION, layer_ms={0: {Shape(1, seq): layer(seq) for seq in lengths}})
    times = ComputeTimes(profile, TimeMode.SEQUENCE)
    for seq in (512, 1024, 3000, 6000, 16384):
        assert times.layer(0, 1, seq).forward_ms == pytest.approx(layer(seq))
        assert times.layer(0, 3, seq).forward_ms == pytest.approx(3 * layer(seq))


@pytest.mark.parametrize(
    ("points", "mode", "message"),
    [
        ([(1, 512)], TimeMode.BATCH, "needs two batch sizes or more at sequence length 512 but the profile has 1"),
        ([(1, 256)], TimeMode.STATIC, r"sequence length 512 was not measured \(the profile has 256\)"),
        ([(1, 256), (2, 1024)], TimeMode.SEQUENCE, "needs 3 sequence lengths but the profile has 256, 1024; measure"),
    ],
)
def test_too_few_points_say_which_to_measure(points, mode, message):
    profile = replace(COMPUTATION, layer_ms={0: {Shape(*point): 1.0 for point in points}})
    with pytest.raises(UserError, match=message):
        ComputeTimes(profile, mode).layer(0, 1, 512)


def test_measured_backward_recompute_and_degrees_go_before_fixed_factors():
    assert ComputeTimes(COMPUTATION).layer(0, 4, SEQ, tp=2) == PassTimes(0.9, 1.8, 0.9)
    passes = {
        PassKey("layertype_0", 4, SEQ, 1): PassTimes(1.7, 4.0, 1.5),
        PassKey("layertype_0", 4, SEQ, 2): PassTimes(1.1, 2.5, 1.0),
        PassKey("embedding", 4, SEQ, 1): PassTimes(0.2, 0.3),
        PassKey("head", 4, SEQ, 1): PassTimes(2.0, 5.0),
    }
    times = ComputeTimes(replace(COMPUTATION, passes=passes))
    assert times.layer(0, 4, SEQ) == PassTimes(1.7, 4.0, 1.5)
    assert times.layer(0, 4, SEQ, tp=2) == PassTimes(1.1, 2.5, 1.0)
    assert times.layer(0, 8, SEQ, tp=4) == PassTimes(1.1, 2.5, 1.0)  # as tp 2 with half the samples
    assert times.embedding(4, SEQ).backward_ms == 0.3
    assert times.head(8, SEQ).forward_ms == pytest.approx(4.0)
    assert ComputeTimes(COMPUTATION).embedding(4, SEQ).forward_ms == 0
    assert ComputeTimes(COMPUTATION).head(4, SEQ).forward_ms == pytest.approx(0.2 + 0.8 * 4)


def test_a_degree_measured_at_other_lengths_gives_way_to_one_that_fits():
    passes = {PassKey("layertype_0", 4, 2 * SEQ, 2): PassTimes(9.0, 9.0)}
    times = ComputeTimes(replace(COMPUTATION, passes=passes))
    assert times.layer(0, 4, SEQ, tp=2) == PassTimes(0.9, 1.8, 0.9)
    with pytest.raises(UserError, match="embedding: no time"):
        alone = {PassKey("embedding", 4, 2 * SEQ): PassTimes(9.0, 9.0)}
        ComputeTimes(replace(COMPUTATION, passes=alone)).embedding(4, SEQ)


def test_communication_points_are_looked_up_by_the_tokens_of_the_nearest_length():
    points = {
        CommPointKey("layertype_0", 1, SEQ, Axis.ULYSSES): CommPointTimes(1.0, 2.0),
        CommPointKey("layertype_0", 3, SEQ, Axis.ULYSSES): CommPointTimes(2.0, 2.0),
        CommPointKey("layertype_0", 1, 8 * SEQ, Axis.ULYSSES): CommPointTimes(99.0, 99.0),
    }
    times = ComputeTimes(replace(COMPUTATION, points=points))
    assert times.points(0, Axis.ULYSSES, 2, SEQ) == (1.5, 2.0)
    assert times.points(0, Axis.ULYSSES, 1, 2 * SEQ) == (1.5, 2.0)
    assert times.points(0, Axis.CONTEXT, 2, SEQ) == times.points(1, Axis.ULYSSES, 2, SEQ) == (0.0, 0.0)


def test_a_gather_is_half_an_all_reduce_unless_it_was_measured():
    all_reduce = {MessageGroup(Collective.ALL_REDUCE, 4): {1.0: 0.2, 64.0: 3.0}}
    place = Place(4)
    halved = Network(HardwareProfile(1, 4, {(4, True): 100}, messages_ms=all_reduce))
    assert halved.collective_ms(Collective.ALL_GATHER, place, 64) == pytest.approx(1.5)
    assert halved.collective_ms(Collective.REDUCE_SCATTER, place, 1) == pytest.approx(0.1)
    measured = {**all_reduce, MessageGroup(Collective.ALL_GATHER, 4): {64.0: 2.0}}
    network = Network(HardwareProfile(1, 4, {(4, True): 100}, messages_ms=measured))
    assert network.collective_ms(Collective.ALL_GATHER, place, 64) == pytest.approx(2.0)


def test_bandwidth_is_bus_bandwidth():
    network = Network(HARDWARE)
    assert network.collective_ms(Collective.ALL_REDUCE, Place(4), 100) == pytest.approx(100 * 2 * 3 / 4 / 100)
    for kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL):
        assert network.collective_ms(kind, Place(4), 100) == pytest.approx(100 * 3 / 4 / 100)
    assert network.collective_ms(Collective.ALL_REDUCE, Place(1), 100) == 0
    assert network.send_ms(1, 100) == 0
    assert network.send_ms(3, 100) == pytest.approx(100 / 2.5)


def test_groups_that_were_not_measured_take_the_nearest_that_shares_the_link_alike():
    network = Network(HARDWARE)  # a node's link carries 10 MiB/ms, measured with 1, 2 and 4 ranks of a group on it
    assert network.bandwidth_mib_per_ms(Place(3)) == 100
    assert network.bandwidth_mib_per_ms(Place(8, 8, False)) == pytest.approx(2.5)  # one rank a node, eight nodes
    assert network.bandwidth_mib_per_ms(Place(16, 8, False)) == pytest.approx(5)
    assert network.bandwidth_mib_per_ms(Place(4000, 1000)) == pytest.approx(10)
    only_world = Network(HardwareProfile(2, 4, {(8, True): 10}))
    assert only_world.bandwidth_mib_per_ms(Place(2, 2, False)) == pytest.approx(2.5)
    with pytest.raises(UserError, match="no all-reduce inside a node was measured"):
        only_world.bandwidth_mib_per_ms(Place(4))
    with pytest.raises(UserError, match=r"allreduce_size_8_consec_1: no all-reduce across nodes"):
        Network(HardwareProfile(1, 4, {(4, True): 10})).bandwidth_mib_per_ms(Place(8, 2))
    with pytest.raises(UserError, match="pp_size_2"):
        Network(HardwareProfile(1, 4, {(4, True): 10})).send_ms(2, 1.0)


def test_latency_of_small_messages_carries_over_to_groups_priced_by_bandwidth():
    messages = {MessageGroup(Collective.ALL_REDUCE, 4): {1.0: 0.21, 2.0: 0.22}}
    network = Network(replace(HARDWARE, messages_ms=messages))
    assert network.collective_ms(Collective.ALL_REDUCE, Place(8, 2), 10) == pytest.approx(0.2 + 10 * 2 * 7 / 8 / 10)


def test_activations_between_degrees_are_a_line_in_the_inverse_degree():
    use = MemoryUse(MEMORY)
    for degree in (1, 2, 3, 5, 8, 16):
        assert use.activation_mib(0, degree, SEQ, sequence_parallel=True) == pytest.approx(40 / degree)
        assert use.activation_mib(0, degree, SEQ, sequence_parallel=False) == pytest.approx(10 + 30 / degree)
    assert use.vocab_states_mib("only", 16) == pytest.approx(use.vocab_states_mib("only", 1) / 16)


def test_one_variant_stands_in_for_the_other_as_far_as_it_can():
    plain = replace(MEMORY, layers={Variant(0, False): MEMORY.layers[Variant(0, False)]})
    assert MemoryUse(plain).activation_mib(0, 4, SEQ, sequence_parallel=True) == pytest.approx(40 / 4)
    sharded = replace(MEMORY, layers={Variant(0, True): MEMORY.layers[Variant(0, True)]})
    assert MemoryUse(sharded).activation_mib(0, 1, SEQ, sequence_parallel=False) == pytest.approx(40)
    with pytest.raises(UserError, match="degree 4 without Megatron-SP does not follow"):
        MemoryUse(sharded).activation_mib(0, 4, SEQ, sequence_parallel=False)


def test_other_sequence_lengths_need_sequence_mode():
    with pytest.raises(UserError, match=r"sequence length 1024 was not measured \(the memory profile has 512\)"):
        MemoryUse(MEMORY).activation_mib(0, 1, 1024, True)
    use = MemoryUse(MEMORY, MemoryMode.SEQUENCE)
    assert use.activation_mib(0, 2, 1024, True) == pytest.approx(40)
    assert use.checkpoint_mib(0, 256) == pytest.approx(0.5)
    layers = {SEQ: LayerMemory(1.0, {1: 3.0}), 2 * SEQ: LayerMemory(1.0, {1: 5.0})}
    line = MemoryUse(replace(MEMORY, layers={Variant(0, True): layers}), MemoryMode.SEQUENCE)
    assert line.activation_mib(0, 1, 4 * SEQ, True) == pytest.approx(9)
    with pytest.raises(UserError, match="no checkpoint entry"):
        line.checkpoint_mib(0, SEQ)


@given(st.sampled_from(list(Collective)[:4]), st.integers(2, 8), st.floats(0, 1e4), st.floats(0, 1e4))
def test_a_larger_message_never_takes_less(kind, size, one, other):
    messages = {MessageGroup(Collective.ALL_REDUCE, 4): {1.0: 0.2, 2.0: 0.19, 1024.0: 30.0}}  # 2 MiB by noise before 1
    network = Network(replace(HARDWARE, messages_ms=messages))
    small, large = sorted((one, other))
    for place in (Place(size), Place(size, 2)):
        assert network.collective_ms(kind, place, small) <= network.collective_ms(kind, place, large) + 1e-12
