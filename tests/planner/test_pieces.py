"""Whether the loss is computed by pieces of tokens is searched: where that saves memory for something better."""

from dataclasses import replace
from itertools import product
from math import inf

import pytest

from paddlenlp_galvatron.cost_model import derive
from paddlenlp_galvatron.plan import LayerStrategy, Recompute, load_model
from paddlenlp_galvatron.plan.export import FLEET, STOCK, gaps
from paddlenlp_galvatron.planner import search
from paddlenlp_galvatron.planner.options import SearchOptions
from paddlenlp_galvatron.planner.space import Space, families
from paddlenlp_galvatron.profiles.data_sheet import load_data_sheet

MODEL = replace(load_model("qwen2.5-0.5b"), layers=6)


def asked(gib: float, **more) -> SearchOptions:
    fixed = {"world_size": 1, "device": "h100-80gb", "settle_bsz": 32, "seq_length": 4096, "context_mib": 0, "gap": 0}
    return SearchOptions(memory_constraint=gib, **fixed | more)


def cost_of(options: SearchOptions):
    return derive(MODEL, load_data_sheet("h100-80gb"), 1, 1, options.assumptions, options.cost_options)


def fastest(options: SearchOptions, only_whole: bool = False) -> float:
    """The least step time, s, of every plan of one GPU that fits: equal layers, of which some recompute."""
    cost, best = cost_of(options), inf
    space, like = Space(MODEL, cost.assumed, options, cost), search(MODEL, cost, asked(1000)).plan
    for family in families(options, 1, MODEL.layers):
        for vocab, again in product(space.vocabularies(family), range(MODEL.layers + 1)):
            if only_whole and vocab.pieces > 1:
                continue
            layers = tuple(LayerStrategy(1, recompute=Recompute(n < again)) for n in range(MODEL.layers))
            layers = tuple(replace(layer, dp_type=like.default_dp_type) for layer in layers)
            plan = replace(like, micro_batches=family.micro_batches, layers=layers, vocab=vocab)
            found = cost.predict(plan)
            if max(stage.memory.total_mib for stage in found.stages) <= options.budget_mib:
                best = min(best, found.time_s)
    return best


@pytest.mark.parametrize(("gib", "by_pieces"), [(80, False), (10, True)])
def test_pieces_are_found_where_memory_is_short_and_nowhere_else(gib, by_pieces):
    options = asked(gib)
    found = search(MODEL, cost_of(options), options)
    assert (found.plan.vocab.pieces > 1) == by_pieces and found.gap < 1e-9
    assert found.time_s == pytest.approx(fastest(options))
    assert (found.time_s < 0.99 * fastest(options, only_whole=True)) == by_pieces


def test_few_tokens_are_one_piece_and_other_programs_have_no_pieces():
    for options in (asked(10, settle_bsz=1, seq_length=2048), asked(10, trainer="paddlenlp")):
        space = Space(MODEL, options.assumptions, options)
        assert all(vocab.pieces == 1 for family in families(options, 1, 6) for vocab in space.vocabularies(family))


@pytest.mark.parametrize("program", [STOCK, FLEET])
def test_pieces_cannot_be_exported(program):
    plan = search(MODEL, cost_of(asked(80)), asked(80)).plan
    by_pieces = replace(plan, vocab=replace(plan.vocab, pieces=4))
    [gap] = set(gaps(by_pieces, program, MODEL)) - set(gaps(plan, program, MODEL))
    assert gap.startswith("loss_pieces: ") and program in gap
