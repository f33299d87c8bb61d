import gc
from dataclasses import replace

import pytest

from paddlenlp_galvatron.measure.journal import Journal
from paddlenlp_galvatron.measure.memory import MemoryProfiler
from paddlenlp_galvatron.measure.part import ExpertsPart
from paddlenlp_galvatron.plan import Precision
from paddlenlp_galvatron.profiles import MemoryProfile, Meta, PassKey, Variant, VocabVariant
from paddlenlp_galvatron.runtime import device

MIB = 2**20
SAMPLES, SEQ = 2, 32


@pytest.fixture(scope="module")
def profile(shape, family) -> MemoryProfile:
    return MemoryProfiler([shape], Journal(), SAMPLES).measure([SEQ], [1, 2, 4], Meta(), lambda _: None)


def test_weights_are_those_of_the_model(shape, profile):
    layer = profile.layers[Variant(0, True)][SEQ]
    assert layer.parameter_mib * MIB == 4 * shape.layer_parameters
    only = profile.vocab[VocabVariant("only", True)][SEQ]
    for tp in (1, 2, 4):
        tables = 2 * shape.padded_vocab_size(tp) // tp * shape.hidden_size
        assert only.states_mib[tp] * MIB == 16 * (tables + shape.hidden_size)


def test_recompute_keeps_a_layers_input_alone(shape, profile):
    for sequence_parallel in (True, False):
        checkpoint = profile.layers[Variant(0, sequence_parallel)][SEQ].checkpoint_mib
        assert checkpoint * MIB == 4 * SEQ * shape.hidden_size


def test_activations_shrink_with_the_degree_and_more_so_with_megatron_sp(profile):
    plain = profile.layers[Variant(0, False)][SEQ].activation_mib
    split = profile.layers[Variant(0, True)][SEQ].activation_mib
    assert plain[1] == split[1]
    assert plain[1] > plain[2] > plain[4]
    for tp in (2, 4):
        assert split[1] / tp <= split[tp] < plain[tp]


def test_activations_are_at_least_what_any_implementation_keeps(shape, profile):
    """Inputs of the norms and of the seven projections, without which no gradient can be computed."""
    head_dim = shape.hidden_size // shape.heads
    floats = SEQ * (4 * shape.hidden_size + shape.intermediate_size + 2 * shape.kv_heads * head_dim)
    kept = profile.layers[Variant(0, True)][SEQ].activation_mib[1]
    assert 4 * floats <= kept * MIB <= 8 * 4 * floats


def test_the_loss_counts_at_the_last_stage(shape, profile):
    logits_mib = 4 * SEQ * shape.vocab_size / MIB
    for role, least in (("first", 0), ("last", 2 * logits_mib), ("only", 2 * logits_mib)):
        assert profile.vocab[VocabVariant(role, True)][SEQ].activation_mib[1] >= least
    first = profile.vocab[VocabVariant("first", True)][SEQ].activation_mib
    assert first[1] < logits_mib


def test_experts_keep_what_is_priced(mixture):
    """Their input and three numbers a column, of each row; next to it are places of rows, and here their output."""
    part = ExpertsPart(mixture, PassKey("experts4", 1, 256, 1), Precision.FP32)
    part.forward()
    part.backward()
    gc.collect()
    device.release()
    start = device.allocated_mib()
    part.forward()
    kept = (device.allocated_mib() - start) * MIB / 4
    rows, priced = 2 * 256, mixture.routed.sublayers[0].kept
    numbers = rows * (priced.tokens + priced.split) + 256 * mixture.hidden_size
    assert numbers < kept < 1.1 * numbers


def test_measuring_again_gives_the_same_bytes(shape, family, profile):
    again = MemoryProfiler([shape], Journal(), SAMPLES).measure([SEQ], [1, 2, 4], Meta(), lambda _: None)
    assert again == profile


def test_of_several_layer_types_the_ends_are_those_of_the_first_and_the_last(shape, family):
    wide = replace(shape, hidden_size=128, intermediate_size=192, seq_length=16)
    found = MemoryProfiler([shape, wide], Journal(), 1).measure([SEQ], [1, 2], Meta(), lambda _: None)
    assert {(variant.layer_type, *lengths) for variant, lengths in found.layers.items()} == {(0, SEQ), (1, 16)}
    assert found.layers[Variant(1, True)][16].parameter_mib * MIB == 4 * wide.layer_parameters
    first, last, only = (found.vocab[VocabVariant(role, True)] for role in ("first", "last", "only"))
    assert (set(first), set(last), set(only)) == ({SEQ}, {16}, {16})
    assert only[16].states_mib[1] == first[SEQ].states_mib[1] + last[16].states_mib[1]
    assert only[16].activation_mib[2] == first[SEQ].kept_mib[2] + last[16].activation_mib[2]
