"""Products of tokens that Megatron-SP gathers again in backward. One process stands for two equal ranks."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("paddle")

import paddle

from paddlenlp_galvatron.model.lora import Adapters
from paddlenlp_galvatron.plan.precision import NumberTypes
from paddlenlp_galvatron.runtime import device, mappings
from paddlenlp_galvatron.runtime.lora import LoRALinear
from paddlenlp_galvatron.runtime.mappings import GatheredProducts, read_together

TOKENS, HIDDEN = 6, 8


class Peers:
    """The messages of a rank whose peer has the same tokens and weights: its gradients are half of the sum."""

    def __init__(self, monkeypatch):
        self.stated: list[str] = []
        matmul = paddle.matmul
        monkeypatch.setattr(mappings, "all_gather", lambda x, _: paddle.concat([x, x]))
        monkeypatch.setattr(mappings, "all_gather_start", lambda x, _: self._later("gather", paddle.concat([x, x])))
        monkeypatch.setattr(mappings, "reduce_scatter_start", lambda x, _: self._later("scatter", x[:TOKENS] * 2))

        def multiply(left, right, **how):
            self.stated.append("product")
            return matmul(left, right, **how)

        monkeypatch.setattr(mappings.paddle, "matmul", multiply)

    def _later(self, name, out):
        self.stated.append(name)

        def wait():
            self.stated.append(f"{name}ed")
            return out

        return SimpleNamespace(wait=wait)


@pytest.fixture
def peers(monkeypatch):
    return Peers(monkeypatch)


def parameter(*shape, learns=True):
    tensor = paddle.to_tensor(np.random.default_rng(sum(shape)).standard_normal(shape).astype("float32"))
    tensor.stop_gradient = not learns
    return tensor


def by_autograd(x, *matrices, transposed=False):
    """The results of the two ranks, each of both; the input's gradient is the sum of theirs."""
    whole = paddle.concat([x, x])
    return tuple(paddle.matmul(whole, matrix, transpose_y=transposed) for matrix in matrices)


def gradients_of(run, x, *matrices, **how):
    loss = sum((out * out).sum() for out in run(x, *matrices, **how))
    loss.backward()
    found = [None if one.grad is None else one.grad.numpy() for one in (x, *matrices)]
    for one in (x, *matrices):
        one.clear_gradient(False)
    return found


def gathered(x, *matrices, keeps=False, transposed=False):
    return GatheredProducts.apply(x, None, NumberTypes.of(), keeps, transposed, *matrices)


def same(some, others):
    for one, other in zip(some, others, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_are_autograds(peers, keeps, transposed):
    x, matrices = parameter(TOKENS, HIDDEN), [parameter(HIDDEN, 4), parameter(HIDDEN, 5)]
    if transposed:
        matrices = [parameter(4, HIDDEN), parameter(5, HIDDEN)]
    wanted = gradients_of(by_autograd, x, *matrices, transposed=transposed)
    same(gradients_of(gathered, x, *matrices, keeps=keeps, transposed=transposed), wanted)


def test_messages_are_under_way_beside_products(peers):
    x, matrices = parameter(TOKENS, HIDDEN), [parameter(HIDDEN, 4), parameter(HIDDEN, 5)]
    outs = gathered(x, *matrices)
    peers.stated.clear()
    sum(out.sum() for out in outs).backward()
    two = ["product"] * 2
    assert peers.stated == ["gather", *two, "scatter", "gathered", *two, "scattered"]


def test_what_nobody_learns_from_is_not_gathered_or_sent(peers):
    """A frozen LM head under LoRA; a first layer below which nothing learns."""
    x, frozen = parameter(TOKENS, HIDDEN), parameter(HIDDEN, 4, learns=False)
    same(gradients_of(gathered, x, frozen), gradients_of(by_autograd, x, frozen))
    assert not {"gather", "gathered"} & {*peers.stated}
    peers.stated.clear()
    x, matrix = parameter(TOKENS, HIDDEN, learns=False), parameter(HIDDEN, 4)
    same(gradients_of(gathered, x, matrix), gradients_of(by_autograd, x, matrix))
    assert not {"scatter", "scattered"} & {*peers.stated}


def test_only_own_tokens_are_kept_and_all_go_with_backward(peers):
    x, matrix = parameter(1024, 256), parameter(256, 16)
    gathered(x, matrix)[0].sum().backward()
    before = device.allocated_mib()
    mine, loss = 2 * x, None
    [out] = gathered(mine, matrix)
    own_mib, made_mib = (one.size * 4 / 2**20 for one in (mine, out))
    assert device.allocated_mib() - before == pytest.approx(own_mib + made_mib, abs=0.01)
    loss = out.sum()
    del mine, out
    loss.backward()  # the loss stays until the next micro-batch has been forward
    assert device.allocated_mib() - before < 0.01


def test_layers_share_one_gather_with_biases_and_adapters(peers):
    plain, biased = paddle.nn.Linear(HIDDEN, 4, bias_attr=False), paddle.nn.Linear(HIDDEN, 5)
    biased.bias.set_value(parameter(5))
    adapted = LoRALinear(paddle.nn.Linear(HIDDEN, 6), Adapters(2, 4))
    x, layers = parameter(TOKENS, HIDDEN), [plain, biased, adapted]
    wanted = [layer(paddle.concat([x, x])).numpy() for layer in layers]
    calls = []

    def multiply(x, *matrices):
        calls.append(len(matrices))
        return gathered(x, *matrices)

    read_together(layers, multiply)
    for _ in range(2):
        same([layer(x).numpy() for layer in layers], wanted)
    assert calls == [4, 4]
    adapted.counts = False  # the model without adapters, as DPO's reference
    layers[0](x), layers[1](x), layers[2](x)
    assert calls[2:] == [3]
