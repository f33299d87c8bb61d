"""Layers that recompute some of their parts: between those that recompute nothing and those that recompute all."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import MODEL

from paddlenlp_galvatron.cost_model import CostModel, StageSetting, derive
from paddlenlp_galvatron.cost_model.collectives import Setting, layer_calls
from paddlenlp_galvatron.cost_model.traffic import NAMES
from paddlenlp_galvatron.cost_model.weights import StateBytes
from paddlenlp_galvatron.measure.part import Extent
from paddlenlp_galvatron.model import load_model
from paddlenlp_galvatron.model.layer import APART, PARTLY, TOGETHER
from paddlenlp_galvatron.plan import Assumptions, LayerStrategy, Precision, Recompute
from paddlenlp_galvatron.plan.comm_points import repeated
from paddlenlp_galvatron.plan.precision import NumberTypes
from paddlenlp_galvatron.profiles.compute_time import ComputeTimes
from paddlenlp_galvatron.profiles.data_sheet import load_data_sheet

STAGE = StageSetting(8, 8, 4, 1)


def h100(model: str = "llama3-8b", flash: bool = True, megatron_sp: bool = True) -> CostModel:
    assumed = Assumptions(megatron_sp, Precision.BF16, seq_length=4096, flash_attention=flash)
    return derive(load_model(model), load_data_sheet("h100-80gb"), 1, 8, assumed)


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("model", ["llama3-8b", "llama2-7b", "qwen2.5-7b", "qwen3-8b"])
def test_more_parts_keep_less_and_take_longer(model, tp, flash):
    cost = h100(model, flash)
    every = (Recompute.NONE, Recompute.FULL, *PARTLY)
    of = {each: cost.layer_cost(LayerStrategy(tp, recompute=each), STAGE) for each in every}
    for more, price in of.items():
        for less, other in of.items():
            if less in more and less is not more:
                assert (
                    price.activation_mib < other.activation_mib and price.passes_ms.backward > other.passes_ms.backward
                )
        assert price.activation_mib >= of[Recompute.FULL].activation_mib
        assert price.passes_ms.backward <= of[Recompute.FULL].passes_ms.backward
        held = price.activation_mib + price.workspace.total_mib  # recomputed tensors exist at one time or the other
        assert held == pytest.approx(
            of[Recompute.NONE].activation_mib + of[Recompute.NONE].workspace.total_mib, rel=0.1
        ) or (more is Recompute.FULL)


MIB = 1 << 20
OF_MODULES = {  # model, layer type, module -> bytes that a rank of 8 frees, and operations that it repeats, by hand
    "mlp of llama3-8b": ("llama3-8b", Recompute.SUBLAYER, 4096 * 3 * 14336 * 2, 4096 * 6 * 4096 * 14336),
    # 8 rows a token, of which the busiest rank of 8 has twice the mean; gate and up of 768 columns
    "moe_gate_up of qwen3-30b-a3b": (
        "qwen3-30b-a3b",
        Recompute.GATE_UP,
        4096 * 8 * 2 * 2 * 768 * 2,
        1.2 * 4096 * 8 * 4 * 2048 * 768,
    ),
    # rows, their three products and their copies; in fp32 scores of 128 experts and four numbers of each of 8
    "mlp of qwen3-30b-a3b": (
        "qwen3-30b-a3b",
        Recompute.SUBLAYER,
        4096 * 8 * 2 * (2048 + 3 * 768) * 2 + 4096 * (128 + 32) * 4,
        1.2 * 4096 * 8 * 6 * 2048 * 768 + 4096 * 2 * 2048 * 128,
    ),
}


@pytest.mark.parametrize(("name", "module", "freed", "flops"), OF_MODULES.values(), ids=OF_MODULES)
def test_modules_of_paddlefleet_free_and_repeat_what_their_tensors_have(name, module, freed, flops):
    cost = h100(name)
    none, some, full = (
        cost.layer_cost(LayerStrategy(recompute=each, ep=8 if "30b" in name else 1), STAGE)
        for each in (Recompute.NONE, module, Recompute.FULL)
    )
    assert (none.activation_mib - some.activation_mib) * MIB == pytest.approx(freed, rel=0.01)
    assert full.activation_mib < some.activation_mib and some.passes_ms.backward < full.passes_ms.backward
    least_ms = (
        flops / 989e9
    )  # at the peak of H100, of which wide products reach half, those of narrow experts a quarter
    assert least_ms < some.terms.passes.backward.recompute_ms < (2 if name == "llama3-8b" else 5) * least_ms


# Bytes that a token keeps where nothing recomputes, by hand: of two norms inputs and outputs, of attention q, k, v and
# its output (Qwen3: q and k in front of their norms, too), of the MLP gate, up and their product; in fp32 a number of
# each norm's row and of each head, and the router's. Experts: rows and columns of moe_gate_up, as above.
KEPT = {
    "llama3-8b": 2 * (4 * 4096 + (4096 + 2 * 1024) + 4096 + 3 * 14336) + 4 * (2 + 32),
    "qwen3-30b-a3b": 2 * (4 * 2048 + (2 * 4096 + 3 * 512) + 4096 + 8 * 2 * (2048 + 3 * 768)) + 4 * (2 + 68 + 128 + 32),
}


@pytest.mark.parametrize(("name", "bytes_of_token"), KEPT.items(), ids=KEPT)
def test_a_layer_keeps_what_its_tensors_have(name, bytes_of_token):
    layer = LayerStrategy(ep=8 if "30b" in name else 1)
    assert h100(name).layer_cost(layer, STAGE).activation_mib * MIB / 4096 == pytest.approx(bytes_of_token, rel=1e-3)


@given(
    st.sampled_from(["llama3-8b", "qwen3-8b", "qwen3-30b-a3b", "glm-4.5-air", "deepseek-v3", "mixtral-8x7b"]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 8]),
    st.booleans(),
    st.booleans(),
)
def test_parts_free_and_repeat_no_more_than_the_layer(name, tp, ep, flash, megatron_sp):
    """Attention's core with either form of the MLP; and gate and up, which are within the sublayer."""
    cost = h100(name, flash, megatron_sp)
    for kind, model in enumerate(cost.models):
        plain = LayerStrategy(tp, ep=ep if model.experts else 1)

        def effect(recompute: Recompute, plain=plain, kind=kind) -> tuple[float, float]:
            none, again = (cost.layer_cost(replace(plain, recompute=each), STAGE, kind) for each in (0, recompute))
            return none.activation_mib - again.activation_mib, again.passes_ms.backward - none.passes_ms.backward

        full, attention, sublayer = map(effect, (Recompute.FULL, Recompute.ATTENTION, Recompute.SUBLAYER))
        pairs = [(effect(TOGETHER), attention, full), (sublayer, attention, full)]
        pairs += [(effect(Recompute.GATE_UP), (0.0, 0.0), sublayer)] * bool(model.experts)
        for part, other, whole in pairs:
            assert all(0 <= one + two <= most * (1 + 1e-9) for one, two, most in zip(part, other, whole, strict=True))


