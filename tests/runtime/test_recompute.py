"""Parts that backward computes again, by themselves."""

from contextlib import nullcontext

import pytest

pytest.importorskip("paddle")

import paddle

from paddlenlp_galvatron.runtime import device
from paddlenlp_galvatron.runtime.recompute import RecomputedPart


def test_a_part_lets_go_of_all_when_its_backward_is_done():
    """Not only when the loss goes: that is there until the next micro-batch has been forward."""
    reader = paddle.nn.Linear(64, 64)
    part = RecomputedPart([reader], nullcontext)
    x = paddle.randn([256, 64])

    def loss():
        return reader(part(paddle.tanh, 2 * x)).sum()

    x.stop_gradient = False
    loss().backward()
    start = device.allocated_mib()
    again = loss()
    assert device.allocated_mib() - start > x.size * 4 / 2**20
    again.backward()
    assert device.allocated_mib() - start < 0.01
