"""Attributes that a PaddleNLP user's callback and script read on 2 and 4 processes, under uniform and layer-wise
plans."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("paddle")

from small_model import small_config

from paddlenlp_galvatron.check.parity.one_process import train_one_process
from paddlenlp_galvatron.launch.processes import launch
from paddlenlp_galvatron.plan import DataParallel, Plan, load_model, write_plan
from paddlenlp_galvatron.training.checkpoint.loading import weights_from
from paddlenlp_galvatron.training.recipe import Recipe

from .plans import plan

MODEL = small_config("qwen2", layers=4, num_key_value_heads=2)
PLANS = {
    2: {"uniform": plan(2, "2 2 2 2"), "layerwise": plan(2, "1z 2r 2u 1", vocab="2")},
    4: {
        "uniform": plan(4, "2z 2z 2z 2z", (2, 2), vocab="2", micro_batches=4),
        "sequence": plan(4, "2u 2u 2u 2u"),
        "layerwise": plan(4, "1 2 2s 4z", vocab="4z"),
        "stages": plan(4, "2 1 1z 1", (1, 3), micro_batches=4),
    },
}
AXES = ("pipe", "model", "sep", "sharding", "data")
AGAIN = {(4, "uniform"), (4, "sequence")}  # where the other plans show the same
CASES = [
    pytest.param(world, name, marks=[pytest.mark.slow] if (world, name) in AGAIN else [])
    for world, named in PLANS.items()
    for name in named
]


class Reports(dict[tuple[int, str], list[dict]]):
    """The records of each rank, by world and plan, and the folder. A launch runs all further plans of its world."""

    def __init__(self, make_folder: Callable[[str], Path]):
        super().__init__()
        self._make_folder = make_folder

    def __missing__(self, asked: tuple[int, str]) -> list[dict]:
        world, _ = asked
        names = [name for name in PLANS[world] if ((world, name) in AGAIN) == (asked in AGAIN)]
        folder = self._make_folder(f"surface{world}")
        (folder / "model.json").write_text(json.dumps(MODEL))
        for name in names:
            of = PLANS[world][name]
            write_plan(replace(of, assumed=replace(of.assumed, seq_length=16)), folder / f"{name}.json")
        launch(f"{__package__}.surface_worker", [str(folder), *names], world, folder / "log", timeout_s=600)
        for name in names:
            ranks = [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(world)]
            self[world, name] = [report | {"folder": folder} for report in ranks]
        return self[asked]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> Reports:
    return Reports(tmp_path_factory.mktemp)


def degrees(of: Plan, layer: int) -> dict[str, int]:
    """The ranks of each axis of a layer, by the plan's own words."""
    strategy, dp = of.layers[layer], of.dp(of.layers[layer])
    zero = strategy.dp_type is DataParallel.ZERO3
    return {
        "pipe": len(of.stages),
        "model": strategy.tp,
        "sep": strategy.degree if strategy.ulysses else 1,
        "sharding": dp if zero else 1,
        "data": 1 if zero else dp,
    }


@pytest.mark.parametrize(("world", "name"), CASES)
def test_every_layer_answers_truthfully_on_every_rank(found, world, name):
    of = PLANS[world][name]
    for layer in range(4):
        expected = degrees(of, layer)
        assert math.prod(expected.values()) == world
        answers = [report["layers"][layer] for report in found[world, name]]
        for rank, answer in enumerate(answers):
            assert {axis: answer[f"get_{axis}_parallel_world_size"] for axis in AXES} == expected
            assert answer["get_stage_id"] == rank // of.stage_size
        asked = ["get_stage_id", *(f"get_{axis}_parallel_rank" for axis in AXES if axis != "pipe")]
        places = [tuple(answer[name] for name in asked) for answer in answers]
        assert len(set(places)) == world
        if not of.layers[layer].consecutive:
            assert [answer["get_model_parallel_rank"] for answer in answers] == [0, 0, 1, 1]


@pytest.mark.parametrize(("world", "name"), CASES)
def test_the_whole_answers_where_layers_agree_and_refuses_in_a_sentence(found, world, name):
    of, reports = PLANS[world][name], found[world, name]
    uniform = len(set(of.layers)) == 1
    for rank, report in enumerate(reports):
        whole = report["whole"]
        assert report["numbers"] == [
            world, rank, rank // of.stage_size, rank < of.stage_size, rank >= world - of.stage_size,
        ]  # fmt: skip
        assert whole["get_global_rank"] == rank and whole["get_stage_id"] == rank // of.stage_size
        assert whole["get_pipe_parallel_world_size"] == len(of.stages)
        assert "is not answered under a plan" in whole["get_model_parallel_group"]
        if uniform:
            assert whole == report["layers"][0]
        # All ranks take the same way.
        assert [question for question, answer in whole.items() if "UserError" in str(answer)] == [
            question for question, answer in reports[0]["whole"].items() if "UserError" in str(answer)
        ]
    if not uniform:
        refusal = reports[0]["whole"]["get_model_parallel_world_size"]
        assert "depends on the layer in this plan (" in refusal and " in layer 0, " in refusal
        assert ".of_layer(0).get_model_parallel_world_size()" in refusal and "\n" not in refusal


