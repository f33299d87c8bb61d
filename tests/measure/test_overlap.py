"""The overlap coefficient on a GPU that does not exist: two queues, and a host that takes time to start a message."""

from __future__ import annotations

import pytest

pytest.importorskip("paddle")

import paddle

from paddlenlp_galvatron.measure import messages
from paddlenlp_galvatron.measure.part import FakeGroups
from paddlenlp_galvatron.plan import Precision
from paddlenlp_galvatron.profiles import Collective
from paddlenlp_galvatron.runtime import device

PRODUCT_MS, START_MS = 1.0, 0.05  # a product of 4096 on an H100; the time of Python to start a message
MIB_PER_MS = 100.0  # NVLink: 4 MiB are sent in less time than it takes to start them


class Gpu:
    """When each of its queues, and the host, will be done with their work, in ms."""

    def __init__(self, overlaps: bool = True):
        self.overlaps = overlaps
        self.host = self.computing = self.sending = 0.0

    def once(self, operation) -> float:
        """As the stopwatch's."""
        self.host = self.computing = self.sending = 0.0
        operation()
        return max(self.host, self.computing, self.sending)

    def product(self, *_):
        before = [self.computing, self.host] + ([] if self.overlaps else [self.sending])
        self.computing = max(before) + PRODUCT_MS

    def start(self, given, group):
        self.host += START_MS
        begin = max(self.host, self.computing, self.sending)  # behind queued computation
        self.sending = begin + given.size * 2 / 2**20 / MIB_PER_MS
        end = self.sending

        class Message:
            def wait(_):
                self.computing = max(self.computing, end)

        return Message()


def coefficient(gpu, monkeypatch) -> float:
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    monkeypatch.setattr(paddle, "matmul", gpu.product)
    monkeypatch.setitem(messages.STARTED, Collective.ALL_REDUCE, gpu.start)
    asked = (gpu, 0, (0, 1), FakeGroups(), Collective.ALL_REDUCE, Precision.BF16, 2)
    return messages.overlap_coefficient(*asked)


def test_a_device_that_overlaps_all_has_a_coefficient_of_one(monkeypatch):
    assert coefficient(Gpu(), monkeypatch) == pytest.approx(1.0, abs=0.05)


def test_a_device_that_overlaps_nothing_has_a_coefficient_of_two(monkeypatch):
    assert coefficient(Gpu(overlaps=False), monkeypatch) == pytest.approx(2.0, abs=0.05)
