"""`galvatron convert`: Hugging Face models to checkpoints and back."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from paddlenlp_galvatron.base.limits import Count
from paddlenlp_galvatron.base.printing import Bars
from paddlenlp_galvatron.model import FAMILIES
from paddlenlp_galvatron.plan import ModelShape, Precision, UserError

from .conventions import App, Json, answer, within

app = App(help="Turn Hugging Face models into checkpoints, and checkpoints into Hugging Face models.")

MIB = 2**20

Input = Annotated[Path, typer.Argument(metavar="INPUT", help="folder to read")]
Output = Annotated[Path, typer.Argument(metavar="OUTPUT", help="folder to write; it is written whole or not at all")]
ANOTHER = f"refuse a model of any other family: {', '.join(FAMILIES)}, or qwen for any Qwen"
Only = Annotated[str | None, typer.Option("--family", help=ANOTHER)]


@app.command()
def h2g(input: Input, output: Output, family: Only = None, as_json: Json = False) -> None:
    """Convert a Hugging Face model (safetensors) to a checkpoint that loads under any plan."""
    _require_folder(input, "a Hugging Face model")
    from paddlenlp_galvatron.training.checkpoint.convert import to_checkpoint
    from paddlenlp_galvatron.training.checkpoint.huggingface import read_shape

    begin = time.monotonic()
    shape = read_shape(input)
    _require_family(shape, family, input)
    with Bars(in_bytes=True) as progress:
        task = progress.add_task("converting", total=shape.parameters * Precision.FP32.bytes)
        to_checkpoint(input, shape, output, lambda written: progress.advance(task, written))
    _report(output, shape, Precision.FP32, begin, as_json)


@app.command()
def g2h(
    input: Input,
    output: Output,
    family: Only = None,
    load_iteration: Annotated[
        int | None,
        typer.Option(
            min=0, help="step whose checkpoint is converted, if INPUT is the folder of a run; unset: the newest"
        ),
    ] = None,
    dtype: Annotated[
        Precision | None,
        typer.Option(help="number type of the tensors; unset: the type in which the model was given or trained"),
    ] = None,
    max_shard_mib: Annotated[
        int,
        typer.Option(parser=within(Count), help="largest size of a file, MiB; only a single larger tensor exceeds it"),
    ] = 5120,
    like: Annotated[
        Path | None,
        typer.Option(help="Hugging Face model from which config.json and tokenizer are copied; unset: INPUT"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Convert a checkpoint, either a converted one or one of a run, to a Hugging Face model, or LoRA's to adapters."""
    _require_folder(input, "a run or of a checkpoint")
    from paddlenlp_galvatron.training.checkpoint.adapters import write_adapters
    from paddlenlp_galvatron.training.checkpoint.convert import precision_of, to_huggingface
    from paddlenlp_galvatron.training.checkpoint.stored import open_checkpoint, verify

    from ..training.checkpoint.stored import checkpoint_of

    begin = time.monotonic()
    checkpoint = open_checkpoint(checkpoint_of(input, load_iteration))
    shape, precision = checkpoint.shape, dtype or precision_of(checkpoint)
    _require_family(shape, family, input)
    adapters = checkpoint.index.adapters
    with Bars(in_bytes=True) as progress:
        task = progress.add_task("checking", total=sum(file.bytes for file in checkpoint.index.files))
        verify(checkpoint, advance=lambda read: progress.advance(task, read))
        if adapters:
            write_adapters(checkpoint, output)
            text = f"{output}: adapters of rank {adapters.rank}, as PEFT and PaddleNLP read them"
            answer(text, as_json, output=output, lora_rank=adapters.rank)
            return
        progress.reset(task, description="converting", total=shape.parameters * precision.bytes)
        to_huggingface(
            checkpoint, output, precision, max_shard_mib * MIB, like, lambda written: progress.advance(task, written)
        )
    _report(output, shape, precision, begin, as_json)


@app.command()
def merge(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="Hugging Face model that the adapters were trained on")],
    adapters: Annotated[
        Path, typer.Argument(metavar="ADAPTERS", help="PEFT's or PaddleNLP's folder, a run's, or a checkpoint")
    ],
    output: Output,
    max_shard_mib: Annotated[
        int,
        typer.Option(parser=within(Count), help="largest size of a file, MiB; only a single larger tensor exceeds it"),
    ] = 5120,
    as_json: Json = False,
) -> None:
    """Add LoRA's adapters to the weights of their base, and write a Hugging Face model."""
    _require_folder(base, "a Hugging Face model")
    _require_folder(adapters, "adapters")
    from paddlenlp_galvatron.training.checkpoint import adapters as stored
    from paddlenlp_galvatron.training.checkpoint.huggingface import HuggingFaceWeights, read_shape

    from ..training.checkpoint.stored import checkpoint_of

    begin, shape = time.monotonic(), read_shape(base)
    precision = HuggingFaceWeights(base, shape).precision
    has_config = any((adapters / name).exists() for name in (stored.PEFT_CONFIG, stored.CONFIG))
    found = adapters if has_config else checkpoint_of(adapters, None)
    stored.merge(base, found, shape, output, precision, max_shard_mib * MIB, lambda _: None)
    _report(output, shape, precision, begin, as_json)


def _require_folder(input: Path, of: str) -> None:
    """Before anything slow is imported."""
    if not input.is_dir():
        raise UserError(f"{input}: no such folder; name that of {of}")


def _require_family(shape: ModelShape, family: str | None, folder: Path) -> None:
    if family not in (None, shape.family, shape.traits.line):
        raise UserError(f"{folder}: holds a {shape.family}, but --family says {family}; leave the option out")


def _report(output: Path, shape: ModelShape, precision: Precision, begin: float, as_json: bool) -> None:
    seconds = time.monotonic() - begin
    answer(
        f"{output}: {shape.family}, {shape.layers} layers, {shape.parameters} weights in {precision}, "
        f"in {seconds:.1f} s",
        as_json,
        output=output,
        family=shape.family,
        layers=shape.layers,
        weights=shape.parameters,
        dtype=precision,
        seconds=round(seconds, 2),
    )
