"""Pinned searches keep their plans and gaps, in about the same time: brute force reaches none of these sizes."""

import pytest

from .pinned import HARD, NAMED, Found, Run, found, pinned

GAP = 1e-3  # at which searches stop by default: a plan may be slower by so much than a pinned one
WIDER = 1.5  # times a named gap, at an effort that ends elsewhere
LONGER, MORE_S = 5.0, 2.0  # of processor time, which other work on the machine lengthens


def check(name: str, run: Run) -> None:
    now, before = found(run), Found(*pinned()[name])
    assert now.time_ms <= before.time_ms * (1 + GAP)
    assert now.gap <= WIDER * before.gap + GAP * (1 + 1e-9)
    assert now.cpu_s <= LONGER * before.cpu_s + MORE_S


LONG = {"405b, context parallel", "500 layers, 1,024 devices", "70b, 128 devices, 1 GB/s"}  # they take longer


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in NAMED]
)
def test_named_searches(name: str) -> None:
    check(name, NAMED[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", HARD)
def test_hard_searches(name: str) -> None:
    check(name, HARD[name])
