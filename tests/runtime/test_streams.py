"""The pipeline's calls, replayed as GPUs would take them: no rank waits for ever, and none longer than it must."""

import os
import random
import sys
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest

pytest.importorskip("paddle")

import paddle
import paddle.distributed as dist
from forked_ranks import fork

from paddlenlp_galvatron.plan import LayerStrategy, Plan, Schedule
from paddlenlp_galvatron.plan.schedule import order
from paddlenlp_galvatron.runtime import device
from paddlenlp_galvatron.runtime.batch import Samples
from paddlenlp_galvatron.runtime.pipeline import Link, Pipeline
from paddlenlp_galvatron.runtime.trace import span, traced

from .streams import COMPUTE, HOST, Call, Recorder, replay

MS = {"forward": 1.0, "backward": 2.0}


class StubGroups:
    def get(self, ranks, use=""):
        return SimpleNamespace(name=f"{ranks}{use}", ranks=ranks, id=0)


class Event:
    """As Paddle's for CUDA."""

    def __init__(self, enable_timing):
        pass

    def record(self):
        pass

    def elapsed_time(self, _later):
        return 0.0


def device_of(recorder, monkeypatch):
    """Let the runtime compute on a GPU: calls that wait for all its work are written down."""
    memory, empty = recorder.memory, paddle.empty
    monkeypatch.setattr(device, "loads_kernels", lambda: True)
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    monkeypatch.setattr(device, "allocated_mib", lambda: memory.held)
    monkeypatch.setattr(device, "peak_mib", lambda: memory.peak)
    monkeypatch.setattr(device, "reset_peak", lambda: setattr(memory, "peak", memory.held))
    monkeypatch.setattr(device, "release", recorder.traffic)
    monkeypatch.setattr(device, "reserved_peak_mib", lambda: memory.peak)
    monkeypatch.setattr(device, "reserve", memory.reserve)
    monkeypatch.setattr(paddle.device, "synchronize", recorder.traffic)
    monkeypatch.setattr(paddle.device.cuda, "Event", Event)
    monkeypatch.setattr(Link, "_place", lambda link: (memory.hold(1), empty(link._shape, link._dtype))[1])


def two_steps(stages, micro_batches, schedule, monkeypatch, chunks=1):
    """The calls of each stage's rank in its first step and in another one, both traced."""
    layers = stages * chunks
    plan = Plan(stages, micro_batches, micro_batches, (1,) * layers, (LayerStrategy(),) * layers)
    plan = replace(plan, schedule=schedule, chunks=chunks)
    steps = [], []
    for rank in range(stages):
        recorder = Recorder(rank, stages, chunks)
        device_of(recorder, monkeypatch)
        monkeypatch.setattr(dist, "isend", recorder.isend)
        monkeypatch.setattr(dist, "irecv", recorder.irecv)
        pipeline, nothing = Pipeline(plan, recorder, rank, StubGroups()), [None] * micro_batches
        for calls in steps:
            with traced(rank, []):
                pipeline.run(Samples(nothing, nothing), 1.0)
            calls.append(recorder.calls)
            recorder.calls = []
        assert not recorder.load.padding.fills  # of the first step alone
    return steps


def programs(*arguments, **named):
    """The calls of each stage's rank in any step but the first."""
    return two_steps(*arguments, **named)[1]


def loading(calls):
    """The same where each pass uses kernels for the first time."""
    return [one for call in calls for one in ([Call(HOST), call] if call.kind == COMPUTE else [call])]


@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize("stages", [*range(1, 5), *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 6, 7)), 8])
def test_a_step_ends_and_no_stage_idles_beyond_the_schedule(stages, schedule, monkeypatch):
    for micro_batches in sorted({1, 2, 3, max(stages - 1, 1), stages, stages + 1, 16}):
        first, calls = two_steps(stages, micro_batches, schedule, monkeypatch)
        ideal = (micro_batches + stages - 1) * sum(MS.values())
        assert replay(calls, MS.__getitem__) == pytest.approx(ideal), f"{micro_batches} micro-batches"
        assert replay(calls, MS.__getitem__, one_connection=True), f"{micro_batches} micro-batches"
        assert replay([*map(loading, first)], MS.__getitem__), f"{micro_batches} micro-batches"
        for seed in range(2):
            draw = random.Random(f"{stages} {micro_batches} {seed}")
            assert replay(calls, lambda _, draw=draw: draw.uniform(0.1, 3.0)), f"{micro_batches} micro-batches"


