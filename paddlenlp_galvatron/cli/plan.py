"""`galvatron plan`: show a plan to people, check it, print the schema of its file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

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
    facts = Table.grid(padding=(0, 2, 0, 0))
    for name, value in [*_facts(plan, shape), *(("note", note) for note in _notes(plan, shape))]:
        facts.add_row(name, Text(value))
    Console(highlight=False).print(facts, _table(plan))


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
    schedule = "1F1B" if plan.schedule is Schedule.ONE_F_ONE_B else "GPipe"
    micro_batches = _count(plan.micro_batches, "micro-batch", "micro-batches")
    facts = [
        ("ranks", f"{plan.world_size} in {_count(len(plan.stages), 'stage')} of {plan.stage_size}, {schedule}"),
        ("batch", f"{_count(plan.global_batch, 'sample')} a step, {micro_batches} of {plan.micro_batch}"),
        ("assumed", _assumed(plan)),
    ]
    if shape:
        facts.append(("model", f"{shape.name}, {shape.parameters / 1e9:.3g} billion parameters"))
    for title in ("predicted", "searched_from"):
        facts += [(title, line) for line in _lines(plan.metadata.get(title) or {})]
    return facts


def _assumed(plan: Plan) -> str:
    assumed = plan.assumed
    words = {
        "mixed_precision": str(assumed.mixed_precision),
        "seq_length": f"{assumed.seq_length} tokens",
        "sequence_parallel": f"Megatron-SP {'on' if assumed.sequence_parallel else 'off'}",
        "async_grad_reduce": f"gradients reduced every {'step' if assumed.async_grad_reduce else 'micro-batch'}",
    }
    return ", ".join(text for name, text in words.items() if name in plan.stated) or "nothing; training's flags decide"


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


def _lines(values: dict[str, Any]) -> Iterator[str]:
    """A line a value, and where a value is a list of objects, such as one a stage, a line an object."""
    for name, value in values.items():
        if isinstance(value, list) and any(isinstance(item, dict) for item in value):
            yield from (f"{name} {index}: {_words(item)}" for index, item in enumerate(value))
        else:
            yield f"{name} {_words(value)}"


def _words(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(_words, value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(item)}" for name, item in value.items())
    return str(value)
