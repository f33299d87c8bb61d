"""One answer to one question: memory, reserve and MFU of a device are the same in every command that plans for it."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

import paddlenlp_galvatron as galvatron_api
from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.cli.training_run import mfu_of
from paddlenlp_galvatron.launch import gpus as node
from paddlenlp_galvatron.model import load_model
from paddlenlp_galvatron.plan import read_plan
from paddlenlp_galvatron.planner.form import Form
from paddlenlp_galvatron.planner.form import answer as what_if
from paddlenlp_galvatron.profiles.data_sheet import data_sheets
from paddlenlp_galvatron.report.measured import Health

MODEL, GPUS, BATCH, SEQ = "qwen2.5-0.5b", 2, 8, 4096
ASKED = ("--gpus", GPUS, "--batch", BATCH, "--seq", SEQ)
FORM = {"model_size": MODEL, "num_gpus_per_node": GPUS}
BUDGET = 20.0  # GiB, where nobody knows the memory


UNIFORM = ("plan", "uniform", MODEL, "--world_size", GPUS, "-o", "u.json", "--global_train_batch_size", BATCH)


class Case(NamedTuple):
    """A device, and how it is given."""

    sheet: dict[str, Any]  # changes of a shipped sheet
    gib: float | None  # None: unknown, so that a budget has to be given
    tflops: float | None
    shipped: str = ""  # given by name, not by a file
    profile: dict[str, Any] | None = None  # given as profiles; their fields about the device
    task: Mapping[str, Any] = MappingProxyType({})  # options that change the computation


OTHER = {"device": "NVIDIA A100-SXM4-80GB", "memory": 61.0}  # a name that is known, with another memory
A100_40 = {"name": "NVIDIA A100-SXM4-40GB", "is_gpu": True, "memory_gib": 39.59, "peak_16bit_tflops": 312.0}
A10 = {"name": "NVIDIA A10", "is_gpu": True, "memory_gib": 22.06}
CASES = {
    "shipped": Case({}, 79.1, 989, "H100"),
    "shipped A800": Case({}, 79.3, 312, "a800-80gb"),
    "shipped H20": Case({}, 95.0, 148, "h20"),
    "own sheet": Case({"device": "My Card", "memory": 60.0}, 60.0, 312),
    "own sheet of a shipped name": Case(OTHER, 61.0, 312),
    "own sheet of another card": Case({"device": "NVIDIA A100-SXM4-40GB", "memory": 38.0}, 38.0, 312),
    "measured": Case({}, 39.59, 312, profile={"device": A100_40}),
    "measured, no sheet": Case({}, 22.06, None, profile={"device": A10}),
    "only a full name": Case({}, 39.4, 312, profile={"fingerprint": {"device": "NVIDIA A100-SXM4-40GB"}}),
    "only a name in part": Case({}, None, None, profile={"fingerprint": {"device": "A100-40GB of a cloud"}}),
    "no name": Case({}, None, None, profile={}),
    "adapters": Case({}, 79.1, 989, "h100", task={"task": "lora"}),
    "adapters for pairs": Case({}, 79.1, 989, "h100", task={"task": "dpo", "lora_rank": 4}),
    "documents": Case({}, 79.1, 989, "h100", task={"document_tokens": 512}),
}


def given(case: Case, folder: Path, galvatron) -> dict[str, str]:
    """The option that names the device, after its files are written."""
    if case.shipped:
        return {"device": case.shipped}
    sheet = json.loads(data_sheets()["a100-80gb"].read_text())
    sheet |= {"device": case.sheet.get("device", "x"), "drivers": []}
    sheet["memory"]["value"] = case.sheet.get("memory", 1.0)
    (folder / "sheet.json").write_text(json.dumps(sheet))
    if case.profile is None:
        return {"device": str(folder / "sheet.json")}
    model = ("--model", MODEL, "--seq", SEQ, "--nproc", GPUS, "--output", folder / "measured")
    assert galvatron("profile", "all", "--analytic", folder / "sheet.json", *model).code == 0
    for path in (folder / "measured").glob("*.json"):
        content = json.loads(path.read_text())
        reported = {name: value for name, value in content["galvatron"].items() if name not in ("analytic", "device")}
        reported["fingerprint"].pop("device", None)
        reported["fingerprint"] |= case.profile.get("fingerprint", {})
        content["galvatron"] = reported | {name: case.profile[name] for name in ("device",) if name in case.profile}
        path.write_text(json.dumps(content))
    return {"profiles": str(folder / "measured")}


UNSAID: Any = object()


class Answer(NamedTuple):
    """A command's statements about a device. UNSAID: none."""

    gib: Any
    reserve_gib: Any
    mfu: Any  # %; None: no peak is known
    stage_gib: Any = UNSAID  # the reserve with the working memory that the allocator keeps under the plan


