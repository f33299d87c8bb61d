"""Differences of two plans are shown by layer, under any schedules."""

from __future__ import annotations

from dataclasses import replace

from paddlenlp_galvatron.plan import LayerStrategy, Plan
from paddlenlp_galvatron.report.difference import differing_fields, differing_layers

LAYERS = (*[LayerStrategy(2)] * 2, *[LayerStrategy(1, context=2)] * 2, *[LayerStrategy(2, ulysses=True)] * 4)
PLAN = Plan(8, 16, 4, (2, 2, 2, 2), LAYERS, chunks=2)


def test_layers_of_several_chunks_stand_in_their_order():
    plain = replace(PLAN, chunks=1, stages=(4, 4))
    assert differing_layers(PLAN, plain) == [
        ("2-3", "stage 1: cp 2, ddp", "stage 0: cp 2, ddp"),
        ("4-5", "stage 0: Ulysses 2, ddp", "stage 1: Ulysses 2, ddp"),
    ]
    assert differing_fields(PLAN, plain) == {
        "layers of each": ("2, 2, 2, 2", "4, 4"),
        "schedule": ("interleaved 1F1B of 2 chunks a stage", "1F1B"),
    }
