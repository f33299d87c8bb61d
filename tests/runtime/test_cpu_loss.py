"""On CPU, too, a loss is reported as it is: NaN where the logits have one, and as large as it is."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("paddle")

import paddle
from distributed.small_run import CASE, Run


def loss_with(**columns: float) -> float:
    """The loss of the first step, where these columns of the LM head are such numbers; `others`: all that are not
    named."""
    run = Run()
    head = run.engine.stage._head._table.tensor
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
