"""Commands that run a plan refuse impossible runs: one clear line, exit code 2, before any process starts."""

import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("paddle")

from forked_ranks import fork
from plans import plan_fields
from small_model import GROUPED_MODEL

from paddlenlp_galvatron.base.errors import Infeasible
from paddlenlp_galvatron.base.limits import MOST_RANKS
from paddlenlp_galvatron.base.writing import locked
from paddlenlp_galvatron.check.parity.parity import Parity
from paddlenlp_galvatron.cli.main import main
from paddlenlp_galvatron.cli.pretrain import pretrain
from paddlenlp_galvatron.cli.training_run import TrainingRun
from paddlenlp_galvatron.model import load_model
from paddlenlp_galvatron.model.lora import factors_of
from paddlenlp_galvatron.plan import Precision, plan_to_dict, read_plan
from paddlenlp_galvatron.training.checkpoint.huggingface import modules
from paddlenlp_galvatron.training.checkpoint.stored import write_index
from paddlenlp_galvatron.training.data.tokenizer import train_tokenizer
from paddlenlp_galvatron.training.inputs import base_of, open_data
from paddlenlp_galvatron.training.step_log import read_log

ROOT = Path(__file__).parents[2]
PLAN = plan_fields(
    pp_deg=1, pp_division="2", tp_sizes_enc="1,2", tp_consecutive_flags="1,1", dp_types_enc="0,0", use_sp="0,0",
    checkpoint="0,1", global_bsz=8, world_size=4, galvatron={"assumed": {"seq_length": 16, "sequence_parallel": True}},
)  # fmt: skip
ONE_RANK_LAYER = {"tp_sizes_enc": 1, "tp_consecutive_flags": 1, "dp_types_enc": 0, "use_sp": 0, "checkpoint": 0}
MODEL = GROUPED_MODEL | {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 63}
MODEL |= {"intermediate_size": 64, "max_position_embeddings": 32}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    return tmp_path


