"""The deferred backend sees what a GPU would not forgive. Two ranks in one process."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("paddle")

import paddle
from deferred import COLLECTIVE, EXCHANGE, P2P, Backend, BrokenRule, as_used_before, require_same_calls


@pytest.fixture
def ranks(tmp_path):
    """Two backends, each with the one group of both."""
    backends = [Backend(tmp_path, rank, seed=0) for rank in (0, 1)]
    for backend in backends:
        backend.group = SimpleNamespace(id=7, ranks=[0, 1], rank=backend.rank)
        backend.first_uses = {(7, COLLECTIVE), (7, EXCHANGE)}
    return backends


def gathers(ranks):
    """Both start a gather; gives its inputs, outputs and tasks."""
    mine = [paddle.full([2], float(backend.rank + 1)) for backend in ranks]
    outs = [paddle.zeros([4]) for _ in ranks]
    tasks = [b.all_gather(out, x, b.group, sync_op=False) for b, out, x in zip(ranks, outs, mine, strict=True)]
    tasks[1].backend.do(tasks[1])
    return mine, outs, tasks


def test_nothing_is_there_before_it_is_waited_for(ranks, tmp_path):
    _, outs, tasks = gathers(ranks)
    assert paddle.isnan(outs[0]).all()
    tasks[0].wait()
    tasks[1].wait()
    assert outs[0].tolist() == outs[1].tolist() == [1, 1, 2, 2]
    for backend in ranks:
        backend.finish()
    require_same_calls(tmp_path, 2)


def test_an_input_that_is_freed(ranks):
    mine, _outs, tasks = gathers(ranks)
    del mine[0]
    with pytest.raises(BrokenRule, match="an input was freed"):
        tasks[0].wait()


@pytest.mark.parametrize(("written", "message"), [("mine", "an input was written"), ("outs", "the output was written")])
def test_what_is_written_to_meanwhile(ranks, written, message):
    mine, outs, tasks = gathers(ranks)
    {"mine": mine, "outs": outs}[written][0].fill_(5.0)
    with pytest.raises(BrokenRule, match=message):
        tasks[0].wait()


def test_another_call_on_another_rank(ranks):
    held = [paddle.ones([2]), paddle.ones([4]), paddle.ones([2])]
    other = ranks[1].all_reduce(held[0], group=ranks[1].group, sync_op=False)
    ranks[1].do(other)
    task = ranks[0].all_gather(held[1], held[2], ranks[0].group, sync_op=False)
    with pytest.raises(BrokenRule, match=r"all_gather.*rank 1 calls \['all_reduce'"):
        task.wait()


def test_a_first_use_in_a_step(ranks):
    ranks[0].first_uses.clear()
    with pytest.raises(BrokenRule, match="first collective of this group"):
        ranks[0].all_reduce(paddle.ones([2]), group=ranks[0].group)


def test_what_nobody_waits_for(ranks, tmp_path):
    held = gathers(ranks)
    with pytest.raises(BrokenRule, match="never waited for"):
        held[2][0].backend.finish()
    for rank, calls in enumerate((["all_gather"], ["all_gather", "all_gather"])):
        (tmp_path / f"log.{rank}").write_text(json.dumps({"7": calls}))
    with pytest.raises(AssertionError, match=r"\[1, 2\] calls|\[2, 1\] calls"):
        require_same_calls(tmp_path, 2)


def test_a_gather_in_place_keeps_what_it_reads_and_lies_where_it_must(ranks):
    outs = [paddle.full([4], float(rank + 1)) for rank in (0, 1)]
    parts = [out._slice(2 * rank, 2 * rank + 2) for rank, out in enumerate(outs)]
    tasks = [b.all_gather(o, x, b.group, sync_op=False) for b, o, x in zip(ranks, outs, parts, strict=True)]
    assert outs[0][:2].tolist() == [1, 1] and paddle.isnan(outs[0][2:]).all()
    tasks[1].backend.do(tasks[1])
    tasks[0].wait()
    assert outs[0].tolist() == [1, 1, 2, 2]
    with pytest.raises(BrokenRule, match="at byte 8 of its output, not at 0"):
        ranks[0].all_gather(outs[0], outs[0]._slice(2, 4), ranks[0].group, sync_op=False)


def test_a_device_that_is_waited_for_while_a_receive_is_posted(ranks):
    for backend in ranks:
        backend.first_uses.add((7, P2P))
    buffer, sent = paddle.zeros([2]), paddle.ones([2])
    ranks[0].synchronize()
    task = ranks[0].receive(buffer, 1, ranks[0].group)
    with pytest.raises(BrokenRule, match="waited for while message 0"):
        ranks[0].synchronize()
    ranks[1].do(ranks[1].send(sent, 0, ranks[1].group))
    task.wait()
    ranks[0].synchronize()


def test_memory_that_is_handed_out_again_holds_what_was_there(ranks):
    assert paddle.isnan(as_used_before(paddle.empty)([3])).all()
    assert (as_used_before(paddle.empty_like)(paddle.ones([2], "int64")) == -1).all()


def test_what_runs_in_the_queue_of_what_is_computed_is_asked_for_as_done(ranks):
    where = {"group": ranks[0].group, "use_calc_stream": True}
    given = paddle.ones([2])
    ranks[1].do(ranks[1].all_reduce(given, group=ranks[1].group, sync_op=False))
    summed = paddle.ones([2])
    assert ranks[0].all_reduce(summed, **where).is_completed() and summed.tolist() == [2, 2]
    with pytest.raises(BrokenRule, match="not as sync_op"):
        ranks[0].all_reduce(summed, sync_op=False, **where)
