"""Fused kernels compute the same as plain operations, and are used where a plan says so."""

import platform

import numpy as np
import pytest

pytest.importorskip("paddle")

import paddle
from operators import require
from paddle.incubate.nn.functional import swiglu as fused_swiglu
from paddlenlp.transformers.llama.modeling import apply_rotary_pos_emb

from paddlenlp_galvatron.base import processor
from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.check.gpu.kernels import CASES, ON_CPU, difference
from paddlenlp_galvatron.measure.part import CheapWeights, FakeGroups
from paddlenlp_galvatron.model import TRAINED
from paddlenlp_galvatron.options.uniform import uniform_plan
from paddlenlp_galvatron.plan import Assumptions, ModelShape, Precision, with_defaults
from paddlenlp_galvatron.runtime import cross_entropy
from paddlenlp_galvatron.runtime.adapters import load_family
from paddlenlp_galvatron.runtime.adapters.qwen2 import HeadNorm
from paddlenlp_galvatron.runtime.groups import RankGroups
from paddlenlp_galvatron.runtime.kernels import Kernels, rms_norm
from paddlenlp_galvatron.runtime.paddle_private import MultiTensorAdamW
from paddlenlp_galvatron.runtime.setup import ModelSetup
from paddlenlp_galvatron.runtime.stage import Stage

SEQ = 8
ALL = Kernels(True, True, True, True)
DENSE = [name for name, family in TRAINED.items() if not family.mixture]  # the others have the attention of these


def shape(family: str = "llama", vocab_size: int = 64) -> ModelShape:
    return ModelShape("small", family, 1, 32, 48, heads=4, kv_heads=2, vocab_size=vocab_size, max_position_embeddings=8)


@pytest.mark.parametrize("family", DENSE)
def test_paddlenlps_layers_are_given_which_kernels(family):
    adapter, names = load_family(family), ("use_flash_attention", "use_fused_rope", "use_fused_rms_norm")
    for kernels, reported in ((ALL, True), (Kernels(), False)):
        config = adapter.config(shape(family), SEQ, kernels)
        assert [getattr(config, name) for name in names] == [reported] * 3


def test_norms_are_the_same_by_paddles_kernel():
    x = paddle.randn([6, 32])
    require("fused_rms_norm", lambda: rms_norm(x, paddle.ones([32]), 1e-6))
    try:
        rms_norm(x, paddle.ones([32]), 1e-6)
    except (RuntimeError, UserError) as error:  # it is Paddle's on GPUs only, or needs AVX-512
        pytest.skip(str(error))
    for family in DENSE:
        adapter = load_family(family)
        plain, fused = (adapter.final_norm(adapter.config(shape(family), SEQ, kernels)) for kernels in (Kernels(), ALL))
        plain.weight.set_value(paddle.randn([32]))
        fused.weight.set_value(plain.weight)
        assert fused(x).numpy() == pytest.approx(plain(x).numpy(), abs=1e-5)
    of, adapter = shape("qwen3"), load_family("qwen3")
    plain, fused = (HeadNorm(of, adapter.config(of, SEQ, kernels)) for kernels in (Kernels(), ALL))
    assert fused(x).numpy() == pytest.approx(plain(x).numpy(), abs=1e-5)


def test_no_kernel_is_called_on_a_processor_that_lacks_its_instructions(monkeypatch, tmp_path):
    def called(*_):
        raise AssertionError("this would end the process")

    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags : fpu avx avx2 fma\n")
    monkeypatch.setattr(processor, "CPUINFO", cpuinfo)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr("paddlenlp_galvatron.runtime.kernels.fused_rms_norm", called)
    adapter = load_family("llama")
    fused = adapter.final_norm(adapter.config(shape(), SEQ, ALL))
    with pytest.raises(UserError, match=r"use_fused_rms_norm: .* needs AVX-512, which this processor lacks"):
        fused(paddle.randn([6, 32]))
    with pytest.raises(UserError, match="this processor lacks"):
        difference(CASES["RMSNorm"](ON_CPU), ON_CPU.dtype)


def test_swiglu_is_a_gated_silu():
    x, y = paddle.randn([5, 6]), paddle.randn([5, 6])
    require("swiglu", lambda: fused_swiglu(x, y))
    assert fused_swiglu(x, y).numpy() == pytest.approx((paddle.nn.functional.silu(x) * y).numpy(), abs=1e-6)


@pytest.mark.parametrize("family", DENSE)
def test_plain_positions_are_what_the_fused_kernel_documents(family):
    """Halves of each head turned against each other, q and k of unlike numbers of heads."""
    layer = load_family(family).decoder_layer(shape(family), load_family(family).config(shape(family), SEQ))
    q, k = paddle.randn([2, SEQ, 4, 8]), paddle.randn([2, SEQ, 2, 8])
    cos, sin = layer.self_attn.rotary_emb(k, seq_len=SEQ)
    for plain, x in zip(apply_rotary_pos_emb(q, k, cos, sin, None), (q, k), strict=True):
        first, second = np.split(x.numpy(), 2, axis=-1)
        turned = np.concatenate([-second, first], axis=-1)
        assert plain.numpy() == pytest.approx(x.numpy() * cos.numpy() + turned * sin.numpy(), abs=1e-6)


