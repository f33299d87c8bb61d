import pytest

from paddlenlp_galvatron.plan import ModelShape, UserError
from paddlenlp_galvatron.profiler.points import ProfileMode, Steps, points, runnable_degrees

BATCHES, LENGTHS = Steps(2, 7, 2), Steps(512, 2048, 512)


def test_modes_are_galvatrons():
    assert points(ProfileMode.STATIC, 8, BATCHES, "512", LENGTHS) == [(8, 512)]
    assert points(ProfileMode.BATCH, 8, BATCHES, "[512,1024]", LENGTHS) == [
        (2, 512), (4, 512), (6, 512), (2, 1024), (4, 1024), (6, 1024),
    ]  # fmt: skip
    assert points(ProfileMode.SEQUENCE, 1, BATCHES, "512", LENGTHS) == [(1, 512), (1, 1024), (1, 1536), (1, 2048)]


@pytest.mark.parametrize(
    ("mode", "batch", "batches", "lengths", "message"),
    [
        ("static", 0, BATCHES, "512", "profile_batch_size"),
        ("static", 1, BATCHES, "many", "profile_seq_length_list"),
        ("static", 1, BATCHES, "512,0", "profile_seq_length_list"),
        ("batch", 1, Steps(4, 2, 1), "512", "profile_min_batch_size"),
        ("batch", 1, Steps(1, 2, 0), "512", "profile_min_batch_size"),
        ("sequence", 1, BATCHES, "512", "profile_min_seq_length"),
    ],
)
def test_mistakes_are_named(mode, batch, batches, lengths, message):
    with pytest.raises(UserError, match=message):
        points(ProfileMode(mode), batch, batches, lengths, Steps(0, 8, 1))


def test_degrees_are_those_that_model_and_world_allow():
    shape = ModelShape("m", "llama", 2, 48, 96, heads=6, kv_heads=6, vocab_size=100, max_position_embeddings=64)
    assert runnable_degrees(shape, 12, 12, [32, 64]) == [1, 2]  # 3 and 6 do not split 32 tokens; 4 and 12 not 6 heads
    assert runnable_degrees(shape, 12, 12, [36]) == [1, 2, 3, 6]
    assert runnable_degrees(shape, 12, 2, [36]) == [1, 2]
    with pytest.raises(UserError, match="positions"):
        runnable_degrees(shape, 1, 1, [65])