def run(capsys, *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


def test_dry_run_shows_shapes_groups_and_memory_and_runs_nothing(folder, capsys):
    code, out, _ = run(capsys, "train", "plan.json", "--model", "model.json", "--dry-run")
    assert code == 0
    assert "16 x 32" in out  # 4 samples of a micro-batch x 16 tokens, over 4 ranks
    assert "5 groups" in out  # two pairs of tp, two of dp, and the stage
    assert "no step was run" in out
    assert not (folder / "output").exists()


@pytest.mark.parametrize(
    ("variables", "words", "message"),
    [
        ({"NUM_NODES": "3", "NODE_RANK": "1"}, [], "4 ranks do not split evenly over 3 nodes"),
        ({"WORLD_SIZE": "3", "RANK": "1"}, [], "4 ranks do not split evenly over 3 nodes"),
        ({"WORLD_SIZE": "4", "RANK": "0"}, ["--nproc", "4"], "16"),  # of GPUs, left over on one node
        ({"PET_NNODES": "2", "PET_NODE_RANK": "1"}, ["--nproc", "4"], "8"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, [], None),
        ({"NUM_NODES": "2", "NODE_RANK": "1"}, ["--nproc", "2"], None),
    ],
)
def test_a_dry_run_checks_the_nodes(folder, capsys, monkeypatch, variables, words, message):
    for name, value in ({"MASTER_ADDR": "ten", "MASTER_PORT": "71"} | variables).items():
        monkeypatch.setenv(name, value)
    code, out, err = run(capsys, "train", "plan.json", "--model", "model.json", "--dry-run", *words)
    if message is None:
        assert code == 0 and "note: 2 nodes of 2 ranks; this is node 1" in out
    else:
        assert code == 2 and message in err and "no step was run" not in out


STOCK = json.loads((ROOT / "tests/fixtures/paddlenlp_pretraining.json").read_text())["arguments"]


@pytest.mark.parametrize("start", ["train", "pretrain"])
def test_paddlenlps_own_arguments_are_planned_for_gpus_on_a_machine_without(folder, capsys, start):
    (folder / "stock.json").write_text(json.dumps(STOCK))
    if start == "train":
        code, out, err = run(capsys, "train", "--config", "stock.json", "--nproc", "8", "--dry_run")
    else:
        code = pretrain(str(ROOT / "run.py"), ["stock.json", "--nproc", "8", "--dry_run"])
        out, err = capsys.readouterr()
    assert code == 0, err
    assert "one strategy for all layers, by tensor_parallel_degree, sharding, gradient_accumulation_steps" in out
    assert "shown as on GPUs, of which this machine has none" in out and "not checked" in out and "data.bin" in out
    for noted in ("per_device_eval_batch_size (", "do_predict (", "unified_checkpoint ("):
        assert noted in err
    assert "0-7    0-31" in out and "2048 x 4096" in out  # Llama-3-8B, a tp of 2 and a dp of 4


def test_an_argument_that_cannot_be_is_refused_by_name(folder, capsys):
    (folder / "stock.json").write_text(json.dumps(STOCK | {"virtual_pp_degree": 5}))
    code, _, err = run(capsys, "train", "--config", "stock.json", "--nproc", "8", "--dry_run")
    assert code == 2 and "virtual_pp_deg: 5 chunks of the only stage" in err
    (folder / "stock.json").write_text(json.dumps(STOCK | {"continue_training": 1}))
    code, _, err = run(capsys, "train", "--config", "stock.json", "--nproc", "8", "--dry_run")
    assert code == 2 and "continue_training: meta-llama/Meta-Llama-3-8B is no folder with weights" in err


def test_what_is_wrong_before_the_start_is_reported_without_importing_paddle(folder):
    program = (
        "import sys; from paddlenlp_galvatron.cli.main import main; code = main(sys.argv[1:]); "
        "print(code, [name for name in ('paddle', 'paddlenlp') if name in sys.modules])"
    )
    for words, reported in (
        ("train plan.json --model model.json --input_dir data/nowhere --max_steps 3", "nowhere.bin: no such"),
        ("train plan.json --model nowhere", "model nowhere: neither a preset nor a config.json"),
        ("profile model nowhere", "model nowhere: neither a preset nor a config.json"),
        ("gpu-check --parts nowhere", "parts: 'nowhere' is unknown"),
        ("validate model.json --profiles nowhere", "profiles: no folder nowhere"),
        ("parity nowhere.json", "nowhere.json: no such file"),
    ):
        ran = subprocess.run(
            [sys.executable, "-c", program, *words.split()], cwd=folder, capture_output=True, text=True, timeout=300
        )
        assert reported in ran.stderr and ran.stdout == "2 []\n", ran.stdout + ran.stderr


def test_another_run_than_the_checkpoints_is_refused_before_ranks_start(folder, capsys, monkeypatch):
    """By the command itself, which imports no PaddleNLP for it: data, packing, base and adapters, a folder in use."""
    (folder / "plan.json").write_text(changed(PLAN, world_size=2, global_bsz=4))
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(MODEL | {"vocab_size": 300}))
    train_tokenizer(["a"], 257).save(str(folder / "model" / "tokenizer.json"))
    (folder / "data").mkdir()
    (folder / "data" / "train.json").write_text('{"src": "a", "tgt": "b"}\n' * 9)
    plan = read_plan(folder / "plan.json")
    words = ["train", "plan.json", "--model", "model", "--continue_training", "0", "--max_steps", "9"]
    tuned = [*words, "--dataset_name_or_path", "data", "--task", "lora"]
    random = [*words, "--input_dir", "random"]
    made: dict[str, Any] = {}

    def end(run: TrainingRun, *_: object) -> None:
        made["run"] = run._settings
        raise Infeasible("ranks were started")

    def checkpoint(words: list[str]) -> None:
        """One index, as a run of these options writes it."""
        shutil.rmtree(folder / "run", ignore_errors=True)
        assert main([*words, "--output_dir", "run"]) == 3
        settings = made["run"]
        shape = load_model("model")
        adapters = settings.adapters(base_of(settings, shape))
        weights = factors_of(shape.block, adapters.rank).weights if adapters else ()
        names = [(f"layers.{k}.{one.name}", one.shape) for k in range(shape.layers) for one in weights]
        names = names or [(one.name, one.shape) for module in modules(shape) for one in module]
        slice = {"axis": None, "index": 0, "parts": 1, "padded": None}
        parts = [
            {"weight": name, "shape": size, "slice": slice, "start": 0, "stop": math.prod(size), "offset": 0}
            for name, size in names
        ]
        file = {"file": "a.safetensors", "bytes": 2**30, "crc32": 0, "tensors": [{"key": "0", "parts": parts}]}
        data = open_data(settings, plan, shape)
        index = {"format": 2, "step": 3, "model": asdict(shape), "model_fingerprint": shape.fingerprint}
        index |= {"plan": plan_to_dict(plan), "optimizer": {}, "loss_scale": None, "data": data.position(3)}
        index |= {"files": [file], "adapters": asdict(adapters) if adapters else None}
        write_index(folder / "run" / "checkpoints" / "step-00000003", index)

    monkeypatch.setattr(TrainingRun, "start", end)
    for first, others in (
        (random, {"seed: 42 -> 7": ["--seed", "7"], "all weights were trained there": tuned}),
        (
            tuned,
            {
                "packing: none -> best_fit": ["--packing", "best_fit"],
                "src_length: 1024 -> 8": ["--src_length", "8"],
                "its adapters are others (another base)": ["--initializer_range", "0.1"],
                "its adapters are others (alpha: 16.0 -> 8.0; rank: 8 -> 4)": ["--lora_rank", "4"],
                "nowhere/index.json: no such file": ["--resume_from_checkpoint", "nowhere"],
                "its adapters are others (alpha: 16.0 -> 3.0)": ["--lora_alpha", "3"],
            },
        ),
    ):
        checkpoint(first)
        assert main([*first, "--output_dir", "run"]) == 3
        for message, change in others.items():
            again = change if change[0] == "train" else [*first, *change]
            ran = run(capsys, *again, "--output_dir", "run")
            assert ran[0] == 2 and message in ran[2], ran
            assert run(capsys, *again, "--output_dir", "run", "--resume_from_checkpoint", "none")[0] == 3
    named = str(folder / "run" / "checkpoints" / "step-00000003")
    assert main([*tuned, "--packing", "best_fit", "--output_dir", "run", "--resume_from_checkpoint", named]) == 3
    with locked(folder / "run"):
        ran = run(capsys, *random, "--output_dir", "run")
    assert ran[0] == 2 and "run: is in use by process" in ran[2]
    program = "import sys; from paddlenlp_galvatron.cli.main import main; main(sys.argv[1:]); "
    program += "print('paddlenlp' in sys.modules)"
    for words in ([*tuned, "--seed", "7", "--output_dir", "run"], ["convert", "g2h", "run", "model"]):
        ran = subprocess.run([sys.executable, "-c", program, *words], cwd=folder, capture_output=True, text=True)
        assert ran.stdout.endswith("False\n") and "error: " in ran.stderr, ran


