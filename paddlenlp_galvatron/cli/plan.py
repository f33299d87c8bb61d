"""`galvatron plan`: show a plan to people, check it, say it in other programs' words, print its file's schema."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import Field

from paddlenlp_galvatron.base.limits import Ranks, Size
from paddlenlp_galvatron.base.printing import Console, say
from paddlenlp_galvatron.base.tracing import write_trace
from paddlenlp_galvatron.cost_model.costs import Load
from paddlenlp_galvatron.interop.arguments import (
    FLEET,
    FORMERS,
    Argument,
    as_flags,
    fleet_arguments,
    fleet_notes,
    stock_arguments,
    stock_notes,
)
from paddlenlp_galvatron.options.degrees import DegreeOptions
from paddlenlp_galvatron.options.group import Options
from paddlenlp_galvatron.options.model_options import SEQ
from paddlenlp_galvatron.options.uniform import UniformOptions
from paddlenlp_galvatron.plan import (
    Assumptions,
    ModelShape,
    Plan,
    Precision,
    UserError,
    json_schema,
    load_model,
    plan_to_dict,
    read_plan,
    write_plan,
)
from paddlenlp_galvatron.plan.check import require_valid
from paddlenlp_galvatron.profiles import ProfileFile
from paddlenlp_galvatron.report import describe, difference, notes, scaling
from paddlenlp_galvatron.report.facts import PlanFacts, load_summary
from paddlenlp_galvatron.report.measured import WARM_UP_STEPS, Log, Predicted, load_verdicts, measured_load
from paddlenlp_galvatron.report.origin import OriginOptions, read_origin
from paddlenlp_galvatron.report.plan import how_to_start
from paddlenlp_galvatron.report.trace import predicted_events, rank_names
from paddlenlp_galvatron.report.why import Problem

from .conventions import JSON_SWITCH, App, Json, answer, within
from .grouped import add_command
from .run_log import steps_under

app = App(help="Look at a plan file.")

CLUSTER = re.compile(r"_(\d{1,6})nodes_(\d{1,6})gpus_per_node_")  # in the names that Galvatron's search gives
PRICED_GB = 1.0  # any budget: of what a plan takes only the device's own reserve depends on it

File = Annotated[Path, typer.Argument(help="the plan file", metavar="FILE")]
WorldSize = Annotated[
    int | None,
    typer.Option(
        help="number of ranks; unset: as the file or its name says, else the fewest that the plan fits",
        parser=within(Ranks),
    ),
]
Task = Annotated[
    str | None, typer.Option(help="what is trained: pretrain, sft, lora or dpo; unset: what the plan was searched for")
]
LoraRank = Annotated[
    int | None, typer.Option(help="rank of the adapters; unset: as the plan names it", parser=within(Size))
]
Profiles = Annotated[Path | None, typer.Option(help="folder of the profile files; unset: the one that the plan names")]
Model = Annotated[str | None, typer.Option(help="a config.json, its folder, or the name of a preset such as llama2-7b")]


@app.command()
def show(
    file: File,
    world_size: WorldSize = None,
    model: Model = None,
    as_json: Annotated[bool, typer.Option("--json", help="the plan's file, in its current form")] = False,
) -> None:
    """Print a plan as a table in which equal layers share a line."""
    plan, shape = _read(file, world_size, model)
    if as_json:
        say(json.dumps(plan_to_dict(plan), indent=2))
        return
    Console().print(*describe(plan, shape))
    for line in how_to_start(plan, file):
        say(line)


@app.command()
def check(
    file: File,
    world_size: WorldSize = None,
    model: Model = None,
    log: Annotated[
        Path | None,
        typer.Option(help="train_log.jsonl of a run: whether the load of experts holds that the plan was priced with"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check whether a plan can run: exit code 0, or 2 and one line per fault."""
    plan, shape = _read(file, world_size, model)
    fits = f" and fits {shape.name}" if shape else ""
    told = notes(plan, shape)
    for path in ProfileFile.changed((plan.metadata.get("searched_from") or {}).get("profiles")):
        told.append(f"{path} has changed since the plan was searched; search again for the best plan")
    planned = Predicted.of(plan).load
    beside, lines = _load_beside(planned, steps_under(plan, log)) if log else (None, [])
    text = "\n".join([f"{file}: valid on {plan.world_size} ranks{fits}", *(f"note: {note}" for note in told), *lines])
    facts = {"plan": file, "valid": True, "world_size": plan.world_size, "model": shape.name if shape else None}
    answer(text, as_json, **facts, notes=told, load=load_summary(planned), log=beside)


