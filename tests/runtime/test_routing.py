"""A token's experts are chosen as one token after the other would choose, with the weights of transformers' formulas;
the order of their rows, which the runtime counts and these tests sort."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("paddle")

import numpy as np
import paddle
from distributed import plans, twins
from hypothesis import example, given
from hypothesis import strategies as st

from paddlenlp_galvatron.cost_model.experts import ROW_BUFFERS
from paddlenlp_galvatron.model import FAMILIES, load_model
from paddlenlp_galvatron.plan import LayerStrategy, Plan, Precision
from paddlenlp_galvatron.plan.precision import NumberTypes
from paddlenlp_galvatron.plan.strategy import EXPERT_ROWS, IMBALANCE_BOUND, DataParallel, Experts
from paddlenlp_galvatron.runtime import device, grouped, router
from paddlenlp_galvatron.runtime import experts as module
from paddlenlp_galvatron.runtime.experts import OwnExperts, Routing, shares
from paddlenlp_galvatron.runtime.grouped import UNPADDED, Padding
from paddlenlp_galvatron.runtime.paddle_private import host_bytes, host_peak_bytes, reset_host_peak

MODELS = Path(__file__).parents[2] / "configs" / "models"


@given(
    data=st.data(),
    ep=st.sampled_from([1, 2, 4]),
    etp=st.sampled_from([1, 2, 4]),
    local=st.integers(1, 3),
    tokens=st.integers(1, 12),
)
def test_rows_lie_as_stable_sorts_would_lay_them(data, ep, etp, local, tokens):
    experts, ranks = ep * local, ep * etp
    k = data.draw(st.integers(1, experts))
    choices = st.permutations(range(experts)).map(lambda order: order[:k])
    chosen = [np.array(data.draw(st.lists(choices, min_size=tokens, max_size=tokens))) for _ in range(ranks)]
    keys = [
        (((one // local)[..., None] * etp + np.arange(etp)) * local + (one % local)[..., None]).ravel()
        for one in chosen
    ]
    counts = np.stack([np.bincount(one, minlength=ranks * local) for one in keys]).reshape(ranks, ranks, local)
    me = data.draw(st.integers(0, ranks - 1))
    group = SimpleNamespace(rank=me) if ranks > 1 else None
    shape = SimpleNamespace(experts=experts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "all_gather", lambda own, group: paddle.to_tensor(counts))
        routing = Routing(paddle.to_tensor(chosen[me]), shape, Experts(ep, etp, DataParallel.ZERO2), group, "float32")
    order = np.argsort(keys[me], kind="stable")
    np.testing.assert_array_equal(routing.order, order)
    np.testing.assert_array_equal(routing.back, np.argsort(order))
    received = np.concatenate([np.full(n, expert) for source in counts[:, me] for expert, n in enumerate(source)])
    by_expert = np.argsort(received, kind="stable")
    np.testing.assert_array_equal(routing.by_expert, by_expert)
    np.testing.assert_array_equal(routing.by_rank, np.argsort(by_expert))


def padded_run(padding: Padding, chosen: np.ndarray) -> list[np.ndarray]:
    """Output, and the gradients of tokens, scores and weights, of one rank's experts."""
    paddle.seed(1)
    shape = SimpleNamespace(experts=4, experts_per_token=chosen.shape[1], expert_size=8)
    own = OwnExperts(shape, Experts(1, 1, DataParallel.DDP), None, NumberTypes.of(), None, padding)
    weights = [paddle.randn([4, *of]) for of in ((6, 8), (6, 8), (8, 6))]
    own.layer.gate, own.layer.up, own.layer.down = map(paddle.assign, weights)
    x, scores = paddle.randn([len(chosen), 6]), paddle.rand(chosen.shape)
    given = [x, scores, own.layer.gate, own.layer.up, own.layer.down]
    for tensor in given:
        tensor.stop_gradient = False
    memo = {"chosen": paddle.to_tensor(chosen)}
    with paddle.no_grad():
        own.route(x, memo)
    assert sum(memo["routing"].counts) >= chosen.size
    assert all(count % padding.multiple == 0 for count in memo["routing"].counts)
    out = own.weighted(x, scores, memo)
    out.backward(paddle.randn(out.shape))
    return [out.numpy(), *(tensor.grad.numpy() for tensor in given)]


def test_scores_that_sum_to_nothing_are_divided_by_the_least_sum_of_transformers():
    shape = SimpleNamespace(norm_topk=True, routed_scaling_factor=1, traits=FAMILIES["ernie4_5_moe"])
    weights = shares(paddle.to_tensor([[1e-14, 3e-14, 1.0]]), paddle.to_tensor([[0, 1]]), shape)
    np.testing.assert_allclose(weights.numpy(), [[1e-2, 3e-2]], rtol=1e-5)  # moe_norm_min, 1e-12


