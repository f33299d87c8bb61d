import pytest

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.measure.options import HardwareOptions, PointOptions, measured_model, runnable_degrees, thinned
from paddlenlp_galvatron.options.model_options import ModelOptions
from paddlenlp_galvatron.plan import ModelShape

MODEL = ModelOptions(model_size="llama2-7b")
BATCHES = {"profile_min_batch_size": 2, "profile_max_batch_size": 7, "profile_batch_size_step": 2}


def points(known: ModelOptions = MODEL, **given):
    return measured_model(PointOptions.from_mapping(given), known)[1]


def test_modes_are_galvatrons():
    assert points(profile_batch_size=8, profile_fixed_seq_length_list="512") == [(8, 512)]
    assert points(profile_mode="batch", profile_seq_length_list="512,1024", **BATCHES) == [
        (2, 512), (4, 512), (6, 512), (2, 1024), (4, 1024), (6, 1024),
    ]  # fmt: skip
    assert points(profile_mode="sequence") == [(1, 512), (1, 1024), (1, 1536), (1, 2048)]


def test_samples_are_as_long_as_the_model_takes_or_4096():
    assert points() == [(1, 4096)]
    assert points(ModelOptions(model_size="llama2-7b", seq_length=1024)) == [(1, 1024)]
    assert points(ModelOptions(model_size="llama2-7b", set_seqlen_manually=False)) == [(1, 4096)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"profile_batch_size": 0}, "profile_batch_size"),
        ({"profile_seq_length_list": "many"}, "profile_seq_length_list"),
        ({"profile_seq_length_list": "512,0"}, "profile_seq_length_list"),
        ({"profile_seq_length_list": "5000"}, "beyond the 4096 positions of llama2-7b"),
        ({"profile_mode": "batch", "profile_min_batch_size": 9}, "profile_max_batch_size: 8 is below"),
        ({"profile_mode": "sequence", "profile_min_seq_length": 4096}, "profile_max_seq_length: 2048 is below"),
        ({"profile_mode": "all"}, "profile_mode"),
        ({"profile_unit": "mlp"}, "profile_unit: mlp is not supported"),
        ({"bf16": 1, "mixed_precision": "fp16"}, "contradict each other"),
        ({"profile_for": "galvatron", "time_budget_s": 5}, "time_budget_s: leaves sizes out"),
    ],
)
def test_mistakes_are_named(given, message):
    with pytest.raises(UserError, match=message):
        points(**given)


def test_message_sizes_rise_from_what_costs_next_to_nothing():
    options = HardwareOptions.from_mapping({"start_mb": 1, "end_mb": 9, "scale": 2})
    assert options.sizes_mib == [1 / 64, 1 / 16, 1 / 4, 1, 2, 4, 8]
    assert HardwareOptions(start_mb=0.125, end_mb=1, scale=4).sizes_mib == [1 / 64, 1 / 16, 0.125, 0.5]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"envs": "NCCL_DEBUG"}, "envs: .*no variable; give NAME=VALUE"),
        ({"end_mb": 0.5}, "end_mb"),
        ({"parts": "allreduce,p2q"}, "parts"),
        ({"scale": 1}, "scale"),
    ],
)
def test_mistakes_of_hardware_are_named(given, message):
    with pytest.raises(UserError, match=message):
        HardwareOptions.from_mapping(given)


def test_thinned_sizes_keep_both_ends():
    assert thinned([1, 2, 3, 4, 5, 6, 7, 8], 2) == [1, 2, 4, 8]
    assert thinned([1, 2, 4, 8, 16, 32], 4) == [1, 4, 32]
    assert thinned([3, 4], 2) == [3, 4] and thinned([3], 2) == [3]


def test_degrees_are_those_that_model_and_world_allow():
    shape = ModelShape("m", "llama", 2, 48, 96, heads=6, kv_heads=6, vocab_size=100, max_position_embeddings=64)
    assert runnable_degrees(shape, 12, 12, [32, 64]) == [1, 2]  # 3 and 6 do not split 32 tokens; 4 and 12 not 6 heads
    assert runnable_degrees(shape, 12, 12, [36]) == [1, 2, 3, 6]
    assert runnable_degrees(shape, 12, 2, [36]) == [1, 2]
    assert runnable_degrees(shape, 1, 6, [36]) == [1, 2, 3, 6]  # one process stands for a rank of any world
    with pytest.raises(UserError, match="positions"):
        runnable_degrees(shape, 1, 1, [65])
