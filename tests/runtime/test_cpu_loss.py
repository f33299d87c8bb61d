"""On CPU, too, a loss is reported as it is: NaN where the logits have one, and as large as it is."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("paddle")

import paddle
import paddle.distributed as dist
from distributed.small_run import CASE, Run

from paddlenlp_galvatron.runtime import cross_entropy


def loss_with(**columns: float) -> float:
    """The loss of the first step, where these columns of the LM head are such numbers; `others`: all that are not
    named."""
    run = Run()
    head = run.engine.stage._head._weights[0].tensor
    numbers = head.numpy()
    if "others" in columns:
        numbers[:] = columns.pop("others")
    for column, number in columns.items():
        numbers[:, int(column.removeprefix("c"))] = number
    paddle.assign(paddle.to_tensor(numbers), output=head)
    return float(run.engine.forward_backward(run.data.batch(0)))


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_logits_that_are_no_numbers_give_a_loss_that_is_none(number):
    assert not math.isfinite(loss_with(c5=number))


def test_a_large_loss_is_reported_as_it_is():
    assert math.isfinite(loss := loss_with(others=1e4, c0=1.0)) and loss > 64 + math.log(CASE.shape.vocab_size)


def test_ranks_that_split_the_vocabulary_subtract_their_largest_logit(monkeypatch):
    """Logits of the ranks are large: exponentials of a difference to their sum, instead of the largest, are all 0."""
    ranks, labels, meeting, sent = 2, [0, 1, 2, 3], threading.Barrier(2), {}

    def all_reduce(x, group, op=dist.ReduceOp.SUM):
        sent[group.rank] = x
        meeting.wait(60)
        out = reduce(paddle.maximum if op == dist.ReduceOp.MAX else paddle.add, [sent[rank] for rank in range(ranks)])
        meeting.wait(60)
        return out

    monkeypatch.setattr(cross_entropy, "all_reduce", all_reduce)
    logits = paddle.to_tensor([[200.0, 150, 180, 199]]).expand([4, 4])

    def losses(rank):
        shard = cross_entropy.VocabularyShard(4, SimpleNamespace(tp=ranks, index=rank))
        part = logits[:, 2 * rank : 2 * rank + 2].clone()
        loss = cross_entropy.CrossEntropy(shard, SimpleNamespace(rank=rank), fused=False)
        return loss.scores(part, paddle.to_tensor(labels)).losses.numpy()

    with ThreadPoolExecutor(ranks) as pool:
        each = list(pool.map(losses, range(ranks)))
    wanted = paddle.nn.functional.cross_entropy(logits, paddle.to_tensor(labels), reduction="none").numpy()
    for rank in range(ranks):
        np.testing.assert_allclose(each[rank], wanted, rtol=1e-6)