@given(data=st.data(), tokens=st.integers(1, 9), k=st.integers(1, 3), multiple=st.sampled_from([4, 128]))
@pytest.mark.parametrize("fills", [False, True])
def test_rows_that_no_token_sent_change_nothing(fills, data, tokens, k, multiple):
    choices = st.permutations(range(4)).map(lambda order: order[:k])
    chosen = np.array(data.draw(st.lists(choices, min_size=tokens, max_size=tokens)))
    padded = padded_run(Padding(multiple, bound=2.0, fills=fills), chosen)
    for ours, plain in zip(padded, padded_run(UNPADDED, chosen), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-4)  # numbers of about 10 in fp32


def test_the_first_step_has_the_rows_of_the_bound_and_later_ones_few_sizes():
    padding = Padding(EXPERT_ROWS, bound=2.0, fills=True)
    assert padding.rows([0, 1, 128, 129], mean=1000, ep=8) == [0, 128, 128, 2048 - 256 + 256]
    assert padding.rows([4000, 1], mean=1000, ep=8) == [4096, 128]  # more than the bound
    assert sum(padding.rows([100, 100], mean=200, ep=1)) == 384  # all experts here: none has more than its own
    padding.fills = False
    assert padding.rows([0, 1, 128, 129], mean=1000, ep=8) == [0, 128, 128, 256]


def test_a_rank_that_receives_no_row_has_rows_of_padding():
    _, by_expert = module._by_expert(np.zeros((2, 2), np.int64), [128, 128])
    assert not module._take(paddle.zeros([0, 3]), paddle.to_tensor(by_expert)).any() and len(by_expert) == 256


def test_pipelines_that_load_kernels_alone_pad_by_the_bound_that_their_plan_was_searched_with(monkeypatch):
    one, two = (Plan(2, 2, 2, (1,) * stages, (LayerStrategy(),) * stages) for stages in (1, 2))
    options = {"moe_imbalance": 1.1, "moe_imbalance_bound": 3.0}
    searched = replace(two, metadata={"searched_from": {"options": options}})
    assert Padding.of(two) is UNPADDED
    monkeypatch.setattr(device, "loads_kernels", lambda: True)
    assert Padding.of(one) is UNPADDED
    assert Padding.of(two) == Padding(EXPERT_ROWS, IMBALANCE_BOUND, fills=True)
    assert Padding.of(searched).bound == 3.0


def test_every_size_that_an_expert_may_get_is_multiplied_once(monkeypatch):
    done = []
    monkeypatch.setattr(grouped, "grouped", lambda left, right, counts, **how: done.append((counts[0], *how)))
    grouped.use_every_size.__wrapped__(300, 2, 3, "float32")
    assert done == [(size, *how) for size in (128, 256, 384) for how in ((), ("transpose_right",), ("transpose_left",))]


