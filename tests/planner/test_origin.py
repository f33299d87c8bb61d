"""Prices follow the statements of a plan's file."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cost_examples import COMPUTATION, HARDWARE, MEMORY, MODEL, example

from paddlenlp_galvatron.cost_model import CostOptions, Task
from paddlenlp_galvatron.model import config_of
from paddlenlp_galvatron.options.uniform import uniform_plan
from paddlenlp_galvatron.plan import write_plan
from paddlenlp_galvatron.plan.precision import Precision
from paddlenlp_galvatron.plan.strategy import Assumptions
from paddlenlp_galvatron.planner import search
from paddlenlp_galvatron.planner.explain import explain
from paddlenlp_galvatron.planner.origin import OriginOptions, read_origin

BF16 = Assumptions(True, Precision.BF16, seq_length=512)


def written(folder, assumed: Assumptions):
    """Profiles, model and a plan that names nothing but its assumptions."""
    for profile in (HARDWARE, COMPUTATION, MEMORY):
        profile.save(folder / "configs")
    (folder / "example.json").write_text(json.dumps(config_of(MODEL)))
    plan = uniform_plan(
        layers=MODEL.layers, world_size=8, global_train_batch_size=32, chunks=2, global_tp_deg=2, assumed=assumed
    )
    write_plan(plan, folder / "plan.json")
    return {
        "plan": folder / "plan.json",
        "profiles": folder / "configs",
        "model_size": str(folder / "example.json"),
        "memory_constraint": 8,
        "num_gpus_per_node": 4,
    }


@pytest.mark.parametrize("summed", [None, True, False])
def test_gradients_are_of_the_type_that_the_plan_names(tmp_path, summed):
    plan, question = read_origin(OriginOptions.from_values(written(tmp_path, replace(BF16, fp32_gradients=summed))))
    assert question.cost.assumed.fp32_gradients is (summed is not False)
    (stage,) = question.cost.predict(plan).stages
    (expected,) = example(fp32_gradients=summed is not False).predict(plan).stages
    assert stage.memory.states_mib == pytest.approx(expected.memory.states_mib)


@pytest.mark.parametrize("flash", [None, True, False])
def test_attention_is_the_one_that_the_plan_names(tmp_path, flash):
    _, question = read_origin(OriginOptions.from_values(written(tmp_path, replace(BF16, flash_attention=flash))))
    assert question.options.use_flash_attention is question.cost.assumed.flash_attention is flash


@pytest.mark.parametrize(
    ("task", "rank", "trained"), [("lora", None, Task(8)), ("lora", 4, Task(4)), ("dpo", 16, Task(16))]
)
def test_a_task_is_priced_in_every_number(tmp_path, task, rank, trained):
    values = written(tmp_path, BF16)
    plan, question = read_origin(OriginOptions.from_values(values | {"task": task, "lora_rank": rank}))
    reported = explain(plan, question)
    expected = example(options=CostOptions(task=trained), fp32_gradients=True)
    assert reported.prediction == expected.predict(plan)
    more = next(one for one in reported.what_ifs if one.name == "memory")
    options = question.options.model_copy(update={"memory_constraint": 9.0})
    assert more.time_s == search(expected.models, expected, options).time_s
    full = explain(*read_origin(OriginOptions.from_values(values)))
    for stage, whole in zip(reported.stages, full.stages, strict=True):
        assert sum(stage.time_ms.values()) == pytest.approx(reported.prediction.time_s * 1000)
        assert sum(stage.memory_mib.values()) == pytest.approx(8 * 1024)
        assert (stage.memory_mib["moments"] < whole.memory_mib["moments"] / 5) == trained.frozen
    assert reported.searched.uniform and full.searched.uniform
    assert reported.searched.uniform.time_s != full.searched.uniform.time_s
    assert all(
        one.time_s != other.time_s for one, other in zip(reported.what_ifs, full.what_ifs, strict=True) if one.plan
    )


def test_the_reserve_of_a_gpu_is_that_of_each_budget(tmp_path, galvatron, monkeypatch):
    """The memory that a search would leave free on the device, for the plan as it is and after each change."""
    monkeypatch.chdir(tmp_path)
    words = ("--num_nodes", 1, "--num_gpus_per_node", 4, "--seq_length", 4096)
    cluster = ("profile", "all", "--analytic", "h100", "--output", "configs", "--model_size", "qwen2.5-7b")
    assert galvatron(*cluster, "--num_nodes", 1, "--nproc", 4, "--seq_length", 4096).code == 0

    def searched(gb: float, **changes) -> float:
        asked = {"model_size": "qwen2.5-7b", "settle_bsz": 32, "memory_constraint": gb} | changes
        given = [f"--{name}={value}" for name, value in asked.items()]
        ran = galvatron("search", *words, *given, "--output_config_path", f"{gb}.json", "--json")
        return json.loads(ran.out.splitlines()[-1])["time_s"]

    best = searched(60.0)
    reported = json.loads(galvatron("explain", "60.0.json", "--json").out)
    assert reported["time_s"] == pytest.approx(best)
    more = next(one for one in reported["what_if"] if one["name"] == "memory")
    assert more["time_s"] == pytest.approx(searched(61.0), rel=1e-9)
    less = json.loads(galvatron("explain", "60.0.json", "--memory_constraint", 61, "--json").out)
    assert less["best"]["time_s"] == pytest.approx(searched(61.0))
    predicted = json.loads(Path("61.0.json").read_text())["galvatron"]["predicted"]
    own = predicted["stages"][0]["memory"]["context_mib"]
    assert less["stages"][0]["memory_mib"]["reserve"] == pytest.approx(own)
    searched(60.0, context_mib=1000)
    kept = json.loads(galvatron("explain", "60.0.json", "--memory_constraint", 61, "--json").out)
    assert kept["stages"][0]["memory_mib"]["reserve"] == 1000
