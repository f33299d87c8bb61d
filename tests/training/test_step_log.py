"""train_log.jsonl: a run continues after any remains of a crash, a loss of power or another program."""

import json
import math
from datetime import datetime, timedelta
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddlenlp_galvatron.base.errors import GalvatronError
from paddlenlp_galvatron.cli.training_run import KEPT, LogTail, RankNews
from paddlenlp_galvatron.options.uniform import uniform_plan
from paddlenlp_galvatron.plan import plan_id
from paddlenlp_galvatron.report.measured import has_all_peaks, stage_peaks_mib
from paddlenlp_galvatron.training import step_log
from paddlenlp_galvatron.training.step_log import StepLog, append_event, new_event, peaks_to_log, read_log

PLAN = uniform_plan(layers=1, world_size=1, global_train_batch_size=1)


def record(step: int, loss: float = 1.0) -> step_log.StepRecord:
    return step_log.StepRecord(
        step=step,
        steps=9,
        loss=loss,
        lr=1e-3,
        grad_norm=1.0,
        step_time_s=0.1,
        data_s=0.01,
        tokens_per_s=9.0,
        plan=plan_id(PLAN),
        peak_memory_mib=[1.0],
        peak_memory_rank=0,
    )


def write(path, *steps: int) -> list[int]:
    log = StepLog(path)
    for step in steps:
        log.write(record(step))
    log.close()
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_run_that_goes_back_replaces_the_lines_behind_it(tmp_path):
    path = tmp_path / "log"
    assert write(path, 0, 1, 2, 3) == [0, 1, 2, 3]
    path.write_text(path.read_text() + '{"step": 4, "lo')  # by a kill
    assert write(path, 2, 3) == [0, 1, 2, 3]


def test_a_step_that_is_written_again_takes_its_lines_place(tmp_path):
    path = tmp_path / "log"
    log, tail = StepLog(path), LogTail(path, PLAN)
    seen = []
    for line in (record(0), record(0) | {"eval_loss": 2.0}, record(1), record(1) | {"eval_loss": 3.0}, record(2)):
        log.write(line)
        tail.read()
        seen.append((tail.count, tail.latest[-1]["step"]))
    log.close()
    assert [(each["step"], each.get("eval_loss")) for each in read_log(path)] == [(0, 2.0), (1, 3.0), (2, None)]
    assert seen == [(1, 0), (1, 0), (2, 1), (2, 1), (3, 2)]


@pytest.mark.parametrize(("ranks", "stages"), [(64, 4), (1024, 8), (1024, 1)])
def test_a_line_does_not_grow_with_the_ranks_and_readers_find_the_peak_of_each_stage(ranks, stages):
    plan = uniform_plan(layers=8, world_size=ranks, global_train_batch_size=1024, pp_deg=stages)
    peaks = [float((37 * rank) % 1009) for rank in range(ranks)]
    fields = {"peak_memory_mib": peaks_to_log(peaks, stages)}
    each = ranks // stages
    assert has_all_peaks(plan, fields)
    assert stage_peaks_mib(plan, [fields]) == [max(peaks[k * each : (k + 1) * each]) for k in range(stages)]
    assert len(fields["peak_memory_mib"]) == (ranks if ranks == 64 else stages)


@pytest.mark.parametrize("prefix", ["[1,0]<stdout>:", "0: ", "worker-0 | ", "[pod/a/b] 2025-11-25T10:00:00.1Z "])
def test_a_copy_with_what_a_launcher_writes_in_front_is_read(tmp_path, prefix):
    path = tmp_path / "log"
    write(path, 0, 1, 2)
    records = read_log(path)
    path.write_text("".join(prefix + line + "\n" for line in path.read_text().splitlines()))
    assert read_log(path) == records and len(records) == 3


def test_a_log_is_followed_past_what_is_no_line_of_one(tmp_path):
    path = tmp_path / "log"
    tail = LogTail(path, PLAN)
    path.write_text('{"step": 0}\nnull\nsaved\n' + json.dumps(record(0)) + "\n")
    assert tail.read() and tail.count == 1 and tail.latest[-1]["step"] == 0


