"""`galvatron plan`: show a plan to people, check it, say it in PaddleNLP's words, print the schema of its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from paddlenlp_galvatron.plan import (
    Assumptions,
    ModelShape,
    Plan,
    Precision,
    UserError,
    json_schema,
    load_model,
    read_plan,
    uniform_plan,
    write_plan,
)
from paddlenlp_galvatron.plan.check import require_valid
from paddlenlp_galvatron.plan.paddlenlp import as_flags, stock_arguments, stock_notes
from paddlenlp_galvatron.profiles import ProfileFile
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
    for path in ProfileFile.changed((plan.metadata.get("searched_from") or {}).get("profiles")):
        typer.echo(f"note: {path} has changed since the plan was searched; search again for the best plan")


@app.command()
def uniform(
    output: Annotated[Path, typer.Option(help="the plan file to write")],
    model: Annotated[str, typer.Option(help="a config.json, its folder, or the name of a preset such as llama2-7b")],
    world_size: Annotated[int, typer.Option(help="ranks")],
    global_train_batch_size: Annotated[int, typer.Option(help="samples of an optimizer step, over all ranks")],
    pp_deg: Annotated[int, typer.Option(help="pipeline stages")] = 1,
    global_tp_deg: Annotated[int, typer.Option(help="tensor-parallel degree of all layers")] = 1,
    global_tp_consec: Annotated[bool, typer.Option(help="1: neighbouring ranks form a tp group; 0: strided")] = True,
    sdp: Annotated[bool, typer.Option(help="zero3 instead of default_dp_type")] = False,
    chunks: Annotated[int, typer.Option(help="micro-batches")] = 1,
    global_checkpoint: Annotated[bool, typer.Option(help="recompute activations of all layers")] = False,
    pipeline_type: Annotated[str, typer.Option(help="pipedream_flush (1F1B) or gpipe")] = "pipedream_flush",
    vocab_tp: Annotated[int, typer.Option(help="tensor-parallel degree of embedding and LM head")] = 1,
    default_dp_type: Annotated[str, typer.Option(help="ddp, zero2 or zero3")] = "ddp",
    use_ulysses: Annotated[bool, typer.Option(help="the degrees split the sequence instead of the weights")] = False,
    sequence_parallel: Annotated[bool, typer.Option(help="Megatron-SP in layers with tp > 1")] = False,
    mixed_precision: Annotated[Precision, typer.Option(help="type of weights and activations")] = Precision.FP32,
    seq_length: Annotated[int | None, typer.Option(help="tokens of a sample", min=1)] = None,
) -> None:
    """Write a plan with one strategy for all layers, by the options of Galvatron's GLOBAL mode."""
    shape = load_model(model)
    plan = uniform_plan(
        layers=shape.layers,
        world_size=world_size,
        global_train_batch_size=global_train_batch_size,
        pp_deg=pp_deg,
        global_tp_deg=global_tp_deg,
        global_tp_consec=global_tp_consec,
        sdp=sdp,
        chunks=chunks,
        global_checkpoint=global_checkpoint,
        pipeline_type=pipeline_type,
        vocab_tp=vocab_tp,
        default_dp_type=default_dp_type,
        use_ulysses=use_ulysses,
        assumed=Assumptions(sequence_parallel, mixed_precision, seq_length=seq_length),
    )
    require_valid(plan, shape)
    write_plan(plan, output)
    typer.echo(f"{output}: one strategy for the {shape.layers} layers of {shape.name} on {world_size} ranks")


@app.command("to-paddlenlp")
def to_paddlenlp(
    file: File,
    world_size: WorldSize = None,
    model: Model = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object, as run_pretrain.py reads it")] = False,
) -> None:
    """Print a plan as arguments of PaddleNLP's own run_pretrain.py. Exit code 2 where they cannot express it."""
    plan, shape = _read(file, world_size, model)
    try:
        arguments = stock_arguments(plan, shape)
    except UserError as error:
        raise UserError(f"{file}: {fault}" for fault in error.faults) from None
    for note in stock_notes(plan):
        typer.echo(f"note: {note}", err=True)
    typer.echo(json.dumps(arguments, indent=2) if as_json else "\n".join(as_flags(arguments)))


@app.command()
def schema() -> None:
    """Print the JSON Schema of the plan file."""
    typer.echo(json.dumps(json_schema(), indent=2))


def _read(file: Path, world_size: int | None, model: str | None) -> tuple[Plan, ModelShape | None]:
    plan = read_plan(file, world_size, smallest_world=True)
    shape = load_model(model) if model else None
    require_valid(plan, shape)
    return plan, shape
