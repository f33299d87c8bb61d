"""`galvatron explain`: its terms add up, and each "what if" is the answer of a search under that change."""

import json
import re
import shutil
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from cost_examples import HARDWARE

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.cli.main import main
from paddlenlp_galvatron.plan import DataParallel, read_plan, write_plan
from paddlenlp_galvatron.plan.check import require_trainable
from paddlenlp_galvatron.planner import explain as explaining
from paddlenlp_galvatron.planner import question
from paddlenlp_galvatron.planner.explain import faster_links
from paddlenlp_galvatron.report import explain

from .test_search import OPTIONS, PLAN, folder, words, write_profiles  # noqa: F401 - a fixture

BUDGET_GB = 0.9  # in which strategies differ from layer to layer

GAP = 1e-3 * (1 + 1e-9)  # at which a search stops by default


@pytest.fixture(scope="module")
def searched(tmp_path_factory) -> tuple[Path, str]:
    """A folder with profiles and the plan that was searched from them, and its explanation as JSON."""
    where = tmp_path_factory.mktemp("searched")
    write_profiles(where)
    options = OPTIONS | {"memory_constraint": BUDGET_GB, "output_config_path": "plan.json"}
    with chdir(where), redirect_stderr(StringIO()) as err:
        with redirect_stdout(StringIO()):
            assert main(words(**options)) == 0
        with redirect_stdout(StringIO()) as out:
            assert main(["explain", "plan.json", "--json"]) == 0
    assert all(line.startswith(("note: ", "search ")) for line in err.getvalue().splitlines())
    return where, out.getvalue()