@pytest.mark.parametrize("name", ["llama3-8b", "qwen3-30b-a3b"])
def test_modules_repeat_their_own_collectives(name):
    """Whole sublayers those of the MLP, or the experts' exchange; gate and up none."""
    cost, tp, ep = h100(name), 2 if name == "llama3-8b" else 1, 1 if name == "llama3-8b" else 8

    def messages_ms(recompute: Recompute) -> float:
        terms = cost.layer_cost(LayerStrategy(tp, recompute=recompute, ep=ep), STAGE).terms
        return terms.passes.backward.tensor_ms + terms.passes.backward.expert_ms

    none, sublayer, full = map(messages_ms, (Recompute.NONE, Recompute.SUBLAYER, Recompute.FULL))
    assert none < sublayer <= full
    if ep > 1:
        assert messages_ms(Recompute.GATE_UP) == none


def test_norms_cost_little_and_spare_much():
    """Why recompute by parts pays: a third of the activations for a tenth of the time of recomputing all."""
    cost = h100("llama2-7b")
    none, norms, full = (
        cost.layer_cost(LayerStrategy(recompute=each), STAGE)
        for each in (Recompute.NONE, Recompute.NORMS, Recompute.FULL)
    )
    assert 1 - norms.activation_mib / none.activation_mib > 0.28
    assert (norms.passes_ms.backward - none.passes_ms.backward) / (
        full.passes_ms.backward - none.passes_ms.backward
    ) < 0.15


