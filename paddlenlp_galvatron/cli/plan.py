"""`galvatron plan`: show, check and change a plan, convert it for other programs, print the schema of its file."""

from __future__ import annotations

from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddlenlp_galvatron.base import Infeasible, UserError, count
from paddlenlp_galvatron.base.limits import Ranks, Size
from paddlenlp_galvatron.base.printing import Console, say
from paddlenlp_galvatron.options.group import Options, Sizes
from paddlenlp_galvatron.options.model_options import SEQ
from paddlenlp_galvatron.options.prices import LimitOptions, PriceOptions
from paddlenlp_galvatron.options.uniform import DegreeOptions, UniformOptions
from paddlenlp_galvatron.plan import (
    Assumptions,
    Plan,
    Precision,
    json_schema,
    load_model,
    plan_to_dict,
    write_plan,
)
from paddlenlp_galvatron.plan.check import misfits, require_trainable, require_valid
from paddlenlp_galvatron.plan.strategy import Load, Predicted, load_summary
from paddlenlp_galvatron.plan.uniform import one_sample_each
from paddlenlp_galvatron.report.plan import describe, notes

from .command import App, FromFile, answer, say_note
from .programs import (
    PlanFileOptions,
    RecipeOptions,
    from_paddlefleet,
    of_recipe,
    read,
    to_paddlefleet,
    to_paddleformers,
    to_paddlenlp,
)
from .start import how_to_start

if TYPE_CHECKING:
    from paddlenlp_galvatron.cost_model.facts import PlanFacts
    from paddlenlp_galvatron.planner.origin import OriginOptions
    from paddlenlp_galvatron.planner.question import Question
    from paddlenlp_galvatron.report.measured import Log

# Prices, searches and logs are imported by the commands that need them, so that `plan show` is fast.
app = App("Plans: show, check, compare, change, write and convert them.")

PRICED_GB = 1.0  # any budget: only the device's reserve depends on it
FILE = {"file": "FILE"}


class CheckOptions(PlanFileOptions):
    """A plan file, the model and profiles to check it against, and the log of a run."""

    log: Path | None = None


class ScaleOptions(PriceOptions):
    """Options: a plan and the new number of GPUs."""

    file: Path
    gpus: Ranks
    global_train_batch_size: Size | None = None
    output: Path | None = None


class SchemaOptions(Options):
    """The command whose answer has the schema."""

    answer: str | None = None


class SpareOptions(PriceOptions, LimitOptions):
    """Options: a plan and its smaller numbers of nodes."""

    file: Path
    num_nodes: Sizes
    output: Path | None = None


class TraceOptions(PriceOptions):
    """Options: a plan and the file for its time line."""

    file: Path
    output: Path = Path("trace.json")


class DiffOptions(PriceOptions):
    """Options: two plans."""

    first: Path
    second: Path


@app.command(PlanFileOptions, positional=FILE)
def show(values: dict[str, Any], json: bool) -> None:
    """Print a plan as a table in which equal layers share a line. Notes say what keeps it from running."""
    args = PlanFileOptions.from_values(values)
    plan, shape = read(args.file, args, valid=False)
    faults = misfits(plan, shape)
    if json:
        for fault in faults:
            say_note(f"cannot run: {fault}")
        say(dumps(plan_to_dict(plan), indent=2))
        return
    Console().print(*describe(plan, shape))
    for line in () if faults else how_to_start(plan, args.file):
        say(line)


@app.command(CheckOptions, positional=FILE)
def check(values: dict[str, Any], json: bool) -> None:
    """Check whether a plan can run: exit code 0, or 2 and one line per fault."""
    from paddlenlp_galvatron.check.run_log import steps_under
    from paddlenlp_galvatron.profiles import ProfileFile

    args = CheckOptions.from_values(values)
    file = args.file
    plan, shape = read(file, args)
    require_trainable(plan)
    matches = f", matches {shape.name} ({shape.layers} layers); memory not checked" if shape else "; model not checked"
    noted = notes(plan, shape)
    for path in ProfileFile.changed((plan.metadata.get("searched_from") or {}).get("profiles")):
        noted.append(f"{path} has changed since the plan was searched; search again for the best plan")
    planned = Predicted.of(plan).load
    load_facts, lines = _load_comparison(planned, steps_under(plan, args.log)) if args.log else (None, [])
    text = "\n".join(
        [f"{file}: valid: {count(plan.world_size, 'GPU')}{matches}", *(f"note: {note}" for note in noted), *lines]
    )
    facts = {"plan": file, "valid": True, "world_size": plan.world_size, "model": shape.name if shape else None}
    answer(text, json, **facts, notes=noted, load=load_summary(planned), log=load_facts)


