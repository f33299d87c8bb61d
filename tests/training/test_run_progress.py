"""Rank 0's lines about checkpoints reach the terminal, a whole line at a time."""

import json
from statistics import median

from paddlenlp_galvatron.cli.training_run import KEPT, LogTail, RankNews
from paddlenlp_galvatron.plan import plan_id, uniform_plan


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
