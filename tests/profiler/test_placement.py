"""Ranks are let wake each other while a reference message is slower than it was."""

import pytest

from paddlenlp_galvatron.profiler.cpu_host.placement import FIRST_TRIES, NEAR, TRIES_A_NUMBER, ProcessorPlacement
from paddlenlp_galvatron.profiler.cpu_host.processors import Spinners

pytest.importorskip("paddle")


class Host:
    """Stands for a stopwatch: the reference takes what the host's mood is, and waking changes it."""

    world = None

    def __init__(self, moods_ms):
        self._moods_ms, self.wakings = iter(moods_ms), 0

    def brief(self, operation):
        self.now_ms = next(self._moods_ms)
        return self.now_ms

    def any_rank(self, holds):
        self.wakings += 1
        return True


def test_the_reference_is_as_quick_as_it_was_when_a_number_is_measured():
    slow = NEAR * 1.1
    host = Host([slow] * FIRST_TRIES + [1.0] + [1.1] * 8 + [slow] + [slow, slow, 1.1])
    placement = ProcessorPlacement(host, Spinners(), [], matters=True)
    for _ in range(9):
        assert placement.improve() <= NEAR
        assert host.wakings == FIRST_TRIES
    assert placement.improve(wanted=False) == slow
    assert host.wakings == FIRST_TRIES
    assert placement.improve() <= NEAR
    assert host.wakings == FIRST_TRIES + 2


def test_a_host_that_keeps_ranks_apart_is_not_asked_for_ever():
    host = Host([1.0] + [2.0] * 1000)
    placement = ProcessorPlacement(host, Spinners(), [], matters=True)
    assert [placement.improve() for _ in range(50)] == [2.0] * 50
    assert host.wakings == FIRST_TRIES + 50 * TRIES_A_NUMBER


def test_where_it_does_not_matter_nothing_is_done():
    host = Host([])
    assert ProcessorPlacement(host, Spinners(), [], matters=False).improve() == 0
    assert not host.wakings
