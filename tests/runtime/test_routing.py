"""The order of experts' rows, which is counted on GPUs and sorted here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("paddle")

import numpy as np
import paddle
from hypothesis import given, settings
from hypothesis import strategies as st

from paddlenlp_galvatron.plan.strategy import DataParallel, Experts
from paddlenlp_galvatron.runtime import experts as module
from paddlenlp_galvatron.runtime.experts import Routing


@given(
    data=st.data(),
    ep=st.sampled_from([1, 2, 4]),
    etp=st.sampled_from([1, 2]),
    local=st.integers(1, 3),
    tokens=st.integers(1, 12),
)
@settings(deadline=None, max_examples=40)
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