def _load_comparison(planned: Load | None, records: Log) -> tuple[dict[str, Any], list[str]]:
    """The logged load of experts and the load that the plan was priced with, for programs and people."""
    from paddlenlp_galvatron.report.measured import WARM_UP_STEPS, load_verdicts, measured_load

    measured = measured_load(records[WARM_UP_STEPS:] or records)
    facts: dict[str, Any] = {"steps": len(records), "load": None, "holds": None}
    if measured is None:
        return facts, ["the log has no load of experts: no layer uses expert parallelism"]
    facts["load"] = {"moe_imbalance": measured.usual, "moe_imbalance_most": measured.most}
    if planned is None:
        return facts, [
            f"the busiest rank of experts has rows {measured.usual:.3g} x mean, {measured.most:.3g} x at most; the "
            "plan's file does not say for which load it was searched, so search a plan"
        ]
    verdicts = load_verdicts(planned, measured)
    facts["holds"] = {name: holds for name, (holds, _) in verdicts.items()}
    return facts, [text for _, text in verdicts.values()]


class FileOptions(Options):
    """The file that `uniform` writes, and its model."""

    output: Path = Path("plan.json")
    model_size: str
    world_size: Ranks
    sequence_parallel: bool = True
    mixed_precision: Precision = Precision.BF16
    seq_length: Size | None = None


@app.command(FromFile, FileOptions, DegreeOptions, UniformOptions, positional={"model_size": "MODEL"})
def uniform(values: dict[str, Any], json: bool) -> None:
    """Write a plan with one strategy for all layers, from the options of Galvatron's GLOBAL mode or of PaddleNLP."""
    file = FileOptions.from_values(values)
    shape = load_model(file.model_size)
    seq_length = file.seq_length or min(SEQ, shape.max_position_embeddings)
    assumed = Assumptions(file.sequence_parallel, file.mixed_precision, seq_length=seq_length)
    options, degrees = UniformOptions.from_values(values), DegreeOptions.from_values(values)
    if degrees.given:
        options = degrees.onto(options, file.world_size)
    plan = options.plan(shape.layers, file.world_size, assumed, shape.dense_layers)
    if not (options.chunks or degrees.gradient_accumulation_steps or degrees.per_device_train_batch_size):
        plan = one_sample_each(plan)
    require_valid(plan, shape)
    asked = {"model_size": file.model_size, "seq_length": seq_length}
    write_plan(replace(plan, metadata={"searched_from": {"model": shape.name, "model_options": asked}}), file.output)
    text = (
        f"{file.output}: one strategy for the {shape.layers} layers of {shape.name} on {file.world_size} ranks, "
        f"{count(plan.micro_batches, 'micro-batch', 'micro-batches')} of {count(plan.micro_batch, 'sample')}"
    )
    answer(text, json, plan=file.output, model=shape.name, world_size=file.world_size, chunks=plan.micro_batches)


@app.command(DiffOptions, positional={"first": "FIRST", "second": "SECOND"})
def diff(values: dict[str, Any], json: bool) -> None:
    """Show what differs between two plans: fields, layers and, with profiles, time and memory by term."""
    from paddlenlp_galvatron.report import difference

    args = DiffOptions.from_values(values)
    files = args.first, args.second
    first, other = (read(file)[0] for file in files)
    budgets = ((plan.metadata.get("searched_from") or {}).get("memory_constraint_gb") for plan in (first, other))
    budget_gb = next((gb for gb in budgets if isinstance(gb, int | float)), PRICED_GB)  # the same reserve for both

    def facts_of(file: Path) -> PlanFacts:
        plan, question = _origin(file, args, budget_gb)
        return question.facts_of(plan)

    facts = None
    try:
        facts = facts_of(files[0]), facts_of(files[1])
    except UserError as error:
        if any(getattr(args, name) for name in PriceOptions.model_fields):
            raise
        say_note(f"no time and memory: {error.faults[0]}")
    if json:
        say(dumps(difference.summary(first, other, facts)))
    else:
        Console(soft_wrap=True).print(*difference.printed(first, other, facts), sep="\n")