def _load_beside(planned: Load | None, records: Log) -> tuple[dict[str, Any], list[str]]:
    """The load of experts that a run logged beside the one that its plan was priced with, for programs and people."""
    measured = measured_load(records[WARM_UP_STEPS:] or records)
    facts: dict[str, Any] = {"steps": len(records), "load": None, "holds": None}
    if measured is None:
        return facts, ["the log tells no load of experts: no ranks share any out"]
    facts["load"] = {"moe_imbalance": measured.usual, "moe_imbalance_most": measured.most}
    if planned is None:
        return facts, [
            f"the fullest rank of experts has rows {measured.usual:.3g} x mean, {measured.most:.3g} x at most; the "
            "plan's file does not tell for which load it was priced, so search one"
        ]
    verdicts = load_verdicts(planned, measured)
    facts["holds"] = {name: holds for name, (holds, _) in verdicts.items()}
    return facts, [text for _, text in verdicts.values()]


class FileOptions(Options):
    """The file that `uniform` writes, and for what."""

    output: Path = Field(Path("plan.json"), description="the plan file to write")
    model_size: str = Field(description="a config.json, its folder, or the name of a preset such as llama2-7b")
    world_size: Ranks = Field(description="number of ranks")
    sequence_parallel: bool = Field(True, description="Megatron-SP in layers with tp > 1")
    mixed_precision: Precision = Field(Precision.BF16, description="type of weights and activations")
    seq_length: Size | None = Field(
        None, description=f"sequence length; unset: {SEQ}, or the model's positions where they are fewer"
    )


def uniform(values: dict[str, Any], json: bool) -> None:
    """Write a plan with one strategy for all layers, from the options of Galvatron's GLOBAL mode or of PaddleNLP."""
    file = FileOptions.from_values(values)
    shape = load_model(file.model_size)
    seq_length = file.seq_length or min(SEQ, shape.max_position_embeddings)
    assumed = Assumptions(file.sequence_parallel, file.mixed_precision, seq_length=seq_length)
    options, degrees = UniformOptions.from_values(values), DegreeOptions.from_values(values)
    if degrees.given:
        options = degrees.onto(options, file.world_size)
    plan = options.plan(shape.layers, file.world_size, assumed)
    require_valid(plan, shape)
    write_plan(plan, file.output)
    text = f"{file.output}: one strategy for the {shape.layers} layers of {shape.name} on {file.world_size} ranks"
    answer(text, json, plan=file.output, model=shape.name, world_size=file.world_size)


add_command(
    app,
    "uniform",
    uniform,
    UniformOptions,
    DegreeOptions,
    FileOptions,
    switches=JSON_SWITCH,
    positional=("model_size", "MODEL"),
)


@app.command()
def diff(
    first: Annotated[Path, typer.Argument(help="a plan file", metavar="FIRST")],
    second: Annotated[Path, typer.Argument(help="the plan file to compare it with", metavar="SECOND")],
    profiles: Annotated[
        Path | None, typer.Option(help="folder of the profile files; unset: the one that the plans name")
    ] = None,
    model: Model = None,
    task: Task = None,
    lora_rank: LoraRank = None,
    as_json: Json = False,
) -> None:
    """Show what differs between two plans: fields, layers and, with profiles, time and memory by term."""
    one, other = (_read(file, None, None)[0] for file in (first, second))
    budgets = ((plan.metadata.get("searched_from") or {}).get("memory_constraint_gb") for plan in (one, other))
    budget_gb = next((gb for gb in budgets if isinstance(gb, int | float)), PRICED_GB)  # so that both reserve alike

    def facts_of(file: Path) -> PlanFacts:
        plan, problem = _origin(file, profiles, model, task, lora_rank, budget_gb)
        return problem.facts_of(plan)

    facts = None
    try:
        facts = facts_of(first), facts_of(second)
    except UserError as error:
        if profiles or task or lora_rank:
            raise
        say(f"note: time and memory are left out: {error.faults[0]}", err=True)
    if as_json:
        say(json.dumps(difference.summary(one, other, facts)))
    else:
        Console(soft_wrap=True).print(*difference.printed(one, other, facts), sep="\n")


@app.command()
def scale(
    file: File,
    gpus: Annotated[int, typer.Option(help="number of GPUs to run it on", parser=within(Ranks))],
    batch: Annotated[
        int | None,
        typer.Option(
            "--global_train_batch_size",
            help="global batch size; unset: it grows with the GPUs, and the number of micro-batches stays",
            parser=within(Size),
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="the file to write; unset: FILE with the number of GPUs")
    ] = None,
    profiles: Profiles = None,
    model: Model = None,
    as_json: Json = False,
) -> None:
    """Put a plan on fewer or more GPUs: the same strategy for each layer, the same samples and as near as can be the
    same memory for each GPU. Says why each field changes."""
    values = {"plan": file, "profiles": profiles, "model_size": model}
    made = scaling.scaled(_read(file, None, None)[0], OriginOptions.from_values(values), gpus, batch)
    path = output or file.with_stem(f"{file.stem}_{gpus}gpus")
    write_plan(made.after, path)
    if as_json:
        say(json.dumps(scaling.summary(made) | {"plan": str(path)}))
    else:
        Console(soft_wrap=True).print(
            *scaling.printed(made), f"written: {path}", *how_to_start(made.after, path), sep="\n"
        )


