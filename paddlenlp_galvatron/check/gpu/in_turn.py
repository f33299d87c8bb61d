"""Tries cases in as few launches as their faults allow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from .findings import TrialFinding, TrialSetting

# Launches the cases from this one on, as the number of the launch: what was found of those that ended, in order, and
# why the next one did not.
Launched = Callable[[int, int], tuple[list[TrialFinding], str]]


def in_turn(setting: TrialSetting, names: Sequence[str], launched: Launched) -> Iterator[TrialFinding]:
    """All cases in one launch; where that ends in a case, those behind it in another."""
    first, launches = 0, 0
    while first < len(names):
        given_s = setting.launch_s
        if setting.left_s <= 0:
            yield from map(setting.no_time, names[first:])
            return
        done, fault = launched(first, launches)
        yield from done
        first, launches = first + len(done), launches + 1
        if fault and first < len(names):
            yield setting.ended(names[first], fault, given_s)
            first += 1