@pytest.mark.parametrize(
    ("stages", "chunks"), [*product((2, 3, 4), (2, 3)), (8, 2), pytest.param(8, 3, marks=pytest.mark.slow)]
)
def test_interleaved_steps_end_and_no_stage_idles_beyond_the_schedule(stages, chunks, monkeypatch):
    each = {kind: ms / chunks for kind, ms in MS.items()}
    for micro_batches in (1, stages - 1, stages, stages + 1, 2 * stages, 2 * stages + 1):
        first, calls = two_steps(stages, micro_batches, Schedule.ONE_F_ONE_B, monkeypatch, chunks=chunks)
        took = replay(calls, each.__getitem__)
        assert replay(calls, each.__getitem__, one_connection=True), micro_batches
        assert replay([*map(loading, first)], each.__getitem__), micro_batches
        lists = [order(Schedule.ONE_F_ONE_B, stage, stages, micro_batches, chunks) for stage in range(stages)]
        assert [sum(call.kind == COMPUTE for call in some) for some in calls] == [*map(len, lists)]
        if micro_batches >= stages:
            assert took == pytest.approx((micro_batches + (stages - 1) / chunks) * sum(MS.values())), micro_batches
        for seed in range(2):
            draw = random.Random(f"{stages} {micro_batches} {seed}")
            assert replay(calls, lambda _, draw=draw: draw.uniform(0.1, 3.0)), f"{micro_batches} micro-batches"


def test_messages_arrive_where_those_before_did(monkeypatch):
    """A rank has as many places as messages in use, and one for the next of each direction."""
    stages, micro_batches, made = 4, 16, []
    empty = paddle.empty
    plan = Plan(stages, micro_batches, micro_batches, (1,) * stages, (LayerStrategy(),) * stages)
    recorder = Recorder(1, stages)
    monkeypatch.setattr(dist, "isend", recorder.isend)
    monkeypatch.setattr(dist, "irecv", recorder.irecv)
    monkeypatch.setattr(paddle, "empty", lambda *shape: made.append(shape) or empty(*shape))
    pipeline = Pipeline(plan, recorder, 1, StubGroups())
    nothing = [None] * micro_batches
    for _ in range(2):
        pipeline.run(Samples(nothing, nothing), 1.0)
        pipeline.evaluate(Samples(nothing, nothing))
    activations, gradients = stages - 1 + 1, 1 + 1
    assert len(made) <= activations + gradients


@pytest.mark.parametrize(("schedule", "chunks"), [*((each, 1) for each in Schedule), (Schedule.ONE_F_ONE_B, 2)])
def test_beside_a_pass_waits_one_receive_at_most(schedule, chunks, monkeypatch):
    """A GPU's receive that is posted takes some of a pass's multiprocessors until its message is there."""
    for calls in programs(4, 8, schedule, monkeypatch, chunks=chunks):
        posted, most = set(), 0
        for call in calls:
            if call.kind == "receive":
                posted.add((call.name, call.number))
            elif call.kind == "wait":
                posted.discard((call.name, call.number))
            elif call.kind == COMPUTE:
                most = max(most, len(posted))
        assert most == 1


def test_memory_that_runs_out_while_receives_are_posted_ends_the_rank_at_once(monkeypatch):
    """Its device, which it must not wait for, waits for messages."""
    recorder, nothing = Recorder(0, 2), [None] * 4
    device_of(recorder, monkeypatch)
    monkeypatch.setattr(dist, "isend", recorder.isend)
    monkeypatch.setattr(dist, "irecv", recorder.irecv)
    monkeypatch.setattr(os, "_exit", lambda code: sys.exit(code))
    plan = Plan(2, 4, 4, (1, 1), (LayerStrategy(),) * 2)
    pipeline = Pipeline(plan, recorder, 0, StubGroups())
    pipeline.run(Samples(nothing, nothing), 1.0)
    forward = recorder.forward

    def starved(*given):
        if any(link.is_posted for link in pipeline._links):
            recorder.calls.clear()
            raise MemoryError("Cannot allocate 2 GB")
        return forward(*given)

    recorder.forward = starved
    with pytest.raises(SystemExit) as ended, traced(0, []):
        pipeline.run(Samples(nothing, nothing), 1.0)
    assert ended.value.code == 12 and not [call for call in recorder.calls if call.kind in (HOST, "wait")]


