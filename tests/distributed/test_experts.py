"""Experts shared out and split among ranks train as one process does, beside every other dimension."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

pytest.importorskip("paddle")

from paddlenlp_galvatron.check.parity.parity import Case, small_case
from paddlenlp_galvatron.plan import DataParallel, LayerStrategy, Plan

from . import plans
from .test_families import disagreements

ZERO2, ZERO3 = DataParallel.ZERO2, DataParallel.ZERO3
FAMILIES = ("qwen3_moe", "qwen2_moe", "mixtral")


def having(plan: Plan, code: str) -> Plan:
    """The plan with experts by words, a layer each: "4 2x2 1z" is ep 4, ep 2 with tp 2, whole experts under zero3."""
    words = re.findall(r"(\d+)(?:x(\d+))?(z?)", code)
    layers: list[LayerStrategy] = []
    for layer, (ep, etp, sharded) in zip(plan.layers, words, strict=True):
        dp_type = ZERO3 if sharded else plan.default_dp_type
        layers.append(replace(layer, ep=int(ep), etp=int(etp or 1), experts_dp_type=dp_type))
    return replace(plan, layers=tuple(layers))


TWO = {
    "unlike layers": having(plans.plan(2, "1 1z 1r"), "2 1x2 2"),
    "ZeRO of either half": having(plans.plan(2, "1z 1", default=ZERO2), "1 1z"),
    "reduced every micro-batch": having(plans.plan(2, "1 2", async_reduce=False), "2 1"),
}
FOUR = {
    "ep 4, plain": having(plans.plan(4, "1 1r", micro_batches=1), "4 4"),
    "ep 2 over two, three ZeRO types": having(plans.plan(4, "1 1 1z", default=ZERO2), "2 2z 2"),
    "ep 2 with tp 2, and whole": having(plans.plan(4, "1 1z"), "2x2 1z"),
    "beside Megatron-SP": having(plans.plan(4, "2 4r", vocab="2"), "4 2"),
    "beside plain tp": having(plans.plan(4, "2 4r", megatron_sp=False), "4 2x2"),
    "beside Ulysses and cp": having(plans.plan(4, "2u 1c2 2c2"), "4 4 2x2"),
    "in stages": having(plans.plan(4, "1r 2 1", (2, 1), micro_batches=4), "2 1x2 2z"),
    "interleaved": having(plans.plan(4, "1 1 2 1a", (1, 1, 1, 1), micro_batches=4, chunks=2), "2 2 1 2"),
}


def cases(named: dict[str, Plan]) -> list[Case]:
    """Each plan with a family, in turn; every other one has so few words that some experts get no rows."""
    return [
        small_case(plan, FAMILIES[number % 3], steps=2, vocabulary=2 if number % 2 else 61)
        for number, plan in enumerate(named.values())
    ]


def test_experts_of_two_processes():
    assert not disagreements(cases(TWO))


def test_experts_of_four_processes():
    assert not disagreements(cases(FOUR))
