"""Context parallelism's attention on one rank: causal by true positions, by a mask and by rows of flash attention."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("paddle")

import paddle
from paddlenlp.transformers.qwen2.modeling import Qwen2RotaryEmbedding, scaled_dot_product_attention

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.launch import gpus
from paddlenlp_galvatron.plan import Assumptions, LayerStrategy, ModelShape, Plan, VocabStrategy
from paddlenlp_galvatron.plan.layout import own_chunks
from paddlenlp_galvatron.runtime import attention, device, mappings, units, weights
from paddlenlp_galvatron.runtime.groups import RankGroups
from paddlenlp_galvatron.runtime.kernels import Kernels
from paddlenlp_galvatron.runtime.setup import ModelSetup
from paddlenlp_galvatron.runtime.stage import Stage
from paddlenlp_galvatron.runtime.weights import SeededWeights

LENGTH, HEADS, KV_HEADS, DIM = 24, 4, 2, 8


def group_of(ranks, use=""):
    return None if len(ranks) == 1 else SimpleNamespace(ranks=[*ranks], nranks=len(ranks), rank=0, id=0)


class Config:
    use_flash_attention = False
    attention_dropout = 0.0


def by_rows(query, key, value, rows, causal=False):
    """flashmask_attention without `causal` as Paddle documents it: in each column rows from the first number on and
    rows before the second one are hidden."""
    places = paddle.arange(query.shape[1], dtype="int32").reshape([1, 1, -1, 1])
    start, end = (part.transpose([0, 1, 3, 2]) for part in rows.split(2, axis=-1))
    hidden = paddle.logical_or(places >= start, places < end)
    mask = hidden.astype("float32") * -1e30
    key, value = (paddle.repeat_interleave(each, HEADS // KV_HEADS, axis=2) for each in (key, value))
    return scaled_dot_product_attention(query, Config, key, value, mask, False).reshape(query.shape)


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_mask_and_rows_of_flash_attention_give_what_a_whole_sample_has(degree, monkeypatch):
    monkeypatch.setattr(attention, "flashmask_attention", by_rows)
    query, key, value = (
        paddle.to_tensor(np.random.default_rng(seed).standard_normal((2, LENGTH, heads, DIM)).astype("float32"))
        for seed, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))
    )
    causal = paddle.triu(paddle.full([1, 1, LENGTH, LENGTH], -1e30), diagonal=1).expand([2, 1, -1, -1])
    repeated = [paddle.repeat_interleave(each, HEADS // KV_HEADS, axis=2) for each in (key, value)]
    whole = scaled_dot_product_attention(query, Config, *repeated, causal, False)
    for place in range(degree):
        chunks = own_chunks(place, degree, LENGTH)
        own, mask = attention.own_rows(query, chunks, 1), attention.own_rows(causal, chunks, 2)
        rows = attention.hidden_rows(chunks, LENGTH)
        masked = scaled_dot_product_attention(own, Config, *repeated, mask, False)
        rowwise = attention.flash(rows)(own, Config, key, value, None, False)
        for found in (masked, rowwise):
            np.testing.assert_allclose(found, attention.own_rows(whole, chunks, 1), atol=1e-6)


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_documents_of_a_row_do_not_see_each_other(degree, monkeypatch):
    """By a mask, and by the rows of flash attention as Paddle documents them, on each rank of a sample."""

    def rowwise(query, key, value, rows, causal=False):
        if not causal:
            return by_rows(query, key, value, rows, causal)
        own = paddle.arange(LENGTH, dtype="int32").reshape([1, 1, -1, 1])
        return by_rows(query, key, value, paddle.concat([rows, own.expand_as(rows)], axis=-1))

    monkeypatch.setattr(attention, "flashmask_attention", rowwise)
    ends = np.array([[5] * 5 + [14] * 9 + [LENGTH] * 10, [1] + [LENGTH - 1] * (LENGTH - 2) + [LENGTH]], np.int32)
    query, key, value = (
        paddle.to_tensor(np.random.default_rng(seed).standard_normal((2, LENGTH, heads, DIM)).astype("float32"))
        for seed, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))
    )
    repeated = [paddle.repeat_interleave(each, HEADS // KV_HEADS, axis=2) for each in (key, value)]
    alone = []
    for sample in range(2):
        parts, start = [], 0
        while start < LENGTH:
            stop = int(ends[sample, start])
            mask = paddle.triu(paddle.full([1, 1, stop - start, stop - start], -1e30), diagonal=1)
            cut = [each[sample : sample + 1, start:stop] for each in (query, *repeated)]
            parts.append(scaled_dot_product_attention(cut[0], Config, *cut[1:], mask, False))
            start = stop
        alone.append(paddle.concat(parts, axis=1))
    whole = paddle.concat(alone)
    for place in range(degree):
        chunks = own_chunks(place, degree, LENGTH) if degree > 1 else None
        own = attention.own_rows(query, chunks or [(0, LENGTH)], 1)
        expected = attention.own_rows(whole, chunks or [(0, LENGTH)], 1)
        for flash, keys in ((False, repeated), (True, (key, value))):
            attend = attention.Documents(chunks, LENGTH, flash).attention(
                paddle.to_tensor(ends), scaled_dot_product_attention
            )
            np.testing.assert_allclose(attend(own, Config, *keys, None, False), expected, atol=1e-6)


def test_rows_of_flash_attention_are_on_the_device_before_the_first_message(monkeypatch):
    """Flash attention itself runs on GPUs alone, where a copy in a step could wait for ever."""
    monkeypatch.setattr(attention, "flashmask_attention", by_rows)
    monkeypatch.setattr(mappings, "all_gather", lambda x, group: paddle.concat([x] * group.nranks))
    monkeypatch.setattr(units, "all_gather_first", lambda part, group: part.tile([group.nranks]))
    monkeypatch.setattr(weights, "broadcast", lambda tensor, group: None)
    attention.hidden_rows.cache_clear()
    layers, groups = (LayerStrategy(context=2),) * 2, SimpleNamespace(get=group_of)
    plan = Plan(2, 2, 1, (2,), layers, VocabStrategy(context=2), assumed=Assumptions(seq_length=LENGTH))
    shape = ModelShape("narrow", "qwen2", 2, HEADS * DIM, 64, HEADS, KV_HEADS, 32, LENGTH)
    source, kernels = SeededWeights(0, 0.02), Kernels(flash_attention=True)
    setup = ModelSetup.of(plan, shape, LENGTH, source=source, kernels=kernels)
    stage = Stage(setup, RankGroups(plan, 0, groups))
    (tokens,) = stage.take(np.zeros((1, LENGTH), np.int64))
    copied = []
    monkeypatch.setattr(device, "to_device", copied.append)
    assert stage.forward(None, tokens, tokens).shape == []
    assert attention.hidden_rows.cache_info().misses == 1 and not copied


def test_a_rank_turns_its_tokens_by_their_true_positions():
    table = Qwen2RotaryEmbedding(DIM, LENGTH)
    chunks = own_chunks(1, 3, LENGTH)
    own_tables = attention.OwnPositions(table, chunks)(paddle.zeros([1]), seq_len=8)
    for own, every in zip(own_tables, table(paddle.zeros([1]), LENGTH), strict=True):
        np.testing.assert_array_equal(own[0, :, 0], every.numpy()[0, [4, 5, 6, 7, 16, 17, 18, 19], 0])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_chunks_are_gathered_in_order_and_scattered_as_they_lay(monkeypatch, ranks):
    length = 4 * ranks
    whole = paddle.arange(2 * length * 3, dtype="float32").reshape([2, length, 3])
    own = [attention.own_rows(whole, own_chunks(place, ranks, length), 1) for place in range(ranks)]
    group, joined = SimpleNamespace(nranks=ranks), paddle.concat(own)
    monkeypatch.setattr(mappings, "all_gather", lambda _x, _group: joined)
    monkeypatch.setattr(mappings, "reduce_scatter", lambda grad, _group: grad)
    np.testing.assert_array_equal(mappings._gather_chunks(own[0], group), whole)
    np.testing.assert_array_equal(mappings._scatter_chunks(whole, group), joined)


def test_old_versions_of_paddle_are_refused_under_context_parallelism_with_flash_attention():
    plan = Plan(2, 2, 1, (1,), (LayerStrategy(1, context=2),))
    flash, one = Kernels(flash_attention=True), Plan(2, 2, 1, (1,), (LayerStrategy(2),))
    with pytest.raises(UserError, match=r"Paddle 3\.1\.1 .* install Paddle 3\.2"):
        flash.require_version(plan, "3.1.1")
    for kernels, of, version in ((flash, plan, "3.2.2"), (flash, plan, "3.10.0"), (flash, one, "3.1.1")):
        kernels.require_version(of, version)
    Kernels().require_version(plan, "3.1.1")


@pytest.mark.parametrize(
    ("version", "masked", "padded"),
    [
        pytest.param(2, False, True, id="FlashAttention 2"),
        pytest.param(3, False, False, id="FlashAttention 3"),
        pytest.param(3, True, True, id="FlashAttention 3, hidden rows"),
    ],
)
def test_narrow_values_are_padded_where_the_kernel_wants_them_as_wide_as_keys(monkeypatch, version, masked, padded):
    """And queries have the scale that no kernel takes: sizes of DeepSeek-V3 under YaRN."""
    seen = []

    def kernel(q, k, v, *_, causal):
        seen.append((q, v))
        out = v.expand([1, 2, 4, v.shape[-1]])
        return (out, None) if len(_) == 0 else out

    monkeypatch.setattr(paddle, "get_flags", lambda name: {name: version})
    monkeypatch.setattr(attention, "flash_attention", kernel)
    monkeypatch.setattr(attention, "flashmask_attention", kernel)
    q, k, v = paddle.ones([1, 2, 4, 192]), paddle.ones([1, 2, 4, 192]), paddle.rand([1, 2, 4, 128])
    attend = attention.flash(paddle.zeros([1, 1, 2, 2], "int32") if masked else None)
    for factor in (1.0, 1.25):
        out = attend(q, None, k, v, None, softmax_scale=factor * 192**-0.5, training=True)
        np.testing.assert_array_equal(out, v.flatten(2))
        scaled, value = seen.pop()
        assert value.shape[-1] == (192 if padded else 128)
        assert (scaled is q) == (factor == 1.0) and float(scaled.max()) == pytest.approx(factor)


def test_flash_attention_3_is_taken_where_its_variable_asks_and_refused_where_it_is_missing(monkeypatch):
    asked = {gpus.FLASH_VERSION: 3}
    monkeypatch.setattr(paddle, "get_flags", lambda name: {name: asked[name]})
    monkeypatch.setattr(attention, "flash_attention", lambda q, k, v, causal: (q + 3 * causal, None))
    monkeypatch.setattr(attention, "flashmask_attention", lambda q, k, v, rows, causal: q + 2 * causal)
    q = paddle.zeros([1, 2, 1, 1])
    hidden = paddle.zeros([1, 1, 2, 2], "int32")
    versions = [float(attention.flash(rows)(q, None, q, q).max()) for rows in (None, hidden)]
    assert versions == [3, 0]  # flashmask heeds the variable by itself
    asked[gpus.FLASH_VERSION] = 2
    assert attention.flash()(q, None, q, q).max() == 2
    plan, kernels = Plan(1, 1, 1, (1,), (LayerStrategy(),)), Kernels(flash_attention=True)
    monkeypatch.setenv(gpus.FLASH_VERSION, "3")
    with pytest.raises(UserError, match=r"FLAGS_flash_attn_version=3: .* Hopper.* Paddle 3\.2 .* unset"):
        kernels.require_version(plan, "3.1.1")
    Kernels().require_version(plan, "3.1.1")
    for capability, version, has in (((9, 0), "3.2.2", True), ((8, 0), "3.3.1", False), ((9, 0), "3.1.1", False)):
        monkeypatch.setattr(gpus, "gpu_count", lambda: 1)
        monkeypatch.setattr(paddle, "__version__", version)
        monkeypatch.setattr(paddle.device.cuda, "get_device_capability", lambda of=capability: of)
        assert gpus.has_flash_attention_3() is has
    monkeypatch.setattr(paddle, "__version__", "3.3.1")
    monkeypatch.setattr(paddle.device.cuda, "get_device_capability", lambda: (9, 0))
    kernels.require_version(plan, "3.3.1")