def test_a_chunk_that_would_send_what_it_received_is_seen(monkeypatch):
    recorder = Recorder(1, 3)
    monkeypatch.setattr(dist, "isend", recorder.isend)
    monkeypatch.setattr(dist, "irecv", recorder.irecv)
    recorder.forward = lambda x, *_: x
    pipeline = Pipeline(Plan(3, 1, 1, (1,) * 3, (LayerStrategy(),) * 3), recorder, 1, StubGroups())
    with pytest.raises(AssertionError, match="sends its input"):
        pipeline.run(Samples([None], [None]), 1.0)


def test_a_traced_steps_spans_are_of_the_devices_queue(monkeypatch):
    """The host, which is ahead, names work that the device reaches later; work next to it takes no name."""
    now = {"device": 5.0}

    class Marked(Event):
        def record(self):
            self.at_ms = now["device"]

        def elapsed_time(self, later):
            return later.at_ms - self.at_ms

    monkeypatch.setattr(device, "on_gpu", lambda: True)
    monkeypatch.setattr(paddle.device, "synchronize", lambda: None)
    monkeypatch.setattr(paddle.device.cuda, "Event", Marked)
    events = []
    with traced(3, events), span("step", "step"):
        for name, ms in (("all_gather", 0.0), ("forward", 7.0), ("wait", 2.0)):  # sent, hidden but for 2 ms
            with span(name, name):
                now["device"] += ms
    assert [(event["name"], event["dur"]) for event in events] == [
        ("all_gather", 0.0), ("forward", 7000.0), ("wait", 2000.0), ("step", 9000.0)
    ]  # fmt: skip
    assert sum(event["dur"] for event in events[:-1]) == events[-1]["dur"]
    assert [round(event["ts"] - events[0]["ts"]) for event in events] == [0, 0, 7000, 0]


GUARDED = """
import paddle, sys
from kernels import OtherKernel, forbid_other_kernels
from no_host_traffic import HostTraffic, count_reads, forbid_host_traffic
from paddlenlp_galvatron.runtime.adapters import load_family
from paddlenlp_galvatron.runtime.engine import Engine
from paddlenlp_galvatron.runtime.setup import ModelSetup
from paddlenlp_galvatron.runtime.stage import Stage
from paddlenlp_galvatron.check.parity.parity import batch_of, small_case
from paddlenlp_galvatron.plan import Assumptions
from paddlenlp_galvatron.options.uniform import uniform_plan
reads = count_reads()
engines = []
for family, layers, chunks, full in (("qwen2_moe", 3, 2, 1), ("llama", 1, 1, 0)):
    given = {"layers": layers, "chunks": chunks, "global_checkpoint": full, "global_train_batch_size": 2}
    plan = uniform_plan(world_size=1, assumed=Assumptions(seq_length=8), **given)
    case = small_case(plan, family)
    engine = Engine(ModelSetup.of(case.plan, case.shape, case.seq_length))
    assert engine.stage.mask is not None and "mask" in vars(engine.stage)
    assert all(block._layer.self_attn.rotary_emb.cos_cached is not None for block in engine.stage._blocks)
    optimizer = case.recipe.build(engine.tensors, engine.decaying)
    batch = batch_of(case, 0)
    reads.clear()
    for _ in range(2):
        engine.forward_backward(batch)
        engine.update(optimizer, 1.0)
    of_experts = layers * chunks if case.shape.experts else 0  # how many rows each gets; not again in backward
    assert len(reads) == 2 * (2 + of_experts), reads
    engines.append((engine, batch))
forbid_host_traffic()
forbid_other_kernels()
for engine, batch in engines:
    engine.forward_backward(batch)
    engine.evaluate(batch)
forward = Stage.forward
for read in (
    lambda x: float(x), lambda x: x.numpy(), lambda x: x.item(), lambda x: paddle.to_tensor(x.shape),
    lambda x: paddle.nonzero(x), lambda x: x.unsqueeze(0).copy_(x.unsqueeze(0)), lambda x: paddle.logsumexp(x),
    lambda x: paddle._C_ops.argsort(x, 0, False, True),
):
    Stage.forward = lambda *a: (out := forward(*a), read(out))[0]
    try:
        engine.forward_backward(batch)
    except (HostTraffic, OtherKernel):
        continue
    sys.exit("not seen")
"""


def test_a_step_reads_loss_and_norm_and_the_guard_sees_what_else_is_read(tmp_path):
    program, stated = tmp_path / "guarded.py", tmp_path / "printed"
    program.write_text(GUARDED)
    assert fork([str(program)], os.environ, stated).wait(600) == 0, stated.read_text()[-2000:]