def number(pattern: str, text: str) -> float | None:
    match = re.search(pattern, text)
    return float(match[1]) if match else None


def mfu_in(text: str) -> float | None:
    return number(r"MFU ([\d.]+)%", text)


def of_stages(text: str) -> tuple[float | None, float]:
    """The same, of the table of memory that `explain` prints."""
    return number(r"GiB, of ([\d.]+)", text), number(r"\nreserve +([\d.]+)", text) or 0.0


def answers(case: Case, where: dict[str, str], galvatron) -> Iterator[tuple[str, Answer]]:
    """The statements of every command, about plans that `search` has written."""
    budget = {} if case.gib else {"memory_constraint": BUDGET}
    words = [word for option, value in (where | budget | case.task).items() for word in (f"--{option}", value)]
    text = galvatron("search", MODEL, *words, *ASKED, "-o", "p.json").out
    found = number(r"devices of ([\d.]+) GiB", text), number(r"\(reserve ([\d.]+)\)", text)
    yield "search", Answer(*found, mfu_in(text))

    [row] = json.loads(galvatron("fit", MODEL, *words, *ASKED, "--json").out)["rows"]
    beside = re.search(r"estimate of tensors \+ (.*) GiB on a full", galvatron("fit", MODEL, *words, *ASKED).out)
    reserve = sum(map(float, re.findall(r" ([\d.]+)(?:,|$)", beside[1]))) if beside else 0.0
    yield "fit", Answer(row["memory_gib"], reserve, row["mfu"] and 100 * row["mfu"])

    text = galvatron("explain", "p.json").out
    memory, reserve = of_stages(text)
    yield "explain", Answer(memory, UNSAID, mfu_in(text), reserve)

    galvatron(*UNIFORM)  # a plan that names no device
    of_plan = [word for option, value in (where | budget).items() for word in (f"--{option}", value)]
    text = galvatron("explain", "u.json", "--model", MODEL, *of_plan).out
    yield "explain of another's plan", Answer(of_stages(text)[0], UNSAID, UNSAID)

    text = galvatron("plan", "show", "p.json").out
    stage = next(line for line in reversed(text.splitlines()) if line[:1].isdigit()).split()
    yield "plan show", Answer(number(r"devices of\s+([\d.]+)\s+GiB", text), UNSAID, UNSAID, float(stage[5]))

    if case.profile is None:  # measured profiles are of this cluster alone
        text = galvatron("plan", "scale", "p.json", "--gpus", 2 * GPUS, "-o", "p16.json").out
        yield "plan scale", Answer(number(r"GiB of ([\d.]+)", text), UNSAID, mfu_in(text))

    text = galvatron("plan", "diff", "p.json", "p.json", "--json").out
    reserve = json.loads(text)["memory_mib"][0]["reserve"]
    yield "plan diff", Answer(UNSAID, UNSAID, UNSAID, reserve / 1024)

    form = FORM | {"seq_length": SEQ, "global_train_batch_size": BATCH}
    made = what_if(Form(**form, **where, **budget), case.task)
    settled, share = made.question.settled, made.question.facts_of(made.result.plan).mfu
    yield "what-if", Answer(settled.memory_gib, settled.reserve_mib / 1024, share and 100 * share)

    result = galvatron_api.search(MODEL, **where, **budget, **case.task, gpus=GPUS, batch=BATCH, seq_length=SEQ).result
    searched, stages = result.plan.metadata["searched_from"], result.plan.metadata["predicted"]["stages"]
    held = stages[0]["memory"]["context_mib"] / 1024
    yield "Python", Answer(searched["memory_constraint_gb"], UNSAID, UNSAID, held)

    plan, adapts = read_plan(Path("p.json")), case.task.get("task")
    step_s = plan.metadata["predicted"]["time_s"]
    shape, settings = load_model(MODEL), SimpleNamespace(peak_tflops=None, adapts=bool(adapts))
    with patch.multiple(node, gpu_count=lambda: GPUS, gpu_name=lambda: "a driver's name that nobody knows"):
        health = Health(plan, mfu_of(plan, shape, settings))
    record = {"step": 9, "loss": 1.0, "lr": 1.0, "grad_norm": 1.0, "step_time_s": step_s}
    line = health.line([record | {"peak_memory_mib": [1.0] * GPUS, "tokens_per_s": BATCH * SEQ / step_s}])
    yield "log", Answer(UNSAID, UNSAID, mfu_in(line))


