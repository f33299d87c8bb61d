"""Models of several layer types: own widths, own sequence lengths, and what is handed on between them."""

from dataclasses import replace

import pytest
from cost_examples import NARROW, SEQ, WIDE, example_plan, one_node, two_types

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.cost_model import StageSetting
from paddlenlp_galvatron.plan import DataParallel, LayerStrategy, VocabStrategy

STAGE = StageSetting(8, 16, 2, 1)
NARROW_MIB = 16 * SEQ * 1024 * 2 / 2**20  # tokens of a micro-batch in bf16
WIDE_MIB = 16 * SEQ // 4 * 2048 * 2 / 2**20


def message_ms(mib: float) -> float:
    return 0.05 + 0.01 * mib


def test_each_type_is_priced_at_its_own_width_and_length():
    model = two_types()
    for kind, (compute_ms, mib) in enumerate(((0.1 + 0.4 * 8, NARROW_MIB), (2 * (0.1 + 0.4 * 8), WIDE_MIB))):
        layer = model.layer_cost(LayerStrategy(4), STAGE, kind)
        # Eight samples of each of two dp shares; two all-gathers and two reduce-scatters of half the tokens.
        assert layer.forward_ms == pytest.approx(compute_ms / 4 + 4 * message_ms(mib / 2), rel=0.1)
        assert layer.forward_ms == pytest.approx(
            model.profiles.times.layer(kind, 8, SEQ // 4**kind, 4).forward_ms + 4 * message_ms(mib / 2)
        )
    narrow, wide = (model.layer_cost(LayerStrategy(1), STAGE, kind) for kind in (0, 1))
    assert wide.states_mib / narrow.states_mib == pytest.approx(
        WIDE.layer_parameters / NARROW.layer_parameters, rel=1e-3
    )


def test_a_type_prices_as_a_model_of_it_alone_does():
    typed, alone = two_types(), one_node(model=NARROW)
    for strategy in (LayerStrategy(4), LayerStrategy(2, ulysses=True, dp_type=DataParallel.ZERO3, recompute=True)):
        assert typed.layer_cost(strategy, STAGE) == alone.layer_cost(strategy, STAGE)
    split, whole = LayerStrategy(), LayerStrategy(4)
    typed, alone = two_types(sequence_parallel=False), one_node(model=NARROW, sequence_parallel=False)
    assert typed.switch_cost(split, whole, STAGE) == alone.switch_cost(split, whole, STAGE)
    assert typed.boundary_cost(StageSetting(8, 16, 2, 2)) == alone.boundary_cost(StageSetting(8, 16, 2, 2))


def test_between_types_the_smaller_tokens_cross():
    assert [two_types().crossing_type(layer) for layer in range(5)] == [0, 0, 1, 1, 1]
    swapped = (replace(NARROW, seq_length=SEQ // 4), replace(WIDE, seq_length=SEQ))
    assert [two_types(swapped).crossing_type(layer) for layer in range(5)] == [0, 0, 0, 1, 1]


def test_a_plans_switches_and_hand_overs_are_those_of_the_tokens_that_cross():
    model = two_types(sequence_parallel=False)
    split, whole = LayerStrategy(), LayerStrategy(4)
    hops = [
        model.predict(example_plan(model, stages=stages, layers=(split,) * 4)).stages[0].send_ms
        for stages in ((1, 3), (2, 2), (3, 1))
    ]
    assert hops == pytest.approx([message_ms(NARROW_MIB / 4), message_ms(WIDE_MIB / 4), message_ms(WIDE_MIB / 4)])
    for layers, mib in (((split, whole, whole, whole), NARROW_MIB), ((split, split, whole, whole), WIDE_MIB)):
        plan = example_plan(model, layers=layers)
        parts = model.stage_parts(plan, 0)
        switched = model.predict(plan).stages[0].forward_ms - sum(part.forward_ms for part in parts)
        assert switched == pytest.approx(message_ms(mib / 2))


def test_the_embedding_is_of_the_first_type_and_the_head_of_the_last():
    model = two_types()
    first, last, only = (model.vocab_cost(VocabStrategy(4), STAGE, role) for role in ("first", "last", "only"))
    assert first.forward_ms == pytest.approx(message_ms(NARROW_MIB / 2))  # the lookup's reduce-scatter
    loss_ms = 3 * message_ms(8 * SEQ // 4 * 4 / 2**20)
    compute_ms = model.profiles.times.head(8, SEQ // 4, 4).forward_ms
    assert last.forward_ms == pytest.approx(compute_ms + message_ms(WIDE_MIB / 2) + loss_ms)
    assert only.forward_ms == pytest.approx(first.forward_ms + last.forward_ms)


def test_tied_embeddings_of_two_widths_are_refused():
    tied = tuple(replace(shape, tied_embeddings=True) for shape in (NARROW, WIDE))
    with pytest.raises(UserError, match="hidden_size_list: embedding and LM head share their weights"):
        two_types(tied)
