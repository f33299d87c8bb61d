"""NCCL's model of a collective: its choice, its limits, and what every time must obey."""

import pytest

from paddlenlp_galvatron.profiles.hardware import Collective
from paddlenlp_galvatron.profiles.network import collective_ms, traffic_factor

BUS = 220.0  # MiB/ms
LARGE = 2.0**20  # MiB
SIZES = [2**power / 1024 for power in range(-4, 21)]
PLACES = [(2, 1), (8, 1), (16, 2), (128, 16), (16, 16), (1024, 128)]


@pytest.mark.parametrize(("ranks", "nodes"), PLACES)
@pytest.mark.parametrize("kind", Collective)
def test_times_rise_with_the_message_and_are_never_below_its_bytes(kind, ranks, nodes):
    times = [collective_ms(kind, ranks, nodes, mib, BUS) for mib in SIZES]
    assert times == sorted(times) and times[0] > 0
    factor = traffic_factor(kind, ranks)
    for mib, ms in zip(SIZES, times, strict=True):
        assert ms > factor * mib / BUS


def test_large_messages_reach_the_bandwidth_and_small_ones_cost_their_steps():
    for ranks, nodes in PLACES:
        large = collective_ms(Collective.ALL_REDUCE, ranks, nodes, 2.0**20, BUS)
        assert large == pytest.approx(2 * (ranks - 1) / ranks * 2**20 / BUS, rel=0.02)
    by_nodes = [collective_ms(Collective.ALL_REDUCE, 8 * nodes, nodes, 1e-3, BUS) for nodes in (1, 2, 16, 128)]
    assert by_nodes == sorted(by_nodes)
    # Trees: a short message over 1,024 ranks takes the depth of a tree, not 2,046 steps of a ring.
    assert by_nodes[-1] < 0.12 < collective_ms(Collective.ALL_GATHER, 1024, 128, 1e-3, BUS)


def test_rings_across_nodes_lose_bandwidth_with_their_ranks_and_trees_do_not():
    def ms(kind, ranks, nodes):
        return collective_ms(kind, ranks, nodes, LARGE, BUS, half_ranks=256)

    for kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER):
        each = [ms(kind, ranks, ranks // 8) for ranks in (8, 16, 64, 256, 1024, 4096)]
        assert each == sorted(each)
        assert each[3] == pytest.approx(2 * LARGE / BUS, rel=0.02)  # half of it with 256 ranks
    assert ms(Collective.ALL_GATHER, 8, 1) == collective_ms(Collective.ALL_GATHER, 8, 1, LARGE, BUS)
    trees = ms(Collective.ALL_REDUCE, 1024, 128)
    assert trees < 1.15 * ms(Collective.ALL_REDUCE, 64, 8) < ms(Collective.ALL_GATHER, 1024, 128)


def test_one_rank_and_nothing_cost_nothing():
    assert collective_ms(Collective.ALL_REDUCE, 1, 1, 8.0, BUS) == 0
    assert collective_ms(Collective.ALL_GATHER, 8, 1, 0.0, BUS) == 0
