"""`galvatron plan`: show a plan to people, check it, print the schema of its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from paddlenlp_galvatron.plan import (
    LayerStrategy,
    ModelShape,
    Plan,
    Schedule,
    VocabStrategy,
    json_schema,
    load_model,
    read_plan,
)
from paddlenlp_galvatron.plan.check import require_valid
from paddlenlp_galvatron.plan.strategy import runs

from .conventions import App

app = App(help="Look at a plan file.")

File = Annotated[Path, typer.Argument(help="the plan file", metavar="FILE")]
WorldSize = Annotated[int | None, typer.Option(help="ranks at hand; needed only where the file names none", min=1)]
Model = Annotated[str | None, typer.Option(help="a config.json, its folder, or the name of a preset such as llama2-7b")]


@app.command()
def show(file: File, world_size: WorldSize = None, model: Model = None) -> None:
    """Print a plan for people, equal layers as one line."""
    plan, shape = _read(file, world_size, model)
    console = Console(highlight=False, soft_wrap=True)
    for name, value in _facts(plan, shape):
        console.print(f"{name:<11}{value}", markup=False)
    console.print(_table(plan))
    for note in _notes(plan, shape):
        console.print(f"note: {note}", markup=False)


@app.command()
def check(file: File, world_size: WorldSize = None, model: Model = None) -> None:
    """Say whether a plan can run: exit code 0, or 2 and a line a fault."""
    plan, shape = _read(file, world_size, model)
    fits = f" and fits {shape.name}" if shape else ""
    typer.echo(f"{file}: valid on {plan.world_size} ranks{fits}")
    for note in _notes(plan, shape):
        typer.echo(f"note: {note}")


@app.command()
def schema() -> None:
    """Print the JSON Schema of the plan file."""
    typer.echo(json.dumps(json_schema(), indent=2))


def _read(file: Path, world_size: int | None, model: str | None) -> tuple[Plan, ModelShape | None]:
    plan = read_plan(file, world_size, smallest_world=True)
    shape = load_model(model) if model else None
    require_valid(plan, shape)
    return plan, shape


def _facts(plan: Plan, shape: ModelShape | None) -> list[tuple[str, str]]:
    assumed = plan.assumed
    schedule = "1F1B" if plan.schedule is Schedule.ONE_F_ONE_B else "GPipe"
    facts = [
        ("ranks", f"{plan.world_size} in {_count(len(plan.stages), 'stage')} of {plan.stage_size}, {schedule}"),
        (
            "batch",
            f"{_count(plan.global_batch, 'sample')} a step, "
            f"{_count(plan.micro_batches, 'micro-batch', 'micro-batches')} of {plan.micro_batch}",
        ),
        ("assumed", f"{assumed.mixed_precision}, {assumed.seq_length or 'any number of'} tokens a sample"),
        (
            "",
            f"Megatron-SP {'on' if assumed.sequence_parallel else 'off'}, "
            f"gradients reduced every {'step' if assumed.async_grad_reduce else 'micro-batch'}",
        ),
    ]
    if shape:
        facts.append(("model", f"{shape.name}, {shape.parameters / 1e9:.3g} billion parameters"))
    for title in ("predicted", "searched_from"):
        for name, value in plan.metadata.get(title, {}).items():
            facts.append((title, f"{name} {_value(value)}"))
    return facts


def _table(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("stage", "layers", "split by", "degree", "dp", "model states", "recompute", "groups"):
        table.add_column(title, no_wrap=True)
    first, last = 0, len(plan.stages) - 1
    table.add_row(str(first), "embedding", *_cells(plan, plan.vocab))
    for stage in range(len(plan.stages)):
        layers = plan.stage_layers(stage)
        for run, strategy in runs([plan.layers[layer] for layer in layers]):
            start, stop = layers[run[0]], layers[run[-1]]
            table.add_row(str(stage), str(start) if start == stop else f"{start}-{stop}", *_cells(plan, strategy))
    table.add_row(str(last), "LM head", *_cells(plan, plan.vocab))
    return table


def _cells(plan: Plan, strategy: LayerStrategy | VocabStrategy) -> list[str]:
    layer = strategy.as_layer() if isinstance(strategy, VocabStrategy) else strategy
    split = "-" if layer.degree == 1 else "sequence" if layer.ulysses else "weights"
    groups = "-" if layer.degree == 1 else "neighbours" if layer.consecutive else "strided"
    return [split, str(layer.degree), str(plan.dp(layer)), layer.dp_type, "yes" if layer.recompute else "no", groups]


def _notes(plan: Plan, shape: ModelShape | None) -> list[str]:
    if shape is None or shape.vocab_size % plan.vocab.tp == 0:
        return []
    padded = shape.padded_vocab_size(plan.vocab.tp)
    return [
        f"the vocabulary of {shape.vocab_size} is padded to {padded} so that vtp {plan.vocab.tp} divides it; "
        "the padding never learns nor shows in the loss"
    ]


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    return json.dumps(value) if isinstance(value, dict) else str(value)