def test_collectives_that_are_repeated_are_paid_for():
    """Megatron-SP gathers tokens again in any case: hidden behind products, but where the MLP is made again of them."""
    cost = h100()
    none, norms, mlp, full = (
        cost.layer_cost(LayerStrategy(4, recompute=each), STAGE).terms
        for each in (Recompute.NONE, Recompute.NORMS, Recompute.MLP, Recompute.FULL)
    )
    assert (
        none.passes.backward.tensor_ms
        == norms.passes.backward.tensor_ms
        < mlp.passes.backward.tensor_ms
        < full.passes.backward.tensor_ms
    )
    # Two gathers and two scatters, which take as long, of which the MLP's gather is in the way, then both.
    assert none.tensor_hidden_ms > mlp.tensor_hidden_ms > full.tensor_hidden_ms > 0
    in_the_way = full.passes.forward.tensor_ms / 4
    assert full.passes.backward.tensor_ms + full.tensor_hidden_ms == pytest.approx(8 * in_the_way)
    assert none.passes.backward.tensor_ms + none.tensor_hidden_ms == pytest.approx(6 * in_the_way)
    assert repeated(Recompute.NORMS | Recompute.ATTENTION) == repeated(Recompute.NORMS) | repeated(Recompute.ATTENTION)


def test_figures_that_a_profile_lacks_are_derived():
    """Bytes as a share of measured ones, times as a share of recomputing all."""
    measured = h100()
    profile = measured.profiles.times.profile
    passes = {key: replace(times, shares={}) for key, times in profile.passes.items()}
    profiles = replace(measured.profiles, times=ComputeTimes(replace(profile, passes=passes)))
    without = CostModel(measured.given, profiles, measured.assumed, measured.options)
    for parts in APART:
        layer = LayerStrategy(2, recompute=parts)
        derived, known = (model.layer_cost(layer, STAGE) for model in (without, measured))
        assert derived.activation_mib == known.activation_mib
        assert derived.passes_ms.backward == pytest.approx(known.passes_ms.backward, rel=0.03)


@pytest.mark.parametrize("megatron_sp", [True, False])
def test_the_runtime_calls_what_is_priced(megatron_sp):
    """To the byte, of one rank of a tensor-parallel pair whose peer is silent."""
    pytest.importorskip("paddle")
    from paddlenlp_galvatron.measure.part import MeasuredPart
    from paddlenlp_galvatron.runtime import collectives

    shape = replace(MODEL, vocab_size=64)
    assumed = Assumptions(megatron_sp, seq_length=8)
    setting = Setting(2, 2, True, 1, 8, assumed, StateBytes.of(NumberTypes.of(Precision.FP32)))
    for recompute in (Recompute.NONE, Recompute.FULL, *PARTLY):
        strategy = LayerStrategy(2, recompute=recompute)
        part = MeasuredPart(shape, Assumptions(megatron_sp, seq_length=8), 2, Extent(layers=1), strategy)
        collectives.forget_traffic()
        part.forward()
        part.backward()
        calls = layer_calls(shape, strategy, setting)
        priced: Counter[str] = Counter()
        for call in calls.points:
            priced[NAMES[call.kind]] += call.bytes * call.times
        del collectives.traffic_bytes["all_to_all"]  # of tokens that change their layout at the edges
        assert collectives.traffic_bytes == priced, recompute
