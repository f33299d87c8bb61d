"""A run of a model with experts continues under one plan after the other, with logging and evaluation at their
defaults; each plan's health line and report read the steps of that plan alone."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from small_model import small_config

from paddlenlp_galvatron.cost_model.traffic import step_traffic_bytes
from paddlenlp_galvatron.plan import Plan, load_model, plan_id, write_plan
from paddlenlp_galvatron.training.data.corpus import Corpus, write_dataset
from paddlenlp_galvatron.training.data.tokenizer import train_tokenizer
from paddlenlp_galvatron.training.step_log import read_log

from .plans import having, plan

EACH = 10  # steps, after which the health line comes by default
PLANS = {
    "two ranks": having(plan(2, "1z 2 1 1"), "2 1x2 1z 2"),
    "two stages": having(plan(4, "1 2z 1 1", (2, 2)), "2 1 1x2 2"),
    "two chunks": having(plan(4, "1z 1 2 1", (1, 1, 1, 1), chunks=2), "1 2 2z 1"),
    "one rank": plan(1, "1 1 1 1"),
}
WALK = ("two ranks", "two stages", "two ranks", "two chunks", "one rank")
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
MODEL = small_config("qwen3_moe", layers=4, vocab=257, output_router_logits=True, **EXPERTS)


def with_prediction(of: Plan) -> Plan:
    """With the length of samples, and what the health line compares with."""
    stages = [{"memory_mib": 1e6 * (stage + 1)} for stage in range(of.pipeline)]
    predicted = {"time_s": 10.0, "stages": stages}
    return replace(of, assumed=replace(of.assumed, seq_length=16), metadata={"predicted": predicted})


def require_foreseen_traffic(of: Plan) -> None:
    counted = Counter(json.loads(Path("output/traffic.json").read_text())["bytes"])
    if of.world_size > 1:
        counted["all_reduce"] -= 3 * 4 * of.world_size  # of each rank the loss, that of balance, and the norm
    assert +counted == step_traffic_bytes(with_prediction(of), load_model("model.json"))


def test_a_run_continues_under_any_plan(galvatron, tmp_path):
    Path("model.json").write_text(json.dumps(MODEL))
    Path("text.jsonl").write_text("".join(json.dumps({"text": f"{k} " * 30}) + "\n" for k in range(200)))
    write_dataset(Corpus((Path("text.jsonl"),)), Path("data"), train_tokenizer(["some text"], 257), 0)
    for name, of in PLANS.items():
        write_plan(with_prediction(of), f"{name}.json")
    data = ["--input_dir", "data", "--split", "8,2,0", "--do_eval", 1, "--max_evaluate_steps", 1]
    run = ["--model", "model.json", *data]
    for life, name in enumerate(WALK, 1):
        ran = galvatron("train", f"{name}.json", *run, "--max_steps", life * EACH)
        reported = " ".join(ran.out.split())
        assert ran.code == 0, ran.err
        assert f"step {life * EACH}/{life * EACH}, loss" in reported and "predicted 10 s" in reported
        assert ("memory on stage" in reported) == (PLANS[name].pipeline > 1)
        assert ("busiest rank of experts" in reported) == (name != "one rank")
        require_foreseen_traffic(PLANS[name])
    records = read_log(Path("output/train_log.jsonl"))
    assert [record["step"] for record in records] == list(range(1, len(WALK) * EACH + 1))
    assert [record["plan"] for record in records[::EACH]] == [plan_id(PLANS[name]) for name in WALK]
    assert [record["step"] for record in records if "eval_loss" in record] == [*range(EACH, len(records) + 1, EACH)]
    for record in records:
        assert 2 <= record["metrics"]["aux_loss"] < 4  # of 2 experts a token; 4 where all tokens choose the same two
        assert (
            record["plan"] == plan_id(PLANS["one rank"]) or 1 < record["moe_imbalance"] < record["moe_imbalance_most"]
        )
    derive = ["profile", "all", "--analytic", "h100-80gb", "--seq_length", 16, "--mixed_precision", "fp32"]
    for name, of in PLANS.items():
        assert galvatron(*derive, "--model", "model.json", "--nproc", of.world_size).code == 0
        words = ["--log", "output/train_log.jsonl", "--profiles", "configs", "--model", "model.json"]
        ran = galvatron(
            "report", f"{name}.json", *words, "--num_gpus_per_node", of.world_size, "--memory_constraint", 8
        )
        assert ran.code == 0, ran.err
        assert f"{EACH * WALK.count(name)} steps" in Path("report.html").read_text()
