"""Pinned searches keep their plans and gaps, in about the same time: brute force reaches none of these sizes."""

from __future__ import annotations

import math

import pytest

from .pinned import HARD, NAMED, Found, Run, drawn, found, pinned

GAP = 1e-3  # at which searches stop by default: a plan may be slower by so much than a pinned one
WIDER = 1.5  # times a named gap, at an effort that ends elsewhere
LONGER, MORE_S = 5.0, 2.0  # of processor time, which other work on the machine lengthens


def check(name: str, run: Run) -> None:
    now, before = found(run), Found(*pinned()[name])
    assert now.time_ms <= before.time_ms * (1 + GAP)
    assert now.gap <= WIDER * before.gap + GAP * (1 + 1e-9)
    assert now.cpu_s <= LONGER * before.cpu_s + MORE_S


LONG = {"405b, context parallel", "500 layers, 1,024 devices"}  # more than a few s of processor time


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in NAMED]
)
def test_named_searches(name: str) -> None:
    check(name, NAMED[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", HARD)
def test_hard_searches(name: str) -> None:
    check(name, HARD[name])


# The sum of all problems: an effort that ends elsewhere may make a single plan a little slower.
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "slowest", "mean"), [("plain", GAP, 2e-4), ("interleaved", 0.03, 1e-3)])
def test_random_searches(kind: str, slowest: float, mean: float) -> None:
    before = [Found(*row) for row in pinned()[kind]]
    now = [found(run) for run in drawn(kind)]
    assert [math.isinf(each.time_ms) for each in now] == [math.isinf(each.time_ms) for each in before]
    losses = [
        new.time_ms / old.time_ms - 1 for new, old in zip(now, before, strict=True) if not math.isinf(old.time_ms)
    ]
    assert max(losses) <= slowest
    assert sum(losses) / len(losses) <= mean
    assert sum(each.gap <= GAP * (1 + 1e-9) for each in now) >= sum(each.gap == 0 for each in before)
    assert sum(each.cpu_s for each in now) <= LONGER * sum(each.cpu_s for each in before)