@pytest.mark.parametrize("name", CASES)
def test_every_command_answers_alike(tmp_path, monkeypatch, galvatron, name):
    monkeypatch.chdir(tmp_path)
    case, shape = CASES[name], load_model(MODEL)
    where = given(case, tmp_path, galvatron)
    reported = dict(answers(case, where, galvatron))
    first, step_s = reported["search"], read_plan(Path("p.json")).metadata["predicted"]["time_s"]
    assert first.gib == pytest.approx(case.gib or BUDGET, abs=0.006)
    assert (first.reserve_gib > 1) == (case.gib is not None)  # a GPU's
    seen = case.task.get("document_tokens", SEQ)
    flops = (
        BATCH * SEQ * ((4 if "task" in case.task else 6) * shape.parameters + 12 * shape.layers * shape.q_width * seen)
    )
    share = 100 * flops / step_s / (GPUS * case.tflops * 1e12) if case.tflops else None
    expected = first._replace(mfu=share, stage_gib=reported["explain"].stage_gib)
    for command, answer in reported.items():
        for what, ours, theirs in zip(Answer._fields, expected, answer, strict=True):
            if theirs is not UNSAID:
                alike = theirs is None if ours is None else theirs == pytest.approx(ours, abs=0.06)
                assert alike, f"{command}: {what} {theirs}, not {ours}"


def test_profiles_and_a_device_are_not_given_together(tmp_path, galvatron):
    """Each command would have to choose one, where all answers are equal."""
    assert galvatron(*UNIFORM).code == 0
    both = {"device": "h100-80gb", "profiles": str(tmp_path)}
    words = [word for option, value in both.items() for word in (f"--{option}", value)]
    for command in (
        ("search", MODEL, *ASKED),
        ("fit", MODEL, *ASKED),
        *(("explain", "u.json"), ("report", "u.json"), ("plan", "trace", "u.json")),
        *(("plan", "diff", "u.json", "u.json"), ("plan", "scale", "u.json", "--gpus", 4)),
    ):
        ran = galvatron(*command, *words)
        assert ran.code == 2 and "device: profiles say which one it is" in ran.err, command
    with pytest.raises(UserError, match="profiles say which one it is"):
        galvatron_api.search(MODEL, **both, gpus=GPUS)
    with pytest.raises(UserError, match="profiles say which one it is"):
        what_if(Form(**FORM, **both), {})


def test_a_plan_that_is_too_big_is_reported_to_be(tmp_path, galvatron):
    assert galvatron(*UNIFORM).code == 0
    text = galvatron("explain", "u.json", "--device", "h100", "--memory_constraint", 4).out
    needs = number(r"note: the plan does not fit: it needs ([\d.]+) GiB a GPU, of 4.00", text)
    assert needs and f"{needs - 4:.2f} GiB is missing of 4.00" in text
    assert "does not fit: it needs" not in galvatron("explain", "u.json", "--device", "h100").out


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.gib is None])
def test_an_unknown_memory_is_refused_by_name(tmp_path, galvatron, name):
    where = given(CASES[name], tmp_path, galvatron)
    words = ["--profiles", where["profiles"]]
    assert galvatron(*UNIFORM).code == 0
    for command in (
        ("search", MODEL, *words, *ASKED, "-o", "p.json"),
        ("fit", MODEL, *words, *ASKED),
        ("explain", "u.json", "--model", MODEL, *words),
    ):
        ran = galvatron(*command)
        assert ran.code == 2 and "give --memory_constraint" in ran.err, command
    with pytest.raises(UserError, match="memory_constraint"):
        galvatron_api.search(MODEL, **where, gpus=GPUS, batch=BATCH, seq_length=SEQ)
    with pytest.raises(UserError, match="memory_constraint"):
        what_if(Form(**FORM, **where), {})
    assert not Path("p.json").exists()