@pytest.mark.parametrize(("vocab_size", "fused"), [(64, True), (63, False)], ids=["even", "padded"])
def test_a_split_vocabularys_loss_goes_to_paddles_kernel_where_no_column_is_padding(monkeypatch, vocab_size, fused):
    """The kernel's result respects groups, types and labels as they are passed."""
    reported = {}

    def kernel(logits, labels, group, ignored):
        reported.update(group=group, ignored=ignored, shape=logits.shape, type=logits.dtype, labels=labels.shape)
        return logits, logits[:, :1]

    monkeypatch.setattr(cross_entropy, "fused_loss", kernel)
    of = shape(vocab_size=vocab_size)
    plan = uniform_plan(
        layers=1,
        world_size=2,
        global_train_batch_size=1,
        global_tp_deg=2,
        vocab_tp=2,
        assumed=Assumptions(seq_length=SEQ),
    )
    kernels = Kernels(fused_cross_entropy=True)
    setup = ModelSetup.of(plan, of, SEQ, source=CheapWeights(0.02), kernels=kernels)
    stage = Stage(setup, RankGroups(plan, 0, FakeGroups()))
    stage._head.loss(paddle.randn([SEQ, 32]), paddle.zeros([SEQ], "int64"))
    if not fused:
        assert not reported
        return
    assert (reported["ignored"], reported["shape"], reported["labels"]) == (-100, [SEQ, 32], [SEQ])
    assert reported["type"] == paddle.float32 and list(reported["group"].ranks) == [0, 1]


def test_gpus_use_them_by_default_and_cpus_never():
    plan = uniform_plan(layers=1, world_size=1, global_train_batch_size=1, assumed=Assumptions(seq_length=SEQ))
    assert plan.assumed.mixed_precision is Precision.FP32
    on_gpus = with_defaults(plan, on_gpus=True).assumed
    assert (on_gpus.fused_rope, on_gpus.fused_rms_norm) == (True, True)
    assert not on_gpus.fused_cross_entropy  # until somebody has seen it run
    assert Kernels.of(on_gpus) == Kernels() == Kernels.of(with_defaults(plan, on_gpus=False).assumed)


def test_adamw_of_many_tensors_is_paddles_adamw_bit_for_bit():
    random = np.random.default_rng(0)
    sizes = [[5], [3, 4], [70_000], [2, 2]]
    start = [random.standard_normal(size).astype(np.float32) for size in sizes]

    def optimizers(kind, saved=None):
        tensors = [paddle.create_parameter(size, "float32") for size in sizes]
        for tensor, value in zip(tensors, start if saved is None else saved, strict=True):
            tensor.set_value(value)
        decaying = {tensor.name for tensor in tensors[:3]}
        rate = paddle.optimizer.lr.LambdaDecay(1e-2, lambda step: 1.0 / (step + 1))
        named = {"apply_decay_param_fun": lambda name: name in decaying}
        return tensors, kind(rate, 0.9, 0.95, 1e-8, parameters=tensors, weight_decay=0.1, **named)

    def updated(pair):
        for tensor in pair[0]:
            tensor.grad = paddle.ones_like(tensor)
        pair[1].step()

    require("fused_adam_", lambda: updated(optimizers(MultiTensorAdamW)))
    pairs = [optimizers(kind) for kind in (paddle.optimizer.AdamW, MultiTensorAdamW)]
    for step in range(4):
        gradients = [random.standard_normal(size).astype(np.float32) for size in sizes]
        for tensors, optimizer in pairs:
            for some in ([0, 2], [1, 3]):  # in turns
                for number in some:
                    tensors[number].grad = paddle.to_tensor(gradients[number])
                optimizer.step()
                optimizer.clear_grad(set_to_zero=False)
            optimizer._learning_rate.step()
        if step == 1:  # a checkpoint of the one continues in the other
            (tensors, plain), (own, many) = pairs
            state = many.state_dict()
            renamed = {mine.name: name.name for mine, name in zip(own, tensors, strict=True)}
            kept = {f"{renamed[key[: key.rindex('_moment')]]}{key[key.rindex('_moment') :]}": value
                    for key, value in state.items() if "_moment" in key}  # fmt: skip
            plain.set_state_dict({**plain.state_dict(), **kept})
    for plain, many in zip(pairs[0][0], pairs[1][0], strict=True):
        assert (plain.numpy() == many.numpy()).all()
    assert [key.rsplit("_", 3)[1:] for key in pairs[0][1].state_dict()] == [
        key.rsplit("_", 3)[1:] for key in pairs[1][1].state_dict()
    ]