@pytest.mark.parametrize("etp", [1, 2, 8])
def test_counting_takes_less_memory_than_the_rows_that_it_places(etp):
    """However many copies there are. It is gone when the rows are made, whose memory is in the price."""
    experts, count = 64, 8192
    chosen = paddle.randint(0, experts, [count])
    module._places(chosen, 4, etp, experts // 4)
    before = host_bytes()
    reset_host_peak()
    module._places(chosen, 4, etp, experts // 4)
    each = (host_peak_bytes() - before) / (experts * count)
    assert each < 9.5
    each += 4  # on a GPU a cumulative sum copies its input
    mixtures = [shape for path in MODELS.glob("*.json") if (shape := load_model(path)).experts]
    assert len(mixtures) > 5
    for shape in mixtures:
        row_bytes = Precision.BF16.bytes * (ROW_BUFFERS * shape.hidden_size + 2 * shape.expert_size)  # as `_room`
        assert each * shape.experts < row_bytes, shape.name


V2, V3 = load_model("deepseek-v2"), load_model("deepseek-v3")


@st.composite
def cases(draw):
    """A shape, scores [T, E] and, of sigmoids, a bias of both signs [E]."""
    groups, size = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    kept = draw(st.integers(1, groups))
    sizes = {"experts": groups * size, "expert_groups": groups, "groups_per_token": kept}
    shape = replace(
        draw(st.sampled_from((V2, V3))),
        experts_per_token=draw(st.integers(1, kept * size)),
        norm_topk=draw(st.booleans()),
    )
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    scores = random.random((draw(st.integers(1, 6)), groups * size)).astype(np.float32)
    bias = random.normal(0, 1, groups * size).astype(np.float32) if shape.family == "deepseek_v3" else None
    return replace(shape, **sizes), scores, bias


TWO_GROUPS = replace(V3, experts=4, expert_groups=2, groups_per_token=1, experts_per_token=2)


@given(cases())
@example((TWO_GROUPS, np.float32([[0.9, 0.1, 0.6, 0.7]]), np.zeros(4, np.float32)))  # the second has the better two
def test_the_best_experts_of_the_best_groups_are_chosen(case):
    shape, scores, bias = case
    chosen = module.choose(paddle.to_tensor(scores), None if bias is None else paddle.to_tensor(bias), shape)
    weights = module.shares(paddle.to_tensor(scores), chosen, shape).numpy()
    ranked, size = scores if bias is None else scores + bias, shape.experts // shape.expert_groups
    for token, row in enumerate(ranked):
        parts = row.reshape([-1, size])
        worth = np.sort(parts)[:, -2 if bias is not None else -1 :].sum(-1)
        kept = np.argsort(-worth)[: shape.groups_per_token]
        inside = [expert for expert in range(shape.experts) if expert // size in kept]
        best = sorted(inside, key=lambda expert: -row[expert])[: shape.experts_per_token]
        assert set(chosen[token].tolist()) == set(best)
        own = scores[token][chosen[token].numpy()]  # without the bias
        total = own.sum() if shape.norm_topk else 1
        np.testing.assert_allclose(weights[token], shape.routed_scaling_factor * own / total, rtol=1e-5)


def test_scores_are_sigmoids_or_sum_to_one():
    logits = paddle.to_tensor([[0.0, 1.0, -1.0]])
    assert float(module.score(logits, V2).sum()) == pytest.approx(1)
    np.testing.assert_allclose(module.score(logits, V3).numpy(), [[0.5, 0.7310586, 0.2689414]], rtol=1e-6)


@pytest.mark.parametrize("model", [V2, V3], ids=["softmax", "sigmoid"])
def test_the_balance_loss_is_of_scores_that_sum_to_one_as_megatrons(model):
    sizes = {"experts": 6, "experts_per_token": 2, "expert_groups": 1, "groups_per_token": 1}
    shape = replace(model, layers=1, dense_layers=(), router_aux_loss_coef=1.0, **sizes)
    load = router.ExpertLoad(plans.plan(1, "1", batch=2, micro_batches=1), shape, 4)
    layer = router.LayerLoad(load, [0] * 4 + [1] * 4, None)  # two samples of four tokens
    logits = paddle.to_tensor(np.random.default_rng(0).normal(0, 2, (8, 6)), "float32", stop_gradient=False)
    scores = module.score(logits, shape)
    chosen = module.choose(scores.detach(), None, shape)
    fractions = (scores / scores.sum(-1, keepdim=True)).reshape([2, 4, 6])
    uses = paddle.nn.functional.one_hot(chosen, 6).sum(1).reshape([2, 4, 6])
    expected = (6 * uses.mean(1) * fractions.mean(1)).sum() / 2
    ours = layer.balanced(scores, layer.shares(scores.detach(), chosen))
    assert float(load.balance) == pytest.approx(float(expected))
    gradients = [
        paddle.grad(sum_, logits, retain_graph=True)[0].numpy() for sum_ in (ours.sum(), expected + scores.sum())
    ]
    np.testing.assert_allclose(*gradients, rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module", params=["on CPU", "on a GPU"])
def kernel(request):
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "on a GPU":
            patch.setattr(paddle._C_ops, "topk", twins.topk)
        yield


@pytest.mark.usefixtures("kernel")
@given(cases(), st.integers(0, 2**32))
def test_a_token_of_nan_has_experts_and_changes_none_of_others(case, seed):
    shape, scores, bias = case
    marks = np.random.default_rng(seed).random(scores.shape) < 0.2
    marks[0] = seed % 2
    poisoned = paddle.to_tensor(np.where(marks, np.nan, scores))
    bias = None if bias is None else paddle.to_tensor(bias)
    chosen = module.choose(poisoned, bias, shape).numpy()
    for token, before in enumerate(module.choose(paddle.to_tensor(scores), bias, shape).numpy()):
        assert len({*chosen[token]}) == shape.experts_per_token
        if not marks[token].any():
            np.testing.assert_array_equal(chosen[token], before)
    assert chosen.min() >= 0 and chosen.max() < shape.experts


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("shape", [V2, V3], ids=["softmax, groups", "sigmoids, groups"])
def test_tokens_of_nan_use_all_experts_alike(shape):
    tokens = 512
    chosen = module.choose(paddle.full([tokens, shape.experts], float("nan")), None, shape).numpy()
    counts = np.bincount(chosen.ravel(), minlength=shape.experts)
    assert counts.max() <= 2 * counts.mean()