@pytest.mark.parametrize(("world", "name"), CASES)
def test_arguments_report_the_plan_and_their_product_is_the_global_batch(found, world, name):
    of, reports = PLANS[world][name], found[world, name]
    widest = max(range(4), key=lambda layer: of.layers[layer].degree)
    expected = degrees(of, widest)
    for rank, report in enumerate(reports):
        args = report["args"]
        assert args["train_batch_size"] * args["gradient_accumulation_steps"] * args["dataset_world_size"] == 8
        assert args["per_device_train_batch_size"] == args["eval_batch_size"] == args["train_batch_size"]
        assert args["gradient_accumulation_steps"] == of.micro_batches
        names = {"model": "tensor", "pipe": "pipeline"}
        assert {axis: args[f"{names.get(axis, axis)}_parallel_degree"] for axis in AXES} == expected
        assert args["dataset_world_size"] == expected["data"] * expected["sharding"]
        assert (args["world_size"], args["process_index"], args["local_process_index"]) == (world, rank, rank)
        assert args["pipeline_parallel_rank"] == rank // of.stage_size
        assert args["tensor_parallel_rank"] == report["layers"][widest]["get_model_parallel_rank"]
        assert args["recompute"] == any(layer.recompute for layer in of.layers)
        assert report["sharding"] == (["stage3"] if expected["sharding"] > 1 else [])
        assert report["described"] and report["own"] == name


@pytest.mark.parametrize(("world", "name"), CASES)
def test_parameters_have_the_models_names_and_the_loader_the_ranks_samples(found, world, name):
    of, reports = PLANS[world][name], found[world, name]
    names = set()
    for rank, report in enumerate(reports):
        own = {f"qwen2.layers.{layer}." for layer in of.stage_layers(rank // of.stage_size)}
        parameters = report["parameters"]
        assert list(parameters) == report["keys"]
        assert {name[: name.index(".", 13) + 1] for name in parameters if ".layers." in name} == own
        assert "the plan's engine runs" in report["model runs"]
        names |= parameters.keys()
        for layer in of.stage_layers(rank // of.stage_size):
            shape = parameters[f"qwen2.layers.{layer}.mlp.up_proj.weight"]
            if of.layers[layer].dp_type is DataParallel.DDP:
                assert shape == [32, 64 // of.layers[layer].tp]
    assert len(names) == 4 * 12 + 3 and {"qwen2.embed_tokens.weight", "qwen2.norm.weight", "lm_head.weight"} < names
    # A micro-batch's samples, over the ranks that load others, in the order of PaddleNLP's sampler.
    order = np.arange(32)
    np.random.RandomState(0).shuffle(order)
    loaded = {report["args"]["dataset_rank"]: report["loaded"] for report in reports}
    together = [sample for parts in zip(*(loaded[rank] for rank in sorted(loaded)), strict=True) for sample in parts]
    assert np.concatenate(together).tolist() == order.tolist()


@pytest.mark.parametrize(("world", "name"), CASES)
def test_a_rank_reads_the_rows_that_it_computes_on(found, world, name):
    """Each once: on the first and the last stage its share of the vocabulary's data-parallel ranks, else none."""
    of, reports = PLANS[world][name], found[world, name]
    order = np.arange(32)
    np.random.RandomState(0).shuffle(order)
    for stage in range(len(of.stages)):
        own = [report["read"] for report in reports[stage * of.stage_size : (stage + 1) * of.stage_size]]
        ends = stage in (0, len(of.stages) - 1)
        assert {len(rows) for rows in own} == ({32 // of.dp(of.vocab)} if ends else {0})
        if ends:
            assert sorted({row for rows in own for row in rows}) == list(range(32))
            first = set(order[: of.global_batch].tolist())
            assert all(set(rows[: of.global_batch // of.dp(of.vocab)]) <= first for rows in own)


@pytest.mark.parametrize(("world", "name"), CASES)
def test_a_saved_model_is_the_one_that_was_evaluated_and_a_run_continues(found, world, name):
    reports = found[world, name]
    folder, shape = reports[0]["folder"], load_model(reports[0]["folder"] / "model.json")
    assert len({(report["loss"], report["evaluated"]) for report in reports}) == 1
    assert reports[0]["again"] == pytest.approx(reports[0]["evaluated"], abs=1e-6) and reports[0]["global_step"] == 4
    for saved in (folder / f"{name}.model", folder / name):
        tokens = np.random.default_rng(3).integers(64, size=(32, 17))
        tokens[:, 1] = np.arange(32)
        [(loss, _)] = train_one_process(shape, 16, weights_from(saved, shape), Recipe(), [tokens[:16]])
        assert loss == pytest.approx(reports[0]["evaluated"], abs=1e-5)
    assert (folder / name / "checkpoints").is_dir() and not list(folder.glob("*.part"))


def test_events_come_in_paddlenlps_order(found):
    micro = ["on_load_data_end", "on_step_begin", "on_substep_end", "on_load_data_end"]
    step = [*micro, "on_optimizer_begin", "on_optimizer_end", "on_step_end"]
    evaluation = [*["on_prediction_step"] * 2, "on_log", "on_evaluate"]
    interval = [*step, *step, "on_log", *evaluation, "on_save"]
    assert found[2, "uniform"][1]["events"] == [
        *("on_init_end", "on_train_begin", "on_epoch_begin"),
        *(*interval, *interval, "on_epoch_end", "on_log", "on_train_end"),
        *evaluation,
    ]