def test_an_older_log_counts_from_0_and_is_continued(tmp_path):
    path = tmp_path / "log"
    old = [{name: value for name, value in record(step).items() if name != "steps"} for step in range(4)]
    path.write_text("".join(json.dumps(line) + "\n" for line in old))
    assert [each["step"] for each in read_log(path)] == [1, 2, 3, 4]
    write(path, 3, 4)
    assert [each["step"] for each in read_log(path)] == [1, 2, 3, 4]
    assert ["steps" in json.loads(line) for line in path.read_text().splitlines()] == [False, False, True, True]


def test_steps_without_a_finite_loss_stay(tmp_path):
    path = tmp_path / "log"
    log = StepLog(path)
    log.write(record(0, math.nan) | {"grad_norm": math.inf, "eval_loss": math.nan})
    log.close()
    [line] = path.read_text().splitlines()
    reported = json.loads(line, parse_constant=pytest.fail)  # NaN and Infinity are no JSON
    assert reported["loss"] is reported["grad_norm"] is reported["eval_loss"] is None
    [read] = read_log(path)
    assert math.isnan(read["loss"]) and math.isnan(read["grad_norm"])
    assert write(path, 1) == [0, 1]


@pytest.mark.parametrize(
    "damage",
    [
        b"\0" * 5000 + b"\n",
        b"\0" * 5000,
        b"\n",
        b"null\n",
        b"7\n",
        b'{"level": "info"}\n',
        b'{"step": "2"}\n',
        b'{"step": 0, "loss": "low"}\n',
        b"[" * 100_000 + b"\n",
        b"\xff\xfe\n",
        b'{"step": ' + b"9" * 5000 + b"}\n",
        b"x" * 5 * 2**20,
    ],
    ids=lambda damage: repr(damage[:20]),
)
def test_what_is_no_line_of_a_log_is_left_out_and_reported(tmp_path, capsys, damage):
    path = tmp_path / "log"
    write(path, 0, 1, 2)
    first, second, third = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second + damage + (b"" if damage.endswith(b"\n") else b"\n") + third)
    assert write(path, 3, 4) == [0, 1, 2, 3, 4]
    reported = capsys.readouterr().err
    assert "damaged lines are skipped, the first is line 3" in reported and len(reported.splitlines()) == 1


@pytest.mark.parametrize("size", [1, 4096])
def test_nuls_at_the_end_are_what_a_loss_of_power_leaves(tmp_path, size):
    path = tmp_path / "log"
    write(path, 0, 1)
    path.write_bytes(path.read_bytes() + b"\0" * size)
    assert write(path, 2) == [0, 1, 2]


def test_a_log_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "log").mkdir()
    with pytest.raises(GalvatronError) as raised:
        StepLog(tmp_path / "log").write(record(0))
    assert "not a regular file" in str(raised.value) and "\n" not in str(raised.value)


def test_a_log_that_is_removed_ends_the_run(tmp_path):
    log = StepLog(tmp_path / "log")
    log.write(record(0))
    (tmp_path / "log").unlink()
    with pytest.raises(GalvatronError, match="log: was removed while this run wrote it"):
        log.write(record(1))
    log.close()


def events(path) -> list[dict]:
    return [event for line in path.read_bytes().splitlines(keepends=True) if (event := step_log.event_of(line))]


def test_events_stay_when_steps_are_lost_and_say_how_many(tmp_path):
    path = tmp_path / "log"
    first = StepLog(path)
    first.event("started", "started", step=0)
    assert not path.exists()  # as a launcher takes the file for the first step's
    for step in (1, 2, 3):
        first.write(record(step) | {"run": first.run})
    first.event("saved", "saved", step=1)
    first.close()
    path.write_bytes(path.read_bytes() + b'{"step": 4, "lo')  # by a kill
    append_event(path, new_event(first.run, "failed", "a rank died"))
    again = StepLog(path)
    again.event("resumed", "resuming", step=1)
    again.write(record(2) | {"run": again.run})
    again.close()
    assert [each["step"] for each in read_log(path)] == [1, 2]
    assert [each["event"] for each in events(path)] == ["started", "saved", "failed", "resumed"]
    resumed = events(path)[-1]
    assert (resumed["lost_steps"], resumed["lost_s"], resumed["previous_run"]) == (2, 0.2, first.run)
    assert again.run != first.run and datetime.fromisoformat(resumed["time"]).utcoffset() == timedelta(0)


