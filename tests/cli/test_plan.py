"""`galvatron plan`: show, check, schema."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from plans import plan_fields

from paddlenlp_galvatron.options.uniform import uniform_plan
from paddlenlp_galvatron.plan import Assumptions, Precision, json_schema, plan_id, plan_to_dict, read_plan

ROOT = Path(__file__).parents[2]


@pytest.fixture
def plan_file(tmp_path):
    """Writes a plan file and returns its path."""

    def write(**changed):
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(plan_fields(**changed)))
        return path

    return write


@pytest.fixture
def llama_file(tmp_path):
    """A plan for llama2-7b."""
    plan = uniform_plan(layers=32, world_size=8, global_train_batch_size=8, global_tp_deg=4, vocab_tp=2)
    path = tmp_path / "llama.json"
    path.write_text(json.dumps(plan_to_dict(plan)))
    return path


def test_show_gives_equal_layers_one_line(galvatron, llama_file):
    ran = galvatron("plan", "show", llama_file)
    assert ran.code == 0
    (line,) = [line for line in ran.out.splitlines() if "0-31" in line]
    assert line.split() == ["0", "0-31", "weights", "4", "2", "ddp", "no", "neighbours"]


def test_show_fits_80_columns_and_names_every_layer(galvatron, plan_file):
    path = plan_file(
        tp_consecutive_flags="1,0,1,1",
        galvatron={
            "assumed": {
                "mixed_precision": "bf16",
                "seq_length": 131072,
                "sequence_parallel": True,
                "async_grad_reduce": False,
            },
            "predicted": {"step_time_s": 1.23456, "stages": [{"memory_mib": 1000.123}, {"memory_mib": 2.5}]},
        },
    )
    ran = galvatron("plan", "show", path)
    assert ran.code == 0 and ran.err == ""
    assert max(map(len, ran.out.splitlines())) <= 80
    rows = [line.split()[:2] for line in ran.out.splitlines()]
    for stage, layers in (("0", "embedding"), ("0", "0"), ("0", "1"), ("1", "2"), ("1", "3"), ("1", "LM")):
        assert [stage, layers] in rows
    text = " ".join(ran.out.split())
    for words in (
        "bf16, 131072 tokens, Megatron-SP on, gradients reduced every micro-batch",
        "step_time_s 1.235",
        "stages 1: memory_mib 2.5",
        "strided",
        "sequence",
        "zero3",
    ):
        assert words in text


def test_what_a_search_predicts_is_a_table_of_80_columns(galvatron, plan_file):
    memory = {"context_mib": 2049.0, "states_mib": 51234.5, "activations_mib": 12345.6, "working_mib": 1234.5}
    stage = {"memory_mib": 78901.2, "memory": memory, "forward_ms": 12345.6, "backward_ms": 23456.7, "sync_ms": 177.7}
    predicted = {"time_s": 1.5553, "lower_bound_s": 1.4, "samples_per_s": 10.287, "stages": [stage, stage]}
    ran = galvatron("plan", "show", plan_file(galvatron={"predicted": predicted}))
    assert ran.code == 0 and max(map(len, ran.out.splitlines())) <= 80
    lines = [line.split() for line in ran.out.splitlines()]
    assert ["1", "77.05", "50.03", "12.06", "1.21", "2.00", "12,346", "23,457", "177.7"] in lines
    assert "10.29 samples/s; no plan of the space takes less than 1.4 s (gap 0.1)" in " ".join(ran.out.split())


def test_what_a_plan_was_searched_from_takes_two_lines(galvatron, plan_file):
    searched = {
        "model": "llama2-7b",
        "model_fingerprint": "0123456789abcdef",
        "num_nodes": 2,
        "num_gpus_per_node": 8,
        "memory_constraint_gb": 36.0,
        "profiles": [{"path": "measured/a.json", "sha256": "00"}, {"path": "measured/b.json", "sha256": "01"}],
        "options": {"settle_bsz": 64, "sp_space": "tp+sp"},
    }
    lines = galvatron("plan", "show", plan_file(galvatron={"searched_from": searched})).out.splitlines()
    shown = [" ".join(line.split()) for line in lines if line.startswith(("searched", "options"))]
    assert shown == [
        "searched for llama2-7b on 2 x 8 devices of 36 GiB; profiles in measured",
        "options settle_bsz 64, sp_space tp+sp",
    ]


def test_show_is_the_same_when_piped(plan_file):
    """Run as its own process, its output a pipe: no colour, no cut."""
    command = [sys.executable, "-m", "paddlenlp_galvatron.cli.main", "plan", "show", str(plan_file())]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0 and "\x1b" not in ran.stdout and "LM head" in ran.stdout


def test_check_says_nothing_is_wrong(galvatron, plan_file, llama_file):
    assert galvatron("plan", "check", plan_file()) == (0, f"{plan_file()}: valid: 8 GPUs; model not checked\n", "")
    ran = galvatron("plan", "check", llama_file, "--model", "llama2-7b", "--world-size", 8)
    assert ran == (0, f"{llama_file}: valid: 8 GPUs, matches llama2-7b (32 layers); memory not checked\n", "")


def test_check_reads_a_file_without_a_world_size(galvatron, plan_file):
    path = plan_file(world_size=...)
    assert "valid: 8 GPUs" in galvatron("plan", "check", path).out
    assert "valid: 16 GPUs" in galvatron("plan", "check", path, "--world_size", 16).out
    named = path.rename(path.with_name("galvatron_config_llama2-7b_2nodes_8gpus_per_node_36GB_bf16.json"))
    assert "valid: 16 GPUs" in galvatron("plan", "check", named).out
    assert "valid: 8 GPUs" in galvatron("plan", "check", named, "--world_size", 8).out


def test_a_padded_vocabulary_is_a_note(galvatron, plan_file, tmp_path):
    model = tmp_path / "odd.json"
    shape = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    model.write_text(json.dumps(shape | {"num_attention_heads": 8, "vocab_size": 1001}))
    for command in ("check", "show"):
        ran = galvatron("plan", command, plan_file(), "--model", model)
        assert (ran.code, ran.err) == (0, "")
        assert "1001 is padded to 1002" in " ".join(ran.out.split())


# Bad input as a user meets it: the file's content, the words after it, and the expected text of the one line.
BAD = {
    "missing field": (plan_fields(chunks=...), [], "chunks: missing; add it"),
    "misspelt field": (plan_fields(vpt=2), [], "vpt: unknown field; did you mean vtp?"),
    "wrong length": (plan_fields(use_sp="0,0"), [], "use_sp: has 2 entries for 4 layers"),
    "other ranks": (plan_fields(), ["--world_size", "4"], "the plan is for 8 ranks but 4 are started"),
    "unknown model": (plan_fields(), ["--model", "llama9"], "llama9: neither a preset nor a config.json"),
    "no ranks": (plan_fields(), ["--world_size", "0"], "world_size"),
    "truncated": (json.dumps(plan_fields())[:100], [], "not valid JSON at line 1, column"),
    "binary": ("\udcff", [], "cannot be read"),
}


@pytest.mark.parametrize(("content", "words", "message"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("command", ["check", "show"])
def test_bad_input_is_a_line_a_fault_and_exit_code_2(galvatron, tmp_path, command, content, words, message):
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / "plan.json").write_bytes(text.encode(errors="surrogateescape"))
    ran = galvatron("plan", command, tmp_path / "plan.json", *words)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err
    assert all(line.startswith("error: ") for line in ran.err.splitlines())


# Plans that cannot run: fields, a model, and the expected error. All rules: tests/helpers/plans.py.
SHORT = {"assumed": {"seq_length": 6, "sequence_parallel": True}}
FAULTY = {
    "micro-batches": ({"chunks": 5}, "", "chunks: 5 micro-batches do not divide global_bsz 16"),
    "samples for the vocabulary": ({"vtp": 1, "global_bsz": 4}, "", "of the vocabulary layers with vtp 1"),
    "more stages than ranks": ({"world_size": 1}, "", "pp_deg: 2 stages do not divide 1 ranks"),
    "experts": ({"ep_sizes_enc": "8,8,8,8"}, "", "ep_sizes_enc: 8 with tp_of_ep_sizes_enc 1 of layer"),
    "tokens": ({"galvatron": SHORT, "cp_sizes_enc": "2,2,1,1"}, "", "a sequence length of 6 does not make two equal"),
    "heads": ({}, "heads.json", "does not divide the 6 attention heads"),
    "layers": ({}, "llama2-7b", "the plan has 4 layers but llama2-7b has 32"),
    "positions": ({"galvatron": {"assumed": {"seq_length": 4096}}}, "heads.json", "is beyond the 2048 positions"),
    "no experts": ({"ep_sizes_enc": "2,2,2,2"}, "heads.json", "has no experts; leave the field out"),
}


@pytest.mark.parametrize(("fields", "model", "message"), FAULTY.values(), ids=FAULTY)
def test_a_plan_that_cannot_run_is_shown_with_its_faults_and_else_refused(galvatron, tmp_path, fields, model, message):
    Path("plan.json").write_text(json.dumps(plan_fields(**fields)))
    heads = {"model_type": "llama", "hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": 4}
    Path("heads.json").write_text(json.dumps(heads | {"num_attention_heads": 6, "vocab_size": 100}))
    words = ["--model", model] if model else []
    refused = galvatron("plan", "check", "plan.json", *words)
    assert (refused.code, refused.out) == (2, "") and message in refused.err
    faults = [line.removeprefix("error: ").removeprefix("plan.json: ") for line in refused.err.splitlines()]
    shown = galvatron("plan", "show", "plan.json", *words)
    assert (shown.code, shown.err) == (0, "") and "micro-batches" in shown.out and "start: " not in shown.out
    assert all(f"note cannot run: {fault}" in " ".join(shown.out.split()) for fault in faults)
    as_json = galvatron("plan", "show", "plan.json", *words, "--json")
    assert as_json.code == 0 and json.loads(as_json.out)["pp_deg"] == plan_fields(**fields)["pp_deg"]
    assert as_json.err.splitlines() == [f"note: cannot run: {fault}" for fault in faults]
    others = [["plan", name] for name in ("to-paddlenlp", "to-paddlefleet", "to-paddleformers")]
    if not model:
        others += [
            ["plan", "diff", "plan.json"],
            ["plan", "scale", "--gpus", "8"],
            ["plan", "trace"],
            ["explain"],
            ["report"],
        ]
    for other in others:
        ran = galvatron(*other, "plan.json", *words)
        assert (ran.code, ran.out, ran.err) == (2, "", refused.err), other


def test_a_task_that_there_is_not_is_a_line(galvatron, plan_file):
    for command in (["trace"], ["diff", plan_file()]):
        ran = galvatron("plan", *command, plan_file(), "--task", "ppo")
        assert (ran.code, ran.out) == (2, "") and ran.err.startswith("error: task: must be pretrain, sft")


def test_every_fault_has_its_line(galvatron, plan_file):
    ran = galvatron("plan", "check", plan_file(chunks=..., vpt=2, vsp=3))
    assert len(ran.err.splitlines()) == 3


def test_schema_is_a_schema_of_the_file(galvatron):
    ran = galvatron("plan", "schema")
    schema = json.loads(ran.out)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(plan_fields(), schema)
    assert schema == json_schema()
    assert all("description" in field for field in schema["properties"].values())


def test_uniform_writes_the_plan_that_global_mode_stands_for(galvatron, tmp_path):
    path = tmp_path / "plan.json"
    words = ["--global_train_batch_size", 16, "--pp_deg", 2, "--global_tp_deg", 2, "--sdp", "--chunks", 4]
    ran = galvatron("plan", "uniform", "--output", path, "--model", "llama2-7b", "--world_size", 8, *words)
    assert ran.code == 0
    assumed = Assumptions(sequence_parallel=True, mixed_precision=Precision.BF16, seq_length=4096)
    degrees = {"pp_deg": 2, "global_tp_deg": 2, "sdp": True, "chunks": 4}
    expected = uniform_plan(layers=32, world_size=8, global_train_batch_size=16, **degrees, assumed=assumed)
    assert read_plan(path) == expected


def test_uniform_refuses_what_does_not_fit(galvatron, tmp_path):
    path = tmp_path / "plan.json"
    words = ["--global_train_batch_size", 16, "--pp_deg", 3]
    ran = galvatron("plan", "uniform", "--output", path, "--model", "llama2-7b", "--world_size", 8, *words)
    assert ran.code == 2
    assert "pp_deg: 3 stages do not divide 8 ranks" in ran.err
    assert not path.exists()


def test_to_paddlenlp_prints_flags_or_json(galvatron, tmp_path):
    path = tmp_path / "plan.json"
    words = ["--global_train_batch_size", 16, "--pp_deg", 2, "--chunks", 4, "--seq_length", 128, "--global_checkpoint"]
    words += ["--mixed_precision", "fp32"]
    galvatron("plan", "uniform", "--output", path, "--model", "llama2-7b", "--world_size", 8, *words)
    ran = galvatron("plan", "to-paddlenlp", path, "--model", "llama2-7b")
    as_json = galvatron("plan", "to-paddlenlp", path, "--json")
    assert (ran.code, as_json.code) == (0, 0)
    flags = dict(line.split(" ") for line in ran.out.splitlines())
    assert flags == {f"--{name}": str(value).lower() for name, value in json.loads(as_json.out).items()}
    assert flags["--pipeline_parallel_degree"] == "2" and flags["--recompute"] == "true"
    assert ran.err.startswith("note: stock PaddleNLP puts the ranks of a pipeline side by side")


def test_to_paddlenlp_refuses_what_stock_paddlenlp_cannot_express(galvatron, plan_file):
    ran = galvatron("plan", "to-paddlenlp", plan_file())
    assert (ran.code, ran.out) == (2, "")
    named = [line.split(": ")[2] for line in ran.err.splitlines()]
    assert named == ["tp_sizes_enc", "use_sp", "dp_types_enc"]


def test_paddlefleets_mtp_comes_from_the_file_of_the_plan(galvatron, plan_file, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    fields = {"stage": "SFT", "fine_tuning": "full", "bf16": True, "fp16_opt_level": "O2", "sharding_parallel_size": 8}
    fields |= {"model_name_or_path": "glm-4.5-air", "pipeline_model_parallel_size": 2, "num_nextn_predict_layers": 1}
    fields |= {"gradient_accumulation_steps": 8}
    recipe.write_text(yaml.safe_dump(fields))
    assert galvatron("plan", "from-paddlefleet", recipe).code == 0
    for words in ((), ("--model", "glm-4.5-air")):
        ran = galvatron("plan", "to-paddlefleet", tmp_path / "recipe.plan.json", *words)
        assert ran.code == 0 and yaml.safe_load(ran.out)["num_nextn_predict_layers"] == 1
    ran = galvatron("plan", "to-paddlefleet", plan_file())
    assert ran.code == 2 and "model_size: missing" in ran.err


def test_scale_keeps_strategies_says_why_and_refuses_what_does_not_fit(galvatron, tmp_path):
    path = tmp_path / "plan.json"
    asked = ("qwen2.5-7b", "--device", "h100-80gb", "--gpus", 8, "--log_dir", tmp_path, "-o", path)
    assert galvatron("search", *asked).code == 0
    ran = galvatron("plan", "scale", path, "--gpus", 16)
    assert (ran.code, ran.err) == (0, "")
    for words in ("each GPU keeps its samples", "tokens/s/GPU, MFU", "GiB of 79.1", "tokens (+0.0%)", "of all GPUs +"):
        assert words in " ".join(ran.out.split())
    made, before = read_plan(tmp_path / "plan_16gpus.json"), read_plan(path)
    assert (made.layers, made.global_batch) == (before.layers, before.global_batch)
    twice = galvatron("plan", "scale", path, "--gpus", 16, "--batch", 512, "-o", tmp_path / "twice.json")
    assert "tokens (+100.0%)" in twice.out and "as asked" in twice.out
    same = galvatron("plan", "diff", tmp_path / "plan_16gpus.json", tmp_path / "plan_16gpus.json")
    assert "the plans say the same" in same.out and "tokens/s against" in same.out  # it can be priced
    ran = galvatron("plan", "diff", path, tmp_path / "twice.json")
    assert "a sample, ms" in ran.out and "a step" not in ran.out  # the batches differ
    ran = galvatron("plan", "scale", path, "--gpus", 2)
    assert ran.code == 3 and "GiB each, of 79.1" in ran.err and not (tmp_path / "plan_2gpus.json").exists()


def test_fewer_nodes_keep_the_batch_and_a_search_is_hinted_where_a_gpu_gets_slower(galvatron, tmp_path):
    path = tmp_path / "plan.json"
    asked = ("llama3-8b", "--device", "h100-80gb", "--gpus", 64, "--batch", 256, "--log_dir", tmp_path, "-o", path)
    assert galvatron("search", *asked).code == 0
    answer = json.loads(galvatron("plan", "scale", path, "--gpus", 56, "--json").out)
    assert answer["global_bsz"][0] == 256 and abs(answer["global_bsz"][1] - 256) < 56
    before, after = (speed / gpus for speed, gpus in zip(answer["samples_per_s"], (64, 56), strict=True))
    assert (answer["hint"] is not None) == (after < 0.95 * before)
    made = read_plan(tmp_path / "plan_56gpus.json")
    assert (made.world_size, made.global_batch) == (56, answer["global_bsz"][1])
    few = json.loads(galvatron("plan", "scale", path, "--gpus", 512, "-o", tmp_path / "wide.json", "--json").out)
    assert f"llama3-8b --device h100-80gb --gpus 512 --batch {few['global_bsz'][1]}" in few["hint"]


def test_scale_of_a_plan_by_hand_leaves_prices_out(galvatron, plan_file, tmp_path):
    ran = galvatron("plan", "scale", plan_file(), "--gpus", 16, "-o", tmp_path / "more.json")
    assert ran.code == 0 and "no time and memory" in ran.out
    assert read_plan(tmp_path / "more.json").global_batch == 16


def test_the_load_of_experts_stands_in_every_answer_and_check_holds_it_against_a_log(galvatron, tmp_path):
    path, log, h100 = tmp_path / "plan.json", tmp_path / "train_log.jsonl", ("--device", "h100-80gb", "--json")
    model = tmp_path / "config.json"  # of few layers, as explain searches a dozen times
    preset = json.loads((ROOT / "configs" / "models" / "qwen3-30b-a3b.json").read_text())
    model.write_text(json.dumps(preset | {"num_hidden_layers": 4}))
    asked = (model, "--gpus", 8, "--batch", 32, "--seq", 4096, *h100)

    def answered(*words: object) -> dict[str, Any]:
        ran = galvatron(*words)
        assert ran.code == 0, ran
        return json.loads(ran.out)

    def with_log(usual: float, most: float) -> Any:
        step = {"step": 1, "loss": 3.0, "lr": 1e-3, "grad_norm": 0.5, "step_time_s": 2.0, "data_s": 0.0}
        step |= {"tokens_per_s": 9.0, "plan": plan_id(read_plan(path)), "peak_memory_mib": [1.0] * 8}
        log.write_text(json.dumps(step | {"moe_imbalance": usual, "moe_imbalance_most": most}) + "\n")
        return galvatron("plan", "check", path, "--log", log).out.splitlines()[-2:], answered(
            "plan", "check", path, "--log", log, "--json"
        )["log"]

    load = {"moe_imbalance": 1.5, "moe_imbalance_bound": 2.0}
    assert answered("search", *asked, "--moe_imbalance", 1.5, "--log_dir", tmp_path, "-o", path)["load"] == load
    shown = answered("plan", "show", path, "--json")["galvatron"]["searched_from"]["options"]
    assert load.items() <= shown.items()
    for words in (["explain", path], ["plan", "check", path], ["plan", "trace", path, "-o", tmp_path / "trace.json"]):
        assert answered(*words, "--json")["load"] == load
    assert answered("plan", "diff", path, path, "--json")["load"] == [load, load]
    assert answered("fit", *asked)["load"] == {"moe_imbalance": 1.2, "moe_imbalance_bound": 2.0}
    assert answered("fit", "qwen2.5-7b", "--gpus", 8, "--seq", 4096, *h100)["load"] is None

    lines, reported = with_log(1.6, 1.9)
    assert (
        "estimate holds" in lines[0]
        and "bound holds" in lines[1]
        and reported["holds"] == {"estimate": True, "bound": True}
    )
    (rows, most), reported = with_log(1.9, 2.41)
    assert rows.endswith("(predicted 1.5 x mean, +27%); search again: galvatron search --moe_imbalance 1.9")
    assert most.endswith("planned for 2; galvatron search --moe_imbalance_bound 2.5")
    assert reported == {
        "steps": 1,
        "load": {"moe_imbalance": 1.9, "moe_imbalance_most": 2.41},
        "holds": {"estimate": False, "bound": False},
    }
