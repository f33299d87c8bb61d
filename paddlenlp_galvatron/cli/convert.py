"""`galvatron convert`: Hugging Face models to checkpoints and back."""

import sys
import time
from pathlib import Path
from typing import Any

from pydantic import Field

from paddlenlp_galvatron.base import MIB, UserError
from paddlenlp_galvatron.base.limits import Count
from paddlenlp_galvatron.base.printing import Bars
from paddlenlp_galvatron.base.writing import require_absent
from paddlenlp_galvatron.options.group import Options
from paddlenlp_galvatron.plan import ModelShape, Precision

from .command import App, answer, say_note

app = App("Turn Hugging Face models into checkpoints, and checkpoints into Hugging Face models.")

FROM_TO = {"input": "INPUT", "output": "OUTPUT"}


class ModelFolders(Options):
    """A model and the folder of the converted model."""

    input: Path
    output: Path
    family: str | None = None


class HuggingFaceOptions(ModelFolders):
    """The Hugging Face model to write."""

    load_iteration: int | None = Field(None, ge=0)
    dtype: Precision | None = None
    max_shard_mib: Count = 5120
    like: Path | None = None


class MergeOptions(Options):
    """A base model, its adapters, and the merged model."""

    base: Path
    adapters: Path
    output: Path
    max_shard_mib: Count = 5120


@app.command(ModelFolders, positional=FROM_TO)
def h2g(values: dict[str, Any], json: bool) -> None:
    """Convert a Hugging Face model (safetensors) to a checkpoint that loads under any plan."""
    args = ModelFolders.from_values(values)
    _require_folder(args.input, "a Hugging Face model")
    require_absent(args.output)
    from paddlenlp_galvatron.training.checkpoint.convert import to_checkpoint
    from paddlenlp_galvatron.training.checkpoint.huggingface import read_shape

    begin, shape = time.monotonic(), read_shape(args.input)
    _require_family(shape, args)
    with Bars(in_bytes=True) as progress:
        task = progress.add_task("converting", total=shape.parameters * Precision.FP32.bytes)
        to_checkpoint(args.input, shape, args.output, lambda written: progress.advance(task, written))
    _report(args.output, shape, Precision.FP32, begin, json)


@app.command(HuggingFaceOptions, positional=FROM_TO)
def g2h(values: dict[str, Any], json: bool) -> None:
    """Convert a checkpoint of a run, or a converted one, to a Hugging Face model; a LoRA checkpoint to adapters."""
    args = HuggingFaceOptions.from_values(values)
    output = args.output
    _require_folder(args.input, "a run or of a checkpoint")
    require_absent(output)
    from paddlenlp_galvatron.training.checkpoint.adapters import write_adapters
    from paddlenlp_galvatron.training.checkpoint.companions import unlike_companions
    from paddlenlp_galvatron.training.checkpoint.convert import precision_of, to_huggingface
    from paddlenlp_galvatron.training.checkpoint.stored import checkpoint_of, open_checkpoint, verify

    begin = time.monotonic()
    checkpoint = open_checkpoint(checkpoint_of(args.input, args.load_iteration))
    shape, precision = checkpoint.shape, args.dtype or precision_of(checkpoint)
    _require_family(shape, args)
    adapters = checkpoint.index.adapters
    if adapters and args.dtype and args.dtype.mixed:
        raise UserError(f"dtype: {args.dtype}, but adapters are written in fp32, as they are trained; leave it out")
    if args.like and (changed := unlike_companions(checkpoint.folder, args.like)):
        say_note(f"{', '.join(changed)}: taken from {args.like}, not as the run used them")
    with Bars(in_bytes=True) as progress:
        task = progress.add_task("checking", total=sum(file.bytes for file in checkpoint.index.files))

        def advance(count: int) -> None:
            progress.advance(task, count)

        verify(checkpoint, advance=advance)
        if adapters:
            write_adapters(checkpoint, output, args.like)
            text = f"{output}: adapters of rank {adapters.rank}, as PEFT and PaddleNLP read them"
            answer(text, json, output=output, lora_rank=adapters.rank)
            return
        progress.reset(task, description="converting", total=shape.parameters * precision.bytes)
        to_huggingface(checkpoint, output, args.dtype, args.max_shard_mib * MIB, args.like, advance)
    _report(output, shape, precision, begin, json)


@app.command(MergeOptions, positional={"base": "BASE", "adapters": "ADAPTERS", "output": "OUTPUT"})
def merge(values: dict[str, Any], json: bool) -> None:
    """Add LoRA's adapters to the weights of their base, and write a Hugging Face model."""
    args = MergeOptions.from_values(values)
    _require_folder(args.base, "a Hugging Face model")
    _require_folder(args.adapters, "adapters")
    require_absent(args.output)
    from paddlenlp_galvatron.training.checkpoint import adapters as stored
    from paddlenlp_galvatron.training.checkpoint.huggingface import HuggingFaceWeights, read_shape
    from paddlenlp_galvatron.training.checkpoint.stored import checkpoint_of

    begin, shape = time.monotonic(), read_shape(args.base)
    has_config = any((args.adapters / name).exists() for name in (stored.PEFT_CONFIG, stored.CONFIG))
    adapters = args.adapters if has_config else checkpoint_of(args.adapters, None)
    for note in stored.merge(args.base, adapters, shape, args.output, args.max_shard_mib * MIB, lambda _: None):
        sys.stderr.write(f"note: {note}\n")
    _report(args.output, shape, HuggingFaceWeights(args.output, shape).precision, begin, json)


def _require_folder(input: Path, of: str) -> None:
    """Check the folders before slow imports."""
    if not input.is_dir():
        raise UserError(f"{input}: no such folder; name that of {of}")


def _require_family(shape: ModelShape, args: ModelFolders) -> None:
    if args.family not in (None, shape.family, shape.traits.line):
        raise UserError(f"{args.input}: holds a {shape.family}, but --family says {args.family}; leave the option out")


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
