"""`galvatron quickstart`: the whole job on this machine's CPU: data, profile, search, training, and how it compares."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from json import dumps
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from pydantic import Field

from paddlenlp_galvatron.base.errors import GalvatronError, UserError
from paddlenlp_galvatron.base.limits import MOST_RANKS
from paddlenlp_galvatron.base.printing import Console, say
from paddlenlp_galvatron.base.text import gib, near
from paddlenlp_galvatron.base.writing import write_text
from paddlenlp_galvatron.options.group import Options
from paddlenlp_galvatron.plan import ModelShape, Plan, load_model, read_plan, write_plan
from paddlenlp_galvatron.report.measured import of_plan, predicted_beside_measured
from paddlenlp_galvatron.report.plan import describe
from paddlenlp_galvatron.report.search import layer_wise

from .command import JSON_SWITCH, App, answer

if TYPE_CHECKING:
    from paddlenlp_galvatron.planner import SearchResult
    from paddlenlp_galvatron.training.settings import TrainSettings
    from paddlenlp_galvatron.training.step_log import StepRecord

app = App()

CONFIG: dict[str, Any] = {  # a small Qwen2 with GQA
    "model_type": "qwen2",
    "num_hidden_layers": 8,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}
MODEL = "tiny-qwen2"  # its folder, from which it has its name
SEQ_LENGTH = 128
GLOBAL_BATCH = 16
TEXT_MIB = 4
COMPARED_STEPS = 10  # held against one process
LOSS_TOLERANCE = 1e-4
MOST_STEPS = 10_000  # an hour
GB_MIB = 1024
SCRIPT = Path(__file__).parents[2] / "llm/auto_parallel/galvatron/train_qwen_fine_grained.sh"
ONE_NODE = {"NUM_NODES": "1", "NODE_RANK": "0"}  # whatever a cluster's environment says
TIMEOUT_S = 1800  # of the training
HARDWARE_S, MODEL_S = 60, 60  # after which profiles are brief: all of it is to take four minutes at most
# Where the budget lies between the least that any plan needs (0) and what the fastest plan wants (1): in the middle
# if a layer-wise plan is best there, else nearby.
BUDGETS = (0.5, 0.6, 0.4, 0.7, 0.3, 0.8, 0.25, 0.35, 0.45, 0.55, 0.2, 0.15, 0.1, 0.05)
SEARCHED = {
    "seq_length": SEQ_LENGTH,
    "settle_bsz": GLOBAL_BATCH,
    "sp_space": "tp+sp",
    "mixed_precision": "fp32",
    "no_global_memory_buffer": True,
    "time_profile_mode": "batch",
}


class QuickstartOptions(Options):
    """How much of it."""

    output: Path = Field(Path("runs/quickstart"), description="folder for all files that are made")
    nproc: int = Field(4, ge=2, le=MOST_RANKS, description="number of processes")
    steps: int = Field(40, ge=COMPARED_STEPS, le=MOST_STEPS, description="number of training steps")


@app.command(
    QuickstartOptions,
    switches={"dry_run": "stop before training: show shapes, groups and memory", **JSON_SWITCH},
)
def quickstart(values: dict[str, Any], dry_run: bool, json: bool) -> None:
    """Go from nothing to a trained model: data, profiles, a searched plan, training, compared with the prediction."""
    given = QuickstartOptions.from_values(values)
    with redirect_stdout(sys.stderr) if json else nullcontext():
        found = _all_of_it(given.output.absolute(), given.nproc, given.steps, dry_run)
    if json:
        answer("", True, **found)


def _all_of_it(output: Path, nproc: int, steps: int, dry_run: bool) -> dict[str, Any]:
    """Returns what was found, for programs."""
    from paddlenlp_galvatron.training.step_log import read_log

    from .train import show_run

    if not SCRIPT.exists():
        raise UserError(f"{SCRIPT}: no such file; the quick start runs in a checkout of the project")
    console, begin = Console(soft_wrap=True), time.monotonic()  # paths stay whole
    seconds: dict[str, float] = {}  # by part

    def part(name: str) -> None:
        """The end of a part."""
        seconds[name] = round(time.monotonic() - begin - sum(seconds.values()), 1)

    shape = _write_model(output / MODEL)
    _title(console, 1, "text: Python's standard library, tokenised")
    _prepare_data(output)
    part("data")
    _title(console, 2, f"profiles: {nproc} processes and the model, measured")
    _profile(output, nproc)
    part("profiles")
    _title(console, 3, "plan: searched under a tight memory budget")
    plan = _search(console, output, nproc)
    part("search")
    told = {"plan": output / "plan.json", "seconds": seconds}
    if dry_run:
        show_run(console, plan, shape)
        return told
    _title(console, 4, f"training: {steps} steps on {nproc} processes")
    settings = _train(output, nproc, steps)
    records = read_log(settings.log)
    part("training")
    _title(console, 5, f"the same {COMPARED_STEPS} steps in one process")
    difference = _difference_to_one_process(settings, records)
    part("one process")
    console.print(f"largest difference of the loss: {difference:.1e} (allowed: {LOSS_TOLERANCE:.0e})")
    _title(console, 6, "predicted beside measured")
    console.print(predicted_beside_measured(plan, of_plan(plan, records)))
    made, log = near(output), near(settings.log)
    console.print(
        f"\ndone in {sum(seconds.values()):.0f} s: {', '.join(f'{name} {s:.0f}' for name, s in seconds.items())}; "
        "what was made, and what shows more of it:\n"
        f"  galvatron plan show {made}/plan.json\n"
        f"  galvatron explain {made}/plan.json\n"
        f"  galvatron report {made}/plan.json --log {log}"
    )
    if not difference <= LOSS_TOLERANCE:
        raise GalvatronError("the plan does not train what one process trains; please report this with plan.json")
    return {**told, "log": settings.log, "difference": difference, "last_loss": records[-1]["loss"]}


def _title(console: Console, number: int, text: str) -> None:
    console.print(f"\n[bold][{number}/6][/bold] {text}", markup=True)


def _write_model(folder: Path) -> ModelShape:
    write_text(folder / "config.json", dumps(CONFIG, indent=2) + "\n")
    return load_model(folder)


def _prepare_data(output: Path) -> None:
    from .data import prepare

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # else tokenizers warns of every process started later
    text = {"standard_library": True, "vocab_size": CONFIG["vocab_size"], "limit_mib": TEXT_MIB}
    prepare({"output": output / "data" / "python", **text}, json=False)


def _profile(output: Path, nproc: int) -> None:
    from paddlenlp_galvatron.measure.options import HardwareOptions, PointOptions, ProfileMode
    from paddlenlp_galvatron.options.model_options import ModelOptions

    from .profile import profile_hardware, profile_model

    folder = output / "profiles"
    say(profile_hardware(HardwareOptions(output=folder, nproc=nproc, end_mb=16, time_budget_s=HARDWARE_S)))
    points = PointOptions(
        output=folder,
        nproc=nproc,
        profile_mode=ProfileMode.BATCH,
        profile_max_batch_size=4,
        max_tp_deg=nproc,
        sequence_parallel=True,
        time_budget_s=MODEL_S,
    )
    say(profile_model(points, ModelOptions(model_size=str(output / MODEL), seq_length=SEQ_LENGTH)))


def _search(console: Console, output: Path, nproc: int) -> Plan:
    """The best plan under a budget so tight that no single strategy for all layers is best."""
    from paddlenlp_galvatron.planner.question import Question

    model = {"model_size": str(output / MODEL), "num_gpus_per_node": nproc, "profiles": output / "profiles"}

    def run(gb: float) -> SearchResult:
        return Question.of({**model, **SEARCHED, "memory_constraint": gb}).search()

    least, fastest = run(1e-6).need, run(1e6).require()
    assert least is not None
    most_mib = max(stage.memory.total_mib for stage in fastest.prediction.stages)
    for share in BUDGETS:
        budget_mib = least.enough_mib + share * (most_mib - least.enough_mib)
        result = run(budget_mib / GB_MIB)
        if result.best and result.best.strategies > 1:
            break
    write_plan(result.plan, output / "plan.json")
    plan = read_plan(output / "plan.json")
    console.print(
        f"budget {gib(budget_mib)} GiB a process "
        f"(least {gib(least.enough_mib)}, the fastest plan wants {gib(most_mib)})\n"
        f"layer-wise {result.time_s:.3f} s a step; lower bound {result.lower_bound_s:.3f} s, searched in "
        f"{result.search_time_s:.2f} s\n"
        f"{next(layer_wise(result))}\n"
    )
    console.print(*describe(replace(plan, metadata={})))
    return plan


def _train(output: Path, nproc: int, steps: int) -> TrainSettings:
    """Train as a user does, by the script; returns the run's settings."""
    from paddlenlp_galvatron.training.settings import read_settings

    variables = {
        "GALVATRON_CONFIG_PATH": output / "plan.json",
        "MODEL": output / MODEL,
        "DATA": output / "data" / "python",
        "OUTPUT_DIR": output,
        "NUM_GPUS_PER_NODE": nproc,
        "MAX_STEPS": steps,
        "LEARNING_RATE": 2e-3,
        "SAVE_STEPS": 0,
    }
    words = ["--min_learning_rate", "2e-4", "--warmup_steps", "5", "--resume_from_checkpoint", "none"]
    shown = {name: near(value) if isinstance(value, Path) else value for name, value in variables.items()}
    lines = [*(f"{name}={quote(str(value))}" for name, value in shown.items()), f"sh {quote(str(near(SCRIPT)))}"]
    say(" \\\n".join([*lines, f"    {' '.join(words)}"]) + "\n")
    environment = {name: str(value) for name, value in variables.items()}
    environment = {**os.environ, **ONE_NODE, **environment, "PYTHON": sys.executable}
    code = subprocess.run(["sh", SCRIPT, *words], env=environment, timeout=TIMEOUT_S, stdout=sys.stdout).returncode
    if code:
        raise GalvatronError("training did not end well; its own message stands above")
    return read_settings(output / "settings.0.json")


def _difference_to_one_process(settings: TrainSettings, records: list[StepRecord]) -> float:
    from paddlenlp_galvatron.check.parity.one_process import train_one_process
    from paddlenlp_galvatron.runtime.weights import SeededWeights
    from paddlenlp_galvatron.training.inputs import open_data

    plan, shape = settings.load_plan()
    data = open_data(settings, plan, shape)
    batches = (data.batch(step) for step in range(COMPARED_STEPS))
    source = SeededWeights(settings.seed, shape.initializer_range)
    alone = train_one_process(shape, SEQ_LENGTH, source, settings.over(settings.max_steps), batches)
    return max(abs(loss - record["loss"]) for (loss, _), record in zip(alone, records, strict=False))
