"""The pipeline's calls on a GPU's streams, replayed without one: no order of them hangs.

The real `Pipeline` runs with one rank a stage and tells its calls in order. On a GPU they return at once: messages wait
in a stream for each communicator, passes in one for computing, and a copy from the host waits for all of them. A
message starts when both ends have come to it, and what was computed before it was asked for is done.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("paddle")

import paddle

from paddlenlp_galvatron.plan import LayerStrategy, Plan, Schedule
from paddlenlp_galvatron.runtime import pipeline as module


class Call(NamedTuple):
    what: str  # "compute"; "send" or "receive"; "wait" for a message received; "copy" from the host
    link: tuple[tuple[int, int], str] | None = None  # ranks of a communicator, and its use
    number: int = 0  # of the message


class Stage:
    """Adds up what it receives; all its tensors hold one number."""

    def __init__(self, index: int, stages: int, calls: list[Call], copies_in_passes: bool):
        self.index, self.is_first, self.is_last = index, index == 0, index == stages - 1
        self.boundary_shape, self.numbers, self.chain = [1], SimpleNamespace(stored="float32"), SimpleNamespace()
        self._calls, self._copies_in_passes = calls, copies_in_passes
        self._weight = paddle.ones([1])
        self._weight.stop_gradient = False

    def take(self, tokens: Any) -> list[int]:
        self._calls.append(Call("copy"))
        return list(tokens)

    def forward(self, x: Any, ids: Any, labels: Any) -> Any:
        if self._copies_in_passes and (self.is_first or self.is_last):
            self._calls.append(Call("copy"))
        self._calls.append(Call("compute"))
        return self._weight if x is None else self._weight + x

    def settle(self) -> None:
        self._calls.append(Call("compute"))


def calls_of(schedule: Schedule, stages: int, micro_batches: int, monkeypatch: Any, copies: bool) -> list[list[Call]]:
    """What each stage's `Pipeline.run` asks for, in order."""
    plan = Plan(stages, micro_batches, micro_batches, (1,) * stages, (LayerStrategy(),) * stages, schedule=schedule)
    groups = SimpleNamespace(get=lambda ranks, use: (ranks, use))
    found = []
    for rank in range(stages):
        calls: list[Call] = []
        numbers: dict[Any, int] = {}

        def message(what: str, link: Any, calls: list[Call] = calls, numbers: dict[Any, int] = numbers) -> Any:
            number = numbers[what, link] = numbers.get((what, link), -1) + 1
            calls.append(Call(what, link, number))
            wait = calls.append if what == "receive" else lambda call: None
            return SimpleNamespace(wait=lambda: wait(Call("wait", link, number)), is_completed=lambda: False)

        monkeypatch.setattr(module.dist, "isend", lambda tensor, peer, link: message("send", link))
        monkeypatch.setattr(module.dist, "irecv", lambda tensor, peer, link: message("receive", link))
        stage = Stage(rank, stages, calls, copies)
        tokens = np.zeros((micro_batches, 1), dtype=np.int64)
        module.Pipeline(plan, stage, rank, groups).run(tokens, tokens, 1.0)  # type: ignore[arg-type]
        found.append(calls)
    return found


def hangs(programs: list[list[Call]], stream_of: Callable[[Any], Any]) -> bool:
    """Whether calls are left that never start; `stream_of` tells the stream of a communicator's messages."""
    needs = [_needs(calls, stream_of) for calls in programs]
    ends: dict[Any, list[tuple[int, int]]] = {}  # of each message: rank and place
    for rank, calls in enumerate(programs):
        for place, call in enumerate(calls):
            if call.what in ("send", "receive"):
                ends.setdefault((call.link, call.number), []).append((rank, place))
    started = [[False] * len(calls) for calls in programs]

    def may_start(rank: int, place: int) -> bool:
        return all(started[rank][other] for other in needs[rank][place])

    left, progress = [(rank, place) for rank, calls in enumerate(programs) for place in range(len(calls))], True
    while left and progress:
        before = len(left)
        for rank, place in left:
            call = programs[rank][place]
            if call.what in ("compute", "copy"):
                started[rank][place] = may_start(rank, place)
            else:
                both = ends[call.link, call.number]
                assert len(both) == 2, f"{call} has no other end"
                if call.what == "wait":
                    started[rank][place] = may_start(rank, place) and all(started[r][p] for r, p in both)
                elif all(may_start(*end) for end in both):
                    for r, p in both:
                        started[r][p] = True
        left = [(rank, place) for rank, place in left if not started[rank][place]]
        progress = len(left) < before
    return bool(left)


def _needs(calls: list[Call], stream_of: Callable[[Any], Any]) -> list[list[int]]:
    """Of each call, the places of those that its start waits for on this rank."""
    latest: dict[Any, int] = {}  # of each stream
    copy: list[int] = []  # the latest
    found = []
    for place, call in enumerate(calls):
        if call.what == "copy":
            found.append([*latest.values(), *copy])
            copy = [place]
            continue
        stream = "compute" if call.what in ("compute", "wait") else stream_of(call.link)
        found.append([*copy, *(latest[one] for one in (stream, "compute") if one in latest)])
        latest[stream] = place
    return found


SIZES = [(stages, micro_batches) for stages in range(1, 9) for micro_batches in range(1, 17)]
EACH_ITS_OWN: Callable[[Any], Any] = lambda link: link  # noqa: E731


@pytest.mark.parametrize("schedule", Schedule)
def test_no_order_of_calls_hangs(schedule: Schedule, monkeypatch: Any) -> None:
    for stages, micro_batches in SIZES:
        programs = calls_of(schedule, stages, micro_batches, monkeypatch, copies=False)
        assert not hangs(programs, EACH_ITS_OWN), (stages, micro_batches)


def test_what_would_hang_is_seen(monkeypatch: Any) -> None:
    """Why tokens are copied before the first message, and why each direction has a communicator."""
    copying = calls_of(Schedule.ONE_F_ONE_B, 2, 3, monkeypatch, copies=True)
    assert hangs(copying, EACH_ITS_OWN)
    programs = calls_of(Schedule.ONE_F_ONE_B, 2, 3, monkeypatch, copies=False)
    assert hangs(programs, lambda link: link[0]), "one stream for both directions"