def test_random_tokens_are_asked_for_by_name(folder, capsys, monkeypatch):
    (folder / "plan.json").write_text(changed(PLAN, world_size=2, global_bsz=4))
    monkeypatch.setattr(TrainingRun, "start", lambda *_: None)
    words = ("train", "plan.json", "--model", "model.json", "--max_steps", "1")
    code, _, err = run(capsys, *words)
    assert code == 2 and err.startswith("error: input_dir: missing") and not (folder / "output").exists()
    code, out, _ = run(capsys, *words, "--input_dir", "random")
    assert code == 0 and "note: the tokens are random" in out


def test_processors_need_the_memory_of_what_their_ranks_keep(folder, capsys):
    """The memory of a model that a GPU node was meant for."""
    words = ("--nproc", "8", "--sdp", "0", "--global_train_batch_size", "8", "--seq_length", "64", "--max_steps", "1")
    code, _, err = run(capsys, "train", "--model", "llama2-70b", "--input_dir", "random", *words)
    assert code == 2 and re.search(r"nproc: 8 ranks here keep [\d,]+\.\d\d GiB of weights", err), err
    assert not (folder / "output").exists()


def test_a_dry_run_of_ten_thousand_ranks_or_stages_takes_seconds(folder, capsys):
    """A minute, when each rank's groups were made one by one."""
    count, most = 10_000, MOST_RANKS
    alike = {name: ",".join([str(value)] * count) for name, value in ONE_RANK_LAYER.items()}
    stages = {"pp_deg": count, "pp_division": alike["tp_sizes_enc"], "chunks": 1, "vtp": 1, "global_bsz": 1}
    four = {name: ",".join([str(value)] * 4) for name, value in ONE_RANK_LAYER.items()}
    unlike = {"tp_sizes_enc": "1,2,4,4", "checkpoint": "0,0,0,1", "pp_division": "4"}
    for plan, layers, reported in (
        (changed(PLAN, global_bsz=2 * count, world_size=count), 2, ["0-9999", "5003 groups"]),
        (changed(PLAN, **alike, **stages, world_size=count), count, ["and 9500 stages more", "19998 groups"]),
        (changed(PLAN, **four | unlike, global_bsz=2 * most, world_size=most), 4, ["groups not counted"]),
    ):
        (folder / "plan.json").write_text(plan)
        (folder / "model.json").write_text(changed(MODEL, num_hidden_layers=layers))
        began = time.process_time()
        code, out, err = run(capsys, "train", "plan.json", "--model", "model.json", "--dry_run")
        assert code == 0 and all(one in out for one in reported), out[-300:] + err
        assert time.process_time() - began < 30


