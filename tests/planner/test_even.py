"""Plans for other programs' trainers: the fastest of all that they can run, by trying every one of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf

import pytest
from cost_examples import MODEL

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.cost_model import derive
from paddlenlp_galvatron.plan import Recompute
from paddlenlp_galvatron.plan.check import find_faults
from paddlenlp_galvatron.plan.export import fleet_arguments, gaps, stock_arguments
from paddlenlp_galvatron.plan.uniform import even_stages
from paddlenlp_galvatron.planner import SearchOptions, search
from paddlenlp_galvatron.planner.even import PROGRAMS, fewest
from paddlenlp_galvatron.planner.space import Space, families
from paddlenlp_galvatron.profiles.data_sheet import load_data_sheet

SMALL = replace(MODEL, layers=4)


def asked(trainer: str, gib: float, **more) -> SearchOptions:
    return SearchOptions(
        trainer=trainer,
        num_gpus_per_node=4,
        memory_constraint=gib,
        settle_bsz=8,
        seq_length=512,
        context_mib=0,
        device="h100-80gb",
        **more,
    )


def cost_of(options: SearchOptions, model=SMALL):
    sheet = load_data_sheet("h100-80gb")
    return derive(model, sheet, 1, 4, options.assumptions, options.cost_options)


def fastest(options: SearchOptions) -> float:
    """The least step time, ms, over every plan of even stages that the program can run and that fits."""
    cost, best = cost_of(options), inf
    space, like = Space(SMALL, cost.assumed, options, cost), bare(cost, options)
    for family in families(options, 4, SMALL.layers):
        if SMALL.layers % family.stages:
            continue
        for layer in space.layers(family):
            if layer.recompute:
                continue
            for vocab in space.vocabularies(family):
                for again in product((Recompute.NONE, Recompute.FULL), repeat=SMALL.layers):
                    plan = replace(
                        like,
                        global_batch=family.global_batch,
                        micro_batches=family.micro_batches,
                        stages=even_stages(SMALL.layers, family.stages),
                        layers=tuple(replace(layer, recompute=one) for one in again),
                        vocab=vocab,
                        schedule=family.schedule,
                    )
                    if find_faults(plan, SMALL) or gaps(plan, PROGRAMS[options.trainer], SMALL):
                        continue
                    found = cost.predict(plan)
                    if max(stage.memory.total_mib for stage in found.stages) <= options.budget_mib:
                        best = min(best, found.time_s)
    return best


def bare(cost, options):
    return search(SMALL, cost, options.model_copy(update={"memory_constraint": 1000.0, "trainer": "galvatron"})).plan


@pytest.mark.parametrize("trainer", ["paddlenlp", "paddlefleet"])
@pytest.mark.parametrize("share", [1.0, 0.85, 0.7])
def test_no_plan_that_the_program_can_run_is_faster(trainer, share):
    roomy = asked(trainer, 1000)
    free = search(SMALL, cost_of(roomy), roomy).require()
    gib = share * max(stage.memory.total_mib for stage in free.prediction.stages) / 1024
    options = asked(trainer, gib)
    found = search(SMALL, cost_of(options), options)
    assert found.time_s == pytest.approx(fastest(options)) and (found.best is None or found.gap == 0)
    if found.best:
        arguments = {"paddlenlp": stock_arguments, "paddlefleet": fleet_arguments}[trainer]
        assert arguments(found.plan, SMALL)


def test_what_cannot_be_even_is_reported():
    with pytest.raises(UserError, match="max_virtual_pp_deg: for paddlenlp only one chunk"):
        SearchOptions.from_values({"trainer": "paddlenlp", "max_virtual_pp_deg": 2})
    odd = replace(SMALL, layers=3)
    options = asked("paddlenlp", 1000, max_pp_deg=4)
    assert search(odd, cost_of(options, odd), options).plan.pipeline == 1


@pytest.mark.parametrize("most", range(6))
@pytest.mark.parametrize("least", range(7))
def test_the_fewest_layers_that_recompute(most, least):
    tried: list[int] = []
    assert fewest(lambda count: tried.append(count) or count >= least, most) == (least if least <= most else None)
    assert all(count <= most for count in tried)