@given(st.lists(st.sampled_from(["step", "again", "longer", "event", "other process"]), max_size=12))
def test_a_step_that_is_written_again_leaves_the_events_behind_it_whole(calls):
    with TemporaryDirectory() as folder:
        path, step, steps, kinds = Path(folder) / "log", 1, {1: None}, []
        log = StepLog(path)
        log.write(record(1))
        for number, call in enumerate(calls):
            if call in ("event", "other process"):
                kinds.append(str(number))
                add = log.event if call == "event" else lambda *event: append_event(path, new_event("x", *event))
                add(str(number), "text")
                continue
            step += call == "step"
            steps[step] = 1.0 + 10**number if call == "longer" else steps.get(step)
            log.write(record(step) | ({"eval_loss": steps[step]} if steps[step] else {}))
        log.close()
        assert {each["step"]: each.get("eval_loss") for each in read_log(path)} == steps
        assert [each["event"] for each in events(path)] == kinds
        assert len(path.read_text().splitlines()) == len(steps) + len(kinds)


def test_a_launcher_sees_each_event_of_its_run_once(tmp_path):
    path = tmp_path / "log"
    write(path, 1, 2)
    append_event(path, new_event("old", "saved", "of a run before"))
    tail, log = LogTail(path, PLAN), StepLog(path)
    log.event("resumed", "resuming", step=2)
    log.write(record(3) | {"run": log.run})
    log.event("saved", "saved")
    assert tail.read() and [each["event"] for each in tail.events] == ["resumed", "saved"]
    log.write(record(3) | {"run": log.run, "eval_metrics": {f"a long name {number}": 1.0 for number in range(30)}})
    log.write(record(4) | {"run": log.run})
    log.close()
    assert tail.read() and [each["event"] for each in tail.events] == ["resumed", "saved"]
    assert tail.latest[-1]["step"] == 4


def test_an_event_that_cannot_be_written_is_a_warning(tmp_path, capsys, monkeypatch):
    log = StepLog(tmp_path / "log")
    log.write(record(1))
    (tmp_path / "log").unlink()
    (tmp_path / "log").mkdir()
    log.event("saved", "saved")
    assert "warning: " in capsys.readouterr().err


def test_lines_of_checkpoints_are_shown_once(tmp_path):
    log = tmp_path / "workerlog.0"
    news = RankNews(log)
    assert news.read() == []
    log.write_text("[INFO] of others\nresuming from step 3\nsaved output/checkpoints/step-000")
    assert news.read() == ["resuming from step 3"]
    with log.open("a") as file:
        file.write("00006\nwriting x: 5% of 3 MiB of rank 0\n")
    assert news.read() == ["saved output/checkpoints/step-00000006", "writing x: 5% of 3 MiB of rank 0"]
    assert news.read() == []


def test_the_median_is_that_of_the_whole_run(tmp_path):
    plan, log = uniform_plan(layers=2, world_size=1, global_train_batch_size=2), tmp_path / "train_log.jsonl"
    tail = LogTail(log, plan)
    numbers = {"loss": 1.0, "lr": 1.0, "grad_norm": 1.0, "step_time_s": 1.0, "plan": plan_id(plan)}
    speeds = [3000.0] * 3 * KEPT + [900.0] * KEPT
    records = [{"step": step, "tokens_per_s": speed, **numbers} for step, speed in enumerate(speeds)]
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert tail.read() and median(tail.speeds) == 3000 and len(tail.latest) == KEPT