def test_ctrl_c_while_paddle_is_imported_is_no_traceback(folder):
    """Its C++ part takes seconds, makes another error of an interrupt, and says a line itself."""
    command = [sys.executable, "-c", "import sys; from paddlenlp_galvatron.cli.main import main; sys.exit(main())"]
    words = ["train", "plan.json", "--model", "model.json", "--dry_run"]
    with subprocess.Popen([*command, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        maps = Path(f"/proc/{started.pid}/maps")
        while "libpaddle" not in maps.read_text():
            assert started.poll() is None
            time.sleep(0.01)
        started.send_signal(signal.SIGINT)
        out, err = started.communicate(timeout=600)
        assert out == "" and err.endswith("interrupted\n") and err.count("\n") <= 2, err
        assert started.returncode == 130


def changed(values: dict, **changes) -> str:
    return json.dumps({**values, **changes})


@pytest.mark.parametrize(
    ("plan", "model", "words", "message"),
    [
        (changed(PLAN, world_size=8), changed(MODEL), ["--nproc", "4"], "world_size: the plan is for 8 ranks but 4"),
        (changed(PLAN, global_bsz=6), changed(MODEL), [], "global_bsz: 6 samples in 2 micro-batches do not split"),
        (changed(PLAN, tp_sizes_enc="1,3"), changed(MODEL), [], "tp_sizes_enc: degree 3 of layer 1"),
        (changed(PLAN, pp_deg=3, pp_division="1,1"), changed(MODEL), [], "pp_division: has 2 stages but pp_deg is 3"),
        (changed(PLAN, checkpoint="0"), changed(MODEL), [], "checkpoint: has 1 entries for 2 layers"),
        (changed(PLAN)[:100], changed(MODEL), [], "not valid JSON"),
        (changed(PLAN), changed(MODEL, num_attention_heads=3, hidden_size=36, num_key_value_heads=3), [], "heads"),
        (changed(PLAN), changed(MODEL, num_hidden_layers=3), [], "the plan has 2 layers but model has 3"),
        (changed(PLAN), changed(MODEL, model_type="gpt2"), [], "model_type is 'gpt2'"),
        (changed(PLAN), changed(MODEL), ["--seq_length", "8"], "seq_length: the plan was searched for 16 but 8"),
        (changed(PLAN), changed(MODEL), ["--sequence_parallel", "0"], "sequence_parallel: the plan was searched for"),
        (changed(PLAN), changed(MODEL), ["--data", "nowhere"], "nowhere.bin: no such file"),
        (
            changed(PLAN),
            changed(MODEL),
            ["--device", "gpu"],
            "device: gpu is not the device that ranks would run on: Paddle finds no GPU here",
        ),
        (
            changed(PLAN, galvatron={"assumed": {"seq_length": 16, "mixed_precision": "bf16"}}),
            changed(MODEL),
            ["--compute_precision", "bf16"],
            "compute_precision: Paddle has no bf16 arithmetic on CPU",
        ),
        (
            changed(PLAN, galvatron={"assumed": {"seq_length": 16}, "searched_from": {"model_fingerprint": "other"}}),
            changed(MODEL),
            [],
            "was searched for another model",
        ),
    ],
)
def test_train_refuses_what_cannot_run(folder, capsys, plan, model, words, message):
    (folder / "plan.json").write_text(plan)
    (folder / "model.json").write_text(model)
    code, _, err = run(capsys, "train", "plan.json", "--model", "model.json", "--input_dir", "random", *words)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert not (folder / "output").exists()


def test_another_node_writes_nothing_before_the_first_one_is_there(folder, capsys):
    words = "--num_nodes 2 --node_rank 1 --nproc 2 --master_addr 127.0.0.2 --master_port 2900 --max_steps 1 --timeout 1"
    words += " --input_dir random"
    code, _, err = run(capsys, "train", "plan.json", "--model", "model.json", *words.split())
    assert code == 1
    assert "node 0 (127.0.0.2:2900) did not appear within 1 s; was its command refused?" in err
    assert not (folder / "output").exists()


def test_parity_ends_with_one_line_of_json(folder, capsys):
    (folder / "plan.json").write_text(changed(PLAN, world_size=2, global_bsz=4))
    code, out, err = run(capsys, "parity", "plan.json", "--model", "qwen3_moe", "--steps", "1", "--json")
    assert not err
    line = json.loads(out.splitlines()[-1])
    assert code == 0
    assert line["max_loss_diff"] <= 1e-5
    assert line["max_grad_rel_diff"] <= 1e-4
    assert {"losses", "groups", "seconds"} <= set(line)


def test_parity_says_its_verdict_beside_the_limits():
    known = {field.name: 0 for field in fields(Parity)} | {"precision": Precision.FP32}
    good = Parity(**known | {"max_loss_diff": 4.8e-7, "max_grad_rel_diff": 2.5e-6})
    assert str(good) == "PASS: losses within 4.8e-07 (limit 1e-05), gradients within 2.5e-06 (limit 1e-04)"
    assert str(replace(good, max_grad_rel_diff=1.0)).startswith("FAIL: ")


def test_train_writes_a_line_a_step(folder, capsys):
    (folder / "plan.json").write_text(changed(PLAN, world_size=2, global_bsz=4))
    code, out, _ = run(capsys, "train", "plan.json", "--model=model.json", "--input_dir=random", "--max_steps=2")
    records = read_log(folder / "output" / "train_log.jsonl")
    assert code == 0
    assert "2 steps: loss" in out
    assert [record["step"] for record in records] == [1, 2]
    expected = {"step", "steps", "loss", "lr", "grad_norm", "step_time_s", "data_s", "tokens_per_s", "plan"}
    expected |= {"time", "run", "peak_memory_mib", "peak_memory_rank"}
    assert all(set(record) == expected for record in records)
    assert all(len(record["peak_memory_mib"]) == 2 for record in records)


OWN = ["--hidden_size", "32", "--global_train_batch_size", "8", "--seq_length", "16", "--max_steps", "1"]
OWN += ["--input_dir", "random"]


@pytest.mark.parametrize("command", ["galvatron", "script"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nproc", "2", "--global_tp_deg", "1", "--input_dir", "nowhere"], "nowhere"),
        (["--nproc", "2", "--global_tp_deg", "1", "--use_flash_attention", "1"], "Paddle has it on GPUs only"),
        (["--nproc", "2", "--global_tp_deg", "1", "--load", "nowhere"], "nowhere"),
        (["--nproc", "4096", "--sdp", "1", "--global_train_batch_size", "4096"], "nproc: 4096 processes on a node"),
    ],
)
def test_a_run_that_its_checks_refuse_leaves_the_folder_as_it_was(folder, capsys, command, words, message):
    """Neither the plan and the model of its options stay, nor do they replace those of the run before."""
    words = ["--model", "model.json", *OWN, *words]

    def refused() -> None:
        code = main(["train", *words]) if command == "galvatron" else pretrain("run_pretrain_galvatron.py", words)
        faults = capsys.readouterr().err
        assert code == 2 and message in faults and "galvatron-" not in faults, faults

    before = sorted(folder.iterdir())
    refused()
    assert sorted(folder.iterdir()) == before
    files = [folder / "output" / name for name in ("config.json", "galvatron_config.json")]
    files[0].parent.mkdir()
    for file in files:
        file.write_text("of the run before")
    refused()
    assert sorted(files[0].parent.iterdir()) == files
    assert {file.read_text() for file in files} == {"of the run before"}


def test_lines_of_paddlenlp_stay_with_the_ranks(folder, monkeypatch, capsys):
    from paddlenlp.utils.log import logger

    stated = io.StringIO()
    monkeypatch.setattr(logger.handler, "stream", stated)
    assert pretrain("run_pretrain_galvatron.py", ["--model", "model.json", *OWN, "--warmup_steps", "1"]) == 2
    assert stated.getvalue() == "" and capsys.readouterr().err.startswith("error: ")
    logger.info("a rank's")
    assert "a rank's" in stated.getvalue()


def test_a_rank_that_its_checks_refuse_leaves_nothing(folder):
    """As another launcher starts it, which has checked nothing."""
    program, stated = folder / "program.py", folder / "printed"
    program.write_text(
        "import sys; from paddlenlp_galvatron.cli.pretrain import pretrain; sys.exit(pretrain('', sys.argv[1:]))"
    )
    stated.touch()
    endpoint = "127.0.0.1:1"  # of a world of one rank, where nobody listens
    rank = {"PADDLE_TRAINER_ID": "0", "PADDLE_TRAINERS_NUM": "1", "PADDLE_TRAINER_ENDPOINTS": endpoint}
    words = ["--model", "model.json", *OWN, "--sdp", "1", "--input_dir", "nowhere"]
    before = sorted(folder.iterdir())
    ran = fork([str(program), *words], os.environ | rank | {"PADDLE_CURRENT_ENDPOINT": endpoint}, stated)
    assert ran.wait(600) == 2 and "nowhere.bin: no such file" in stated.read_text(), stated.read_text()
    assert sorted(folder.iterdir()) == before
