"""`galvatron convert`: Hugging Face models to checkpoints and back."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from paddlenlp_galvatron.base.limits import Count
from paddlenlp_galvatron.base.printing import Bars, say
from paddlenlp_galvatron.model import FAMILIES
from paddlenlp_galvatron.plan import ModelShape, Precision, UserError

from .conventions import App, within

app = App(help="Turn Hugging Face models into checkpoints, and checkpoints into Hugging Face models.")

MIB = 2**20

Input = Annotated[Path, typer.Argument(metavar="INPUT", help="folder that is read")]
Output = Annotated[Path, typer.Argument(metavar="OUTPUT", help="folder that is written, whole or not at all")]
ANOTHER = f"refuse models of another family than this: {', '.join(FAMILIES)}, or qwen for any of its"
Only = Annotated[str | None, typer.Option("--family", help=ANOTHER)]


@app.command()
def h2g(input: Input, output: Output, family: Only = None) -> None:
    """Convert a Hugging Face model (safetensors) to a checkpoint that loads under any plan."""
    from paddlenlp_galvatron.checkpoint.convert import to_checkpoint
    from paddlenlp_galvatron.checkpoint.huggingface import read_shape

    begin = time.monotonic()
    shape = read_shape(input)
    _require_family(shape, family, input)
    with Bars(in_bytes=True) as progress:
        task = progress.add_task("converting", total=shape.parameters * Precision.FP32.bytes)
        to_checkpoint(input, shape, output, lambda written: progress.advance(task, written))
    _report(output, shape, Precision.FP32, begin)


@app.command()
def g2h(
    input: Input,
    output: Output,
    family: Only = None,
    load_iteration: Annotated[
        int | None, typer.Option(min=0, help="step of the checkpoint where INPUT is a run's folder; absent: the newest")
    ] = None,
    dtype: Annotated[
        Precision | None, typer.Option(help="type of the tensors; absent: the one that the model came or trained in")
    ] = None,
    max_shard_mib: Annotated[
        int, typer.Option(parser=within(Count), help="size of a file, if one tensor is not larger")
    ] = 5120,
    like: Annotated[
        Path | None,
        typer.Option(help="Hugging Face model whose config.json and tokenizer are copied; absent: those of INPUT"),
    ] = None,
) -> None:
    """Convert a checkpoint, a converted or a run's, to a Hugging Face model."""
    from paddlenlp_galvatron.checkpoint.choice import checkpoint_of
    from paddlenlp_galvatron.checkpoint.convert import precision_of, to_huggingface
    from paddlenlp_galvatron.checkpoint.stored import open_checkpoint, verify

    begin = time.monotonic()
    checkpoint = open_checkpoint(checkpoint_of(input, load_iteration))
    shape, precision = checkpoint.shape, dtype or precision_of(checkpoint)
    _require_family(shape, family, input)
    with Bars(in_bytes=True) as progress:
        task = progress.add_task("checking", total=sum(file.bytes for file in checkpoint.index.files))
        verify(checkpoint, advance=lambda read: progress.advance(task, read))
        progress.reset(task, description="converting", total=shape.parameters * precision.bytes)
        to_huggingface(
            checkpoint, output, precision, max_shard_mib * MIB, like, lambda written: progress.advance(task, written)
        )
    _report(output, shape, precision, begin)


def _require_family(shape: ModelShape, family: str | None, folder: Path) -> None:
    if family not in (None, shape.family, shape.traits.line):
        raise UserError(f"{folder}: is a {shape.family}, and {family} was asked for")


def _report(output: Path, shape: ModelShape, precision: Precision, begin: float) -> None:
    say(
        f"{output}: {shape.family}, {shape.layers} layers, {shape.parameters} weights in {precision}, "
        f"in {time.monotonic() - begin:.1f} s"
    )
