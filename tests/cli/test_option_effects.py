"""An option of a command changes its answer, or the work that it begins: none is read and then dropped.

The options of `search`, `train` and `profile` are in the `test_option_effects` of planner, training and measure.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("paddle")

from small_model import MODEL

from paddlenlp_galvatron.check.gpu import run as gpu_check_run
from paddlenlp_galvatron.check.parity import parity
from paddlenlp_galvatron.check.validation.accuracy import shortcomings
from paddlenlp_galvatron.check.validation.work import ValidateOptions
from paddlenlp_galvatron.cli.training_run import TrainingRun
from paddlenlp_galvatron.options.uniform import uniform_plan
from paddlenlp_galvatron.plan import write_plan

FIT = "fit model.json --gpus=1 --seq_length=16 --json"
TRAIN = "train plan.json --model_size=model.json --seq_length=16 --input_dir=random --max_steps=1 --output_dir=made"
EXPLAIN = "explain plan.json --model_size=model.json --device=h100"
ROWS = [
    (FIT, "task", "dpo"), (FIT, "task", "lora"), (f"{FIT} --task=lora", "lora_rank", 64), (FIT, "document_tokens", 4),
    (FIT, "offload_optimizer", 1), (FIT, "offload_activations", 1), (FIT, "device", "a100"),
    (FIT, "memory_constraint", 2), (FIT, "global_train_batch_size", 8), (FIT, "tokens", 1e6),
    (FIT, "price_per_gpu_hour", 2), (FIT, "save_gb_per_s", 5), (FIT, "price_per_gpu_hour", "h100=3,h20=1"),
    (FIT, "days", 3), (f"{FIT} --price=2", "budget", 30), (f"{FIT} --save_gb_per_s=1", "mtbf_hours", 100),
    (f"{FIT} --save_gb_per_s=1 --mtbf_hours=0.1", "restart_s", 10), (f"{FIT} --tokens=1e6", "num_train_epochs", 2),
    ("fit llama3.2-1b --gpus=64 --seq_length=8192 --global_train_batch_size=1", "max_cp_deg", 2),
    ("plan scale plan.json --gpus=4 --model_size=model.json --device=h100", "task", "lora"),
    ("plan scale plan.json --gpus=4 --model_size=model.json --device=h100", "memory_constraint", 0.001),
    ("plan scale plan.json --gpus=4 --model_size=model.json --device=h100", "num_gpus_per_node", 3),
    ("plan trace plan.json --model_size=model.json --device=h100", "task", "lora"),
    ("plan trace plan.json --model_size=model.json", "device", "a100"),
    ("explain plan.json --model_size=model.json --device=h100 --memory_constraint=2", "task", "lora"),
    ("explain plan.json --model_size=model.json --device=h100", "memory_constraint", 2),
    *(
        (f"{EXPLAIN} --tokens=1e9 {more}", name, value)
        for more, name, value in (
            ("", "tokens", 1e8),
            ("", "num_train_epochs", 2),
            ("", "price_per_gpu_hour", 2),
            ("", "save_gb_per_s", 2),
            ("--save_gb_per_s=1", "mtbf_hours", 9),
            ("--save_gb_per_s=1 --mtbf_hours=9", "restart_s", 10),
        )
    ),
    ("parity plan.json", "optim", "adamw"), ("parity plan.json", "model_size", "qwen2"),
    ("parity plan.json", "steps", 2), ("parity plan.json", "seed", 7), ("parity plan.json", "timeout", 9),
    ("parity plan.json", "device", "gpu"), ("parity plan.json", "packed", 1), ("parity plan.json", "lora_rank", 2),
    ("parity plan.json", "loss", "ipo"), (TRAIN, "timeout", 60), (TRAIN, "distributed_timeout_minutes", 2),
    (TRAIN, "peak_tflops", 3), ("data prepare texts --output=made/x --vocab_size=300", "text_key", "body"),
    ("data prepare texts --output=made/x --vocab_size=300", "vocab_size", 280),
    ("data prepare gbk.txt --output=made/x --vocab_size=300", "encoding", "gbk"), ("gpu-check", "nproc", 4),
    ("gpu-check", "parts", "resume,memory"), ("gpu-check", "minutes", 3),
]  # fmt: skip


@pytest.fixture
def answer(tmp_path, monkeypatch, galvatron) -> Callable[..., Any]:
    """The exit code and output of a command, and the work that it would begin."""
    Path("model.json").write_text(json.dumps(MODEL))
    write_plan(uniform_plan(layers=2, world_size=2, global_train_batch_size=4, global_tp_deg=2), tmp_path / "plan.json")
    Path("texts").mkdir()
    lines = [{"text": f"{n} cats sat on {n * n} mats " * 6, "body": "dogs run by the sea " * 9} for n in range(12)]
    Path("texts/a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    Path("gbk.txt").write_text("猫在垫子上" * 99, encoding="gbk")
    begun: list[Any] = []

    def compared(cases: Any, timeout_s: float, device: str) -> list[parity.Parity]:
        begun.extend((asdict(cases[0]), str(parity.batch_of(cases[0], 0)), timeout_s, device))
        return [parity.Parity(0, 0, "", [], [], [1], 0.0)]

    monkeypatch.setattr(parity, "check_parity", compared)

    def start(run: TrainingRun, program: Any, timeout_s: float, nodes: Any, wait_s: float) -> None:
        begun.extend((timeout_s, wait_s, run._health._mfu(1.0)))

    monkeypatch.setattr(TrainingRun, "start", start)
    monkeypatch.setattr(TrainingRun, "show_end", lambda _: None)
    monkeypatch.setattr(gpu_check_run, "check", lambda *given: begun.extend(given) or iter(()))

    def run(command: str, *words: str) -> Any:
        begun.clear()
        for name in ("gpu-check", "made"):
            shutil.rmtree(name, ignore_errors=True)
        ran = galvatron(*command.split(), *words)
        written = {path.name: path.stat().st_size for path in Path().glob("made/x*")}
        shown = [] if begun or written else [ran.code, ran.out, ran.err]  # else with seconds
        return shown, list(begun), written

    return run


@pytest.mark.parametrize(("command", "option", "value"), [pytest.param(*row, id=f"{row[0]} {row[1]}") for row in ROWS])
def test_an_option_has_an_effect(answer, command, option, value):
    without = answer(command)
    assert any(without) and answer(command) == without != answer(command, f"--{option}={value}")


@pytest.mark.parametrize(
    ("demanded", "short"),
    [
        ({}, 0),
        ({"most_mean_error": 0.02}, 1),
        ({"least_tau": 0.9}, 1),
        ({"most_memory_error": 0.01}, 1),
        ({"most_mean_error": 0.5, "least_tau": 0.1, "most_memory_error": 0.5}, 0),
    ],
)
def test_an_accuracy_that_is_demanded_is_required(demanded, short):
    time, memory = SimpleNamespace(mean=0.1), SimpleNamespace(lowest=-0.05)
    accuracy: Any = SimpleNamespace(time=time, memory=memory, tau=0.5, failed=())
    options = ValidateOptions.from_values({"model_size": "llama", "nproc": 1, **demanded})
    faults = shortcomings(accuracy, options)
    assert len(faults) == short and all(fault.startswith(tuple(demanded)) for fault in faults)