@app.command()
def trace(
    file: File,
    output: Annotated[Path, typer.Option("--output", "-o", help="the file to write: Chrome-trace JSON")] = Path(
        "trace.json"
    ),
    profiles: Profiles = None,
    model: Model = None,
    task: Task = None,
    lora_rank: LoraRank = None,
    as_json: Json = False,
) -> None:
    """Write the predicted time line of a step for Perfetto; `galvatron train --trace` writes a measured one."""
    plan, problem = _origin(file, profiles, model, task, lora_rank)
    facts = problem.facts_of(plan)
    prediction = facts.prediction
    write_trace(output, predicted_events(plan, problem.cost, prediction), rank_names(plan))
    text = f"{output}: a step of {prediction.time_s:.4g} s, {facts.speed_words}; open it in https://ui.perfetto.dev"
    speed = {"time_s": prediction.time_s, "samples_per_s": prediction.samples_per_s}
    answer(text, as_json, trace=output, **speed, load=load_summary(facts.cost.load))


def _origin(
    file: Path,
    profiles: Path | None,
    model: str | None,
    task: str | None,
    lora_rank: int | None,
    budget_gb: float = PRICED_GB,
) -> tuple[Plan, Problem]:
    """`budget_gb`: where the file names none. Raises UserError where it does not tell what it was searched from."""
    values = {"plan": file, "profiles": profiles, "model_size": model, "task": task, "lora_rank": lora_rank}
    return read_origin(OriginOptions.from_values(values), budget_gb=budget_gb)


@app.command("to-paddlenlp")
def to_paddlenlp(
    file: File,
    world_size: WorldSize = None,
    model: Model = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object, as run_pretrain.py reads it")] = False,
) -> None:
    """Print a plan as arguments of PaddleNLP's own run_pretrain.py. Exit code 2 if they cannot express it."""
    arguments = _arguments(stock_arguments, stock_notes, file, world_size, model)
    say(json.dumps(arguments, indent=2) if as_json else "\n".join(as_flags(arguments)))


@app.command("to-paddlefleet")
def to_paddlefleet(file: File, world_size: WorldSize = None, model: Model = None, as_json: Json = False) -> None:
    """Print a plan as YAML for PaddleFleet's `paddlefleet-cli train`. Exit code 2 if it cannot express it."""
    _say_yaml(FLEET, file, world_size, model, as_json)


@app.command("to-paddleformers")
def to_paddleformers(file: File, world_size: WorldSize = None, model: Model = None, as_json: Json = False) -> None:
    """Print a plan as YAML for PaddleFormers, which PaddleFleet took in. Exit code 2 if it cannot express it."""
    _say_yaml(FORMERS, file, world_size, model, as_json)


def _say_yaml(program: str, file: Path, world_size: int | None, model: str | None, as_json: bool) -> None:
    express, notes_of = partial(fleet_arguments, program=program), partial(fleet_notes, program=program)
    arguments = _arguments(express, notes_of, file, world_size, model)
    answer(yaml.safe_dump(arguments, sort_keys=False).rstrip(), as_json, **arguments)


def _arguments(
    express: Callable[[Plan, ModelShape | None], dict[str, Argument]],
    notes_of: Callable[[Plan], list[str]],
    file: Path,
    world_size: int | None,
    model: str | None,
) -> dict[str, Argument]:
    """A plan in another program's words, its notes told. Raises UserError that names the file."""
    plan, shape = _read(file, world_size, model)
    try:
        arguments = express(plan, shape)
    except UserError as error:
        raise UserError(f"{file}: {fault}" for fault in error.faults) from None
    for note in [*([plan.note] if plan.note else []), *notes_of(plan)]:
        say(f"note: {note}", err=True)
    return arguments


@app.command()
def schema() -> None:
    """Print the JSON Schema of the plan file."""
    say(json.dumps(json_schema(), indent=2))


def _read(file: Path, world_size: int | None, model: str | None) -> tuple[Plan, ModelShape | None]:
    named = CLUSTER.search(file.name)
    ranks = int(named[1]) * int(named[2]) if named else None
    plan = read_plan(file, world_size, default=ranks, smallest_world=True)
    shape = load_model(model) if model else None
    require_valid(plan, shape)
    return plan, shape
