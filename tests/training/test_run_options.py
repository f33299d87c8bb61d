"""From options to a run: the names that are taken, the plan that is chosen, and what is refused."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from small_model import MODEL as SMALL

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.options.aliases import ALIASES
from paddlenlp_galvatron.options.foreign import FOREIGN
from paddlenlp_galvatron.options.group import canonical_options
from paddlenlp_galvatron.options.uniform import uniform_plan
from paddlenlp_galvatron.plan import read_plan, write_plan
from paddlenlp_galvatron.training.prepare import GROUPS, prepare

MODEL = SMALL | {"num_hidden_layers": 4, "max_position_embeddings": 64}
KNOWN = {name for group in GROUPS for name in group.model_fields}
# Options of the documentation of Galvatron and of its PaddleNLP port that training has, and values for them.
DOCUMENTED = {
    "galvatron_config_path": "None", "pp_deg": "2", "global_tp_deg": "2", "global_tp_consec": "1", "sdp": "1",
    "global_train_batch_size": "16", "chunks": "2", "global_checkpoint": "1", "pipeline_type": "gpipe", "vocab_tp": "2",
    "mixed_precision": "bf16", "use-flash-attn": "0", "sequence-parallel": "1", "use_ulysses": "0",
    "no_async_grad_reduce": "1", "initialize_on_meta": "1", "load": "weights", "load_distributed": "0", "save": "out",
    "save-interval": "7", "set_model_config_manually": "0", "set_layernum_manually": "1", "set_seqlen_manually": "1",
    "num_hidden_layers": "2", "seq_length": "16",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    (tmp_path / "configs").mkdir()
    return tmp_path


def prepared(values: dict, world_size: int | None = None):
    return prepare(canonical_options({"model": "model.json", **values}, KNOWN), world_size)


def plan_file(path, world_size: int, batch: int = 8, layers: int = 4) -> None:
    write_plan(uniform_plan(layers=layers, world_size=world_size, global_train_batch_size=batch), path)


def test_documented_options_make_the_run_that_they_name(folder):
    run = prepared(DOCUMENTED, world_size=4)
    plan, shape = run.settings.load_plan()
    assert (shape.layers, len(plan.stages), plan.layers[0].tp, plan.micro_batches) == (2, 2, 2, 2)
    assert plan.layers[0].recompute
    assert plan.layers[0].dp_type.value == "zero3"
    assert (plan.schedule.value, plan.vocab.tp, plan.global_batch) == ("gpipe", 2, 16)
    assert plan.assumed.mixed_precision.value == "bf16"
    assert (plan.assumed.sequence_parallel, plan.assumed.async_grad_reduce, plan.assumed.seq_length) == (
        True,
        False,
        16,
    )
    assert run.settings.output_dir == folder / "out"
    assert (run.settings.save_steps, run.settings.load.name) == (7, "weights")


def test_every_alias_of_the_table_leads_to_an_option_of_some_command():
    from paddlenlp_galvatron.measure.options import HardwareOptions, PointOptions
    from paddlenlp_galvatron.options.model_options import ModelOptions
    from paddlenlp_galvatron.options.prices import JobOptions
    from paddlenlp_galvatron.planner import SearchOptions

    options = KNOWN.union(
        *(group.model_fields for group in (ModelOptions, SearchOptions, JobOptions, HardwareOptions, PointOptions))
    )
    assert not {ours for ours in ALIASES.values() if ours not in options}
    assert not set(ALIASES) & options
    assert not set(FOREIGN) & options


def test_without_a_plan_the_newest_that_fits_is_taken_and_reported(folder):
    for name, world_size, age in (("old", 4, 300), ("wanted", 4, 200), ("small", 2, 100)):
        plan_file(folder / "configs" / f"{name}.json", world_size)
        os.utime(folder / "configs" / f"{name}.json", (1e9 - age, 1e9 - age))
    run = prepared({"seq_length": 16, "virtual_pp_degree": 1}, world_size=4)  # as stock files have it
    assert run.settings.plan == folder / "configs" / "wanted.json"
    assert "wanted.json, the newest in configs" in run.notes[0]
    with pytest.raises(UserError, match=r"no plan fits.* on 16 ranks"):
        prepared({"seq_length": 16}, world_size=16)


def test_a_plan_beats_the_options_of_global_mode_and_says_so(folder):
    plan_file(folder / "plan.json", 2)
    run = prepared({"galvatron_config_path": "plan.json", "pp_deg": "2", "seq_length": "16"})
    assert run.settings.plan == folder / "plan.json"
    assert run.settings.world_size == 2
    assert run.notes == ("pp_deg ignored: the plan plan.json decides",)


def test_a_model_of_ones_own_is_written_beside_the_log(folder):
    run = prepared({"hidden_size": "64", "pp_deg": "1", "global_train_batch_size": "4", "seq_length": "16"}, 2)
    plan, shape = run.settings.load_plan()
    assert run.settings.model == str(folder / "output" / "config.json")
    assert (shape.hidden_size, shape.layers) == (64, 4)
    written = read_plan(folder / "output" / "galvatron_config.json")
    assert replace(written, assumed=written.assumed.completed(plan.assumed)) == plan


@pytest.mark.parametrize("named", ["my-model", "my-model/config.json"])
def test_training_continues_with_the_models_own_weights_whatever_numbers_change(folder, named):
    (folder / "my-model").mkdir()
    (folder / "my-model" / "config.json").write_text(json.dumps(MODEL))
    given = {"model": named, "continue_training": 1, "max_position_embeddings": 32, "seq_length": 16}
    settings = prepared({**given, "pp_deg": "1", "global_train_batch_size": "4"}, 2).settings
    assert settings.model == str(folder / "output" / "config.json")
    assert settings.initial_weights == Path("my-model")


@pytest.mark.parametrize(
    ("values", "world_size", "message"),
    [
        ({"continue_training": 1}, 4, "continue_training: model.json is no folder with weights"),
        ({"model": "llama2-7b", "continue_training": 1}, 4, "continue_training: llama2-7b is no folder with weights"),
        ({"tensor_parallel_degree": "3"}, 4, "the degrees multiply to 3, which does not divide the 4 ranks"),
        (
            {"tensor_parallel_degree": "2", "global_tp_deg": "4"},
            4,
            "global_tp_deg: is 4, but PaddleNLP's options say 2",
        ),
        ({"tensor_parallel_degree": "2", "sep_parallel_degree": "2"}, 4, "a layer is split by one of the two"),
        ({"sharding": "stage2", "sharding_parallel_degree": "3"}, 4, "sharding_parallel_degree: 3 does not divide"),
        ({"pipeline_parallel_degree": "2", "data_parallel_degree": "4"}, 4, "data_parallel_degree: is 4, but the"),
        ({"sharding": "stage4"}, 4, "sharding: "),
        ({"per_device_train_batch_size": 2}, 4, "per_device_train_batch_size: the plan file says the global batch"),
        ({"load": "x", "load_iteration": 3}, 4, "load_iteration: x has no checkpoint of 3 steps"),
        ({"load_iteration": 3}, 4, "load_iteration: says which checkpoint of load, which is missing"),
        ({"overwrite_output_dir": "1", "resume_from_checkpoint": "x"}, 4, "overwrite_output_dir: starts again, but"),
        ({"bf16": "1", "mixed_precision": "fp16"}, 4, "bf16, mixed_precision: contradict each other"),
        ({"load_distributed": "1"}, 4, "load_distributed: says how to take load, which is missing"),
        ({"pp_deg": "2"}, None, "nproc: missing"),
        ({"pp_deg": "2"}, 4, "seq_length: missing"),
        ({"pp_deg": "2", "seq_length": "16"}, 4, "global_train_batch_size: missing"),
        ({"galvatron_config_path": "nowhere.json"}, None, "nowhere.json: no such file"),
        (
            {"hidden_size_list": "32,64", "layernum_list": "2,2", "seq_length": "16"},
            4,
            "hidden_size_list: 32, 64: layers of several widths need projections between them, which no supported",
        ),
        (
            {"num_layertype": "2", "layernum_list": "2,2", "seqlen_list": "16,8"},
            4,
            "seqlen_list: 16, 8: samples that change their length need a layer",
        ),
        ({"num_layertype": "2", "layernum_list": "2,2", "seq_length": "16"}, 4, "num_layertype: the 2 types are equal"),
        ({"max_stps": "3"}, 4, "max_stps: unknown option; did you mean max_steps"),
        ({"save_strategy": "never"}, 4, "save_strategy: "),
        ({"output_dir": "o\udce9"}, 4, "output_dir: .* is not UTF-8; rename it"),
    ],
)
def test_what_cannot_be_is_refused_by_name(folder, values, world_size, message):
    with pytest.raises(UserError, match=message):
        prepared(values, world_size)


def test_stock_arguments_at_the_value_that_changes_nothing_are_taken(folder):
    plan_file(folder / "plan.json", 2)
    stock = {
        "tensor_parallel_degree": -1, "sharding": "", "recompute": False, "do_train": True, "unified_checkpoint": 1,
    }  # fmt: skip
    run = prepared({"galvatron_config_path": "plan.json", "seq_length": 16, **stock})
    assert run.settings.world_size == 2


def test_a_run_of_epochs_has_the_steps_of_its_data(folder):
    plan_file(folder / "plan.json", 2)
    given = {"galvatron_config_path": "plan.json", "seq_length": 16}
    settings = prepared({**given, "num_train_epochs": "2.5"}).settings
    assert settings.steps_over(samples=83, global_batch=8) == (25, 10)
    assert prepared({**given, "max_steps": 3}).settings.steps_over(83, 8) == (3, 10)
    with pytest.raises(UserError, match="max_steps: missing; random tokens have no end"):
        settings.steps_over(None, 8)
