"""Messages between stages, without a peer."""

from dataclasses import dataclass
from typing import Any
from weakref import ref

import numpy as np
import pytest

from paddlenlp_galvatron.runtime import pipeline


@dataclass
class Message:
    tensor: Any
    waited: int = 0

    def wait(self) -> None:
        self.waited += 1


def test_a_message_is_kept_until_it_has_left_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[ref[Message]] = []

    def send_start(tensor: Any, peer: int, group: Any) -> Message:
        sent.append(ref(message := Message(tensor)))
        return message

    monkeypatch.setattr(pipeline, "send_start", send_start)
    link = pipeline.Link(None, 1, [4], "float32")
    for _ in range(2):  # steps
        sent.clear()
        for _ in range(3):
            link.send(np.zeros(4))
        link.has_received(0)
        assert [bool(message()) for message in sent] == [True, True, True]
        for _ in range(2):  # set twice, released once
            link.has_received(2)
            assert [bool(message()) for message in sent] == [False, False, True]
        last = sent[-1]()
        link.flush()
        assert last and last.waited == 1