@app.command(ScaleOptions, positional=FILE)
def scale(values: dict[str, Any], json: bool) -> None:
    """Put a plan on fewer or more GPUs: the same strategy for each layer, the same samples and nearly the same memory
    for each GPU. A PaddleFleet recipe gets new layer lists. Says why each field changes."""
    from paddlenlp_galvatron.planner.scale import scaled
    from paddlenlp_galvatron.report import difference

    args = ScaleOptions.from_values(values)
    is_recipe = args.file.suffix in (".yaml", ".yml")
    plan = of_recipe(args.file, args.model_size, None, args.gpus)[0] if is_recipe else read(args.file)[0]
    made = scaled(plan, _of(args.file, args), args.gpus, args.global_train_batch_size, relist=is_recipe)
    path = args.output or args.file.with_name(
        f"{args.file.stem}_{args.gpus}gpus{'.json' * is_recipe or args.file.suffix}"
    )
    write_plan(made.after, path)
    if json:
        say(dumps(difference.scaled_summary(made) | {"plan": str(path)}))
    else:
        lines = [*difference.printed_scaled(made), f"written: {path}", *how_to_start(made.after, path)]
        Console(soft_wrap=True).print(*lines, sep="\n")


@app.command(SpareOptions, positional=FILE)
def spare(values: dict[str, Any], json: bool) -> None:
    """Write the fastest plans for fewer nodes, with the same global batch, for `galvatron train --spare`. Exit code 3
    if none fits."""
    from paddlenlp_galvatron.planner.spare import spares
    from paddlenlp_galvatron.report.fit import spare_lines, spare_summary

    args = SpareOptions.from_values(values)
    plan, question = _origin(args.file, args)
    made = spares(plan, question, args.num_nodes)
    folder = args.output or args.file.with_name(f"{args.file.stem}_spare")
    write_plan(plan, folder / f"{plan.world_size}gpus.json")
    for spare_plan in made:
        if spare_plan.best:
            write_plan(spare_plan.best.plan, folder / f"{spare_plan.gpus}gpus.json")
    if json:
        say(dumps(spare_summary(made) | {"folder": str(folder)}))
    else:
        Console(soft_wrap=True).print(*spare_lines(made, plan.global_batch, folder), sep="\n")
    if not any(spare_plan.best for spare_plan in made):
        raise Infeasible(f"no plan fits: on {made[0].nodes} nodes {made[0].why_not}")


@app.command(TraceOptions, positional=FILE)
def trace(values: dict[str, Any], json: bool) -> None:
    """Write the predicted time line of a step for Perfetto; `galvatron train --trace` writes a measured one."""
    from paddlenlp_galvatron.base.tracing import write_trace
    from paddlenlp_galvatron.report.trace import predicted_events, rank_names

    args = TraceOptions.from_values(values)
    plan, question = _origin(args.file, args)
    facts = question.facts_of(plan)
    prediction, output = facts.prediction, args.output
    write_trace(output, predicted_events(plan, question.cost, prediction), rank_names(plan))
    text = f"{output}: a step of {prediction.time_s:.4g} s, {facts.speed_words}; open it in https://ui.perfetto.dev"
    speed = {"time_s": prediction.time_s, "samples_per_s": prediction.samples_per_s}
    answer(text, json, trace=output, **speed, load=load_summary(facts.cost.load))


def _origin(file: Path, args: PriceOptions, budget_gb: float = PRICED_GB) -> tuple[Plan, Question]:
    """`budget_gb`: used if the file names none. Raises UserError if the file does not name the inputs of its search."""
    from paddlenlp_galvatron.planner.origin import read_origin

    return read_origin(_of(file, args), budget_gb=budget_gb)


def _of(file: Path, args: PriceOptions) -> OriginOptions:
    from paddlenlp_galvatron.planner.origin import OriginOptions

    chosen = args.model_fields_set & OriginOptions.model_fields.keys()
    return OriginOptions(plan=file, **{name: getattr(args, name) for name in chosen})


app.command(PlanFileOptions, positional=FILE)(to_paddlenlp)
app.command(PlanFileOptions, positional=FILE)(to_paddlefleet)
app.command(RecipeOptions, positional={"file": "RECIPE"})(from_paddlefleet)
app.command(PlanFileOptions, positional=FILE)(to_paddleformers)


@app.command(SchemaOptions, switches=(), positional={"answer": "COMMAND"})
def schema(values: dict[str, Any]) -> None:
    """Print the JSON Schema of the plan file, or of the answer of a command with --json."""
    from paddlenlp_galvatron.report.answers import answer_schemas

    name, schemas = SchemaOptions.from_values(values).answer, answer_schemas()
    if name is not None and name not in schemas:
        raise UserError(f"answer: {name}: has no schema; known: {', '.join(schemas)}")
    say(dumps(schemas[name] if name else json_schema(), indent=2))