@pytest.fixture
def explained(searched, tmp_path, monkeypatch) -> dict[str, Any]:
    where, reported = searched
    shutil.copytree(where, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return json.loads(reported)


def test_stages_add_up_to_step_and_budget(explained):
    predicted = read_plan("plan.json").metadata["predicted"]
    assert explained["time_s"] == pytest.approx(predicted["time_s"])
    for stage in explained["stages"]:
        assert sum(stage["time_ms"].values()) == pytest.approx(predicted["time_s"] * 1000)
        assert sum(stage["memory_mib"].values()) == pytest.approx(BUDGET_GB * 1024)


def test_each_what_if_is_a_search_under_that_change(explained, galvatron):
    def searched(**changed) -> float | None:
        ran = galvatron(*words(**OPTIONS | {"memory_constraint": BUDGET_GB, "json": 1} | changed))
        return json.loads(ran.out.splitlines()[-1])["time_s"] if ran.code == 0 else None

    known = read_plan("plan.json")
    cluster = {"allreduce_bandwidth_config_path": "configs/allreduce_bandwidth_2nodes_4gpus_per_node.json"}
    cluster["p2p_bandwidth_config_path"] = "configs/p2p_bandwidth_2nodes_4gpus_per_node.json"
    changes = {"memory": {"memory_constraint": BUDGET_GB + 1}, "nodes": {"num_nodes": 4, "settle_bsz": 32, **cluster}}
    changes |= {"sequence": {"seq_length": 1024}, "batch": {"settle_bsz": 64}}
    changes["interleaving"] = {"max_virtual_pp_deg": 8}
    for link, hardware in faster_links(HARDWARE).items():
        hardware.save(f"faster {link}")
        both = ("allreduce_bandwidth_config_path", "p2p_bandwidth_config_path", "overlap_coe_path")
        changes[link] = dict.fromkeys(both, f"faster {link}")
    answers = [answer for answer in explained["what_if"] if answer["name"] != "micro-batches"]
    assert {answer["name"] for answer in answers} == set(changes)
    for answer in answers:
        assert answer["time_s"] == pytest.approx(searched(**changes[answer["name"]])), answer
        assert (answer["time_s"] is None) == bool(answer["why_not"])
    assert sum(answer["time_s"] is not None for answer in answers) >= 5
    for answer in explained["what_if"]:
        if answer["name"] == "micro-batches":
            chunks = int(answer["change"].split()[-1])
            assert answer["time_s"] == pytest.approx(searched(settle_chunk=chunks)) and chunks != known.micro_batches


def test_searches_that_are_stopped_say_that_more_may_be_gained(explained, galvatron, monkeypatch):
    """As in spaces that take minutes: the gains of whole searches lie within the gaps."""
    monkeypatch.setattr(question, "LEAST_S", 0.0)
    monkeypatch.setattr(explaining, "SEARCHES_S", 0.0)
    stopped = json.loads(galvatron("explain", "plan.json", "--json").out)
    found = [answer for answer in stopped["what_if"] if answer["time_s"]]
    assert sum(answer["gap"] > 0 for answer in found) >= 3
    exact = {(answer["name"], answer["change"]): answer for answer in explained["what_if"]}
    for answer in found:
        whole = exact[answer["name"], answer["change"]]
        assert whole["gap"] <= GAP
        assert answer["time_s"] * (1 - answer["gap"]) <= whole["time_s"] * (1 + 1e-9)
        assert whole["time_s"] * (1 - GAP) <= answer["time_s"]
    shown = galvatron("explain", "plan.json").out
    assert explain.UNCERTAIN in shown and "no faster plan was found; no plan of the space takes less than" in shown
    assert re.search(r"^memory +0\.9 -> 1\.9 GiB .*at least \+\d+\.\d%$", shown, re.MULTILINE)
    assert "…" not in shown.split("what if")[1] and "no plan was found in 0 s" in shown


def test_one_gap_in_every_answer_and_no_advice_to_search_what_a_search_wrote(explained, galvatron, tmp_path):
    """The plan is the simplest within a wide tolerance, so its gap is not that of the fastest one."""
    asked = OPTIONS | {"memory_constraint": 0.45, "gap": 0, "simplest_within": 40, "output_config_path": "simple.json"}
    answer = json.loads(galvatron(*words(**asked, json=1)).out.splitlines()[-1])
    gap = 1 - answer["lower_bound_s"] / answer["time_s"]
    assert answer["gap"] == pytest.approx(gap) and gap > answer["fastest"]["gap"] == 0
    simple = read_plan("simple.json")
    assert simple.metadata["predicted"]["gap"] == answer["gap"]
    for command in (words(**asked), ["plan", "show", "simple.json"], ["explain", "simple.json"]):
        assert f"(gap {gap:.2g})" in " ".join(galvatron(*command).out.split()), command
    write_plan(replace(simple, metadata=simple.metadata | {"predicted": {}}), "by_hand.json")
    slower = galvatron("explain", "by_hand.json", "--memory_constraint", 8).out
    searched = galvatron("explain", "simple.json", "--memory_constraint", 8).out
    assert "% slower than the best one of its batch; galvatron search finds that" in slower
    assert "% slower than the best one of its batch\n" in searched


def test_the_best_uniform_plan_and_the_runners_up_are_those_of_a_search(explained, galvatron):
    options = OPTIONS | {"memory_constraint": BUDGET_GB, "json": 1}
    uniform = json.loads(galvatron(*words(**options, fine_grained_mode=0)).out.splitlines()[-1])
    assert explained["uniform"]["time_s"] == pytest.approx(uniform["time_s"])
    assert uniform["time_s"] >= explained["time_s"]
    others = json.loads(galvatron(*words(**options, top_k=4)).out.splitlines()[-1])["runners_up"]
    assert [other["why"] for other in explained["runners_up"]] == [other["why"] for other in others]


def test_one_layer_more_is_what_the_changed_plan_costs(explained, galvatron):
    plan = read_plan("plan.json")
    now = {(layer.degree, layer.dp_type, layer.recompute) for layer in plan.layers}
    others = explained["one_layer_more"]
    assert others and all(other["time_s"] >= explained["time_s"] * (1 - 1e-9) for other in others if other["fits"])
    assert all((other["memory_mib"] <= BUDGET_GB * 1024) == other["fits"] for other in others)
    other = next(other for other in others if other["strategy"] == "zero2, recompute")
    assert (1, DataParallel.ZERO2, True) not in now or other["layer"] is not None
    strategy = replace(plan.layers[0], degree=1, ulysses=False, dp_type=DataParallel.ZERO2, recompute=True)
    layers = list(plan.layers)
    layers[other["layer"]] = strategy
    write_plan(replace(plan, layers=tuple(layers)), "changed.json")
    changed = json.loads(galvatron("explain", "changed.json", "--json").out)
    assert changed["time_s"] == pytest.approx(other["time_s"])


def test_where_one_layer_has_very_many_ways_to_change_some_layers_are_tried(explained, galvatron, monkeypatch):
    whole = {other["strategy"]: other for other in explained["one_layer_more"]}
    assert explained["layers_tried"] == explained["layers_that_differ"] > 2
    monkeypatch.setattr(explaining, "MOST_PRICED", 1)
    reported = json.loads(galvatron("explain", "plan.json", "--json").out)
    assert (reported["layers_tried"], reported["layers_that_differ"]) == (2, explained["layers_that_differ"])
    assert {other["layer"] for other in reported["one_layer_more"]} <= {0, len(read_plan("plan.json").layers) - 1}
    assert all(
        whole[other["strategy"]]["time_s"] <= other["time_s"] for other in reported["one_layer_more"] if other["fits"]
    )
    assert "under another strategy (the best of 2 of its layers)" in galvatron("explain", "plan.json").out


def test_it_reads_well_at_80_columns(explained, galvatron, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = galvatron("explain", "plan.json").out
    for title in ("time of a step", "memory of a device", "bottlenecks", "the best plans", "one layer more", "what if"):
        assert title in shown
    assert "no plan of the space takes" in shown and "one strategy for all layers" in shown
    tables = shown.split("time of a step")[1].split("the best plans")[0]
    assert "…" not in tables and "reserve" not in tables


def test_a_plan_of_another_program_needs_what_it_does_not_name(folder, galvatron):  # noqa: F811
    options = OPTIONS | {"output_config_path": "plan.json"}
    assert galvatron(*words(**options)).code == 0
    fields = json.loads((folder / "plan.json").read_text())
    assumed = fields["galvatron"]["assumed"]
    (folder / "bare.json").write_text(json.dumps(fields | {"galvatron": {"assumed": assumed}}))
    assert "--model_size" in galvatron("explain", "bare.json").err
    ran = galvatron("explain", "bare.json", "--model_size", "example.json", "--num_gpus_per_node", 4)
    assert ran.code == 2 and "give --memory_constraint" in ran.err
    given = ("--model_size", "example.json", "--memory_constraint", 8, "--profiles", "configs", "--json")
    reported = json.loads(galvatron("explain", "bare.json", *given, "--num_gpus_per_node", 4).out)
    assert reported["time_s"] == pytest.approx(fields["galvatron"]["predicted"]["time_s"])
    for broken in (
        {"options": 3},
        {"profiles": 3, "options": {}, "memory_constraint_gb": None},
        {"options": {"num_nodes": []}},
        {"model_options": {"colour": 1}},
    ):
        searched = fields["galvatron"]["searched_from"] | broken
        (folder / "broken.json").write_text(json.dumps(fields | {"galvatron": {"searched_from": searched}}))
        ran = galvatron("explain", "broken.json")
        assert ran.code == 2 and ran.err.splitlines()[-1].startswith("error: ")


def test_what_a_plan_was_searched_for_is_explained_and_not_trained(folder, galvatron):  # noqa: F811
    """Every command that prices a plan takes the task from its file, or another one that is given."""
    assert galvatron(*words(**OPTIONS, task="lora", lora_rank=4)).code == 0
    path = folder / "configs" / PLAN.replace(".json", "_lora.json")
    plan = read_plan(path)
    searched_s = plan.metadata["predicted"]["time_s"]

    def step_s(*task: str) -> list[float]:
        explained = json.loads(galvatron("explain", path, *task, "--json").out)["time_s"]
        compared = json.loads(galvatron("plan", "diff", path, path, *task, "--json").out)["time_ms"]
        assert galvatron("plan", "trace", path, *task, "-o", "trace.json").code == 0
        events = json.loads(Path("trace.json").read_text())["traceEvents"]
        ends_us = max(event["ts"] + event["dur"] for event in events if "dur" in event)
        return [explained, sum(compared[1].values()) / 1000, ends_us / 1e6]

    assert step_s() == pytest.approx([searched_s] * 3)
    for task in (("--task", "lora", "--lora_rank", "2000"), ("--task", "dpo"), ("--task", "pretrain")):
        others = step_s(*task)
        assert others == pytest.approx([others[0]] * 3) and others[0] > searched_s, task
    with pytest.raises(UserError, match="was searched for adapters, but pretrain trains all weights"):
        require_trainable(plan, "pretrain")


def test_two_plans_differ_by_fields_layers_and_terms(explained, galvatron):
    plan = read_plan("plan.json")
    other = replace(plan, layers=(replace(plan.layers[0], recompute=not plan.layers[0].recompute), *plan.layers[1:]))
    write_plan(other, "other.json")
    reported = json.loads(galvatron("plan", "diff", "plan.json", "other.json", "--json").out)
    assert reported["fields"] == {} and [row["layers"] for row in reported["layers"]] == ["0"]
    ours = json.loads(galvatron("explain", "other.json", "--json").out)
    assert sum(reported["time_ms"][0].values()) == pytest.approx(explained["time_s"] * 1000)
    assert sum(reported["time_ms"][1].values()) == pytest.approx(ours["time_s"] * 1000)
    assert "the plans say the same" in galvatron("plan", "diff", "plan.json", "plan.json").out
    fields = json.loads(Path("plan.json").read_text())
    del fields["galvatron"]["searched_from"]
    Path("bare.json").write_text(json.dumps(fields | {"global_bsz": 64}))
    ran = galvatron("plan", "diff", "plan.json", "bare.json")
    assert ran.code == 0 and "note: no time and memory" in ran.err
    assert ["batch", "32", "64"] in [line.split() for line in ran.out.splitlines()]


def test_plans_of_one_device_have_one_reserve(galvatron, tmp_path, monkeypatch):
    """Also one that was written by hand, whose file names no budget."""
    monkeypatch.chdir(tmp_path)
    model = ("--model_size", "qwen2.5-0.5b", "--seq_length", "2048", "--num_gpus_per_node", "2")
    assert galvatron("profile", "all", "--analytic", "h100", *model, "--output", "profiles").code == 0
    assert galvatron("search", *model, "--profiles", "profiles", "--output_config_path", "plan.json").code == 0
    fields = json.loads(Path("plan.json").read_text())
    del fields["galvatron"]["searched_from"]
    Path("hand.json").write_text(json.dumps(fields))
    given = ("--profiles", "profiles", "--model", "qwen2.5-0.5b", "--json")
    for pair in (("hand.json", "plan.json"), ("plan.json", "hand.json")):
        first, second = json.loads(galvatron("plan", "diff", *pair, *given).out)["memory_mib"]
        assert first == second and first["reserve"] > 1000
