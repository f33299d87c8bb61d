"""`galvatron plan`: show a plan to people, check it, print the schema of its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from paddlenlp_galvatron.plan import ModelShape, Plan, json_schema, load_model, read_plan
from paddlenlp_galvatron.plan.check import require_valid
from paddlenlp_galvatron.report import describe, notes

from .conventions import App

app = App(help="Look at a plan file.")

File = Annotated[Path, typer.Argument(help="the plan file", metavar="FILE")]
WorldSize = Annotated[int | None, typer.Option(help="ranks at hand; needed only where the file names none", min=1)]
Model = Annotated[str | None, typer.Option(help="a config.json, its folder, or the name of a preset such as llama2-7b")]


@app.command()
def show(file: File, world_size: WorldSize = None, model: Model = None) -> None:
    """Print a plan for people, equal layers as one line."""
    plan, shape = _read(file, world_size, model)
    Console(highlight=False).print(*describe(plan, shape))


@app.command()
def check(file: File, world_size: WorldSize = None, model: Model = None) -> None:
    """Say whether a plan can run: exit code 0, or 2 and a line a fault."""
    plan, shape = _read(file, world_size, model)
    fits = f" and fits {shape.name}" if shape else ""
    typer.echo(f"{file}: valid on {plan.world_size} ranks{fits}")
    for note in notes(plan, shape):
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
