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
    ended: bool = False


def test_a_message_is_kept_until_it_has_left_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[ref[Message]] = []

    def send_start(tensor: Any, peer: int, group: Any) -> Message:
        sent.append(ref(message := Message(tensor)))
        return message

    monkeypatch.setattr(pipeline, "send_start", send_start)
    link = pipeline.Link(None, 1, [4], "float32")
    for _ in range(2):
        link.send(np.zeros(4))
    first, second = (message() for message in sent)
    assert first and second
    second.ended = True
    del second
    link.let_go()
    assert all(message() for message in sent)  # they leave in order
    first.ended = True
    del first
    link.let_go()
    assert not any(message() for message in sent)
