"""The trained model as a Hugging Face directory, written by all ranks together in the midst of a run."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ...base.writing import UNFINISHED, move, to_disk
from ...plan import GalvatronError
from ...runtime.engine import Engine
from .adapters import write_adapters
from .convert import precision_of, to_huggingface
from .huggingface import CONFIG, SHARDS
from .loading import gather_objects
from .saving import Writer
from .stored import open_checkpoint, whole_checkpoints

MAX_SHARD_BYTES = 5 * 2**30  # as transformers writes them
WEIGHTS_ALONE = SimpleNamespace(state_dict=dict)  # an optimizer without moments


def save_model(engine: Engine, target: Path, like: Path | None, tokenizer: Any = None) -> None:
    """Write the whole model's weights into a folder that all ranks share; every rank calls it.

    They go through a checkpoint beside the folder, so that no rank holds more than one weight whole. The folder keeps
    its other files, but no older weights. `like`: a folder of the model with config.json and tokenizer. Raises
    GalvatronError on every rank.
    """
    target = target.absolute()
    part = target.with_name(f".{target.name}.save_model{UNFINISHED}")
    fault = ""
    try:
        if engine.rank == 0:
            shutil.rmtree(part, ignore_errors=True)  # left by a killed run
        writer = Writer(part / "checkpoint", engine, keep=1)
        writer.save(WEIGHTS_ALONE)
        writer.finish()
        if engine.rank == 0:
            checkpoint = open_checkpoint(whole_checkpoints(part / "checkpoint")[0])
            model = part / "model"
            if checkpoint.index.adapters:
                write_adapters(checkpoint, model)
            else:
                to_huggingface(checkpoint, model, precision_of(checkpoint), MAX_SHARD_BYTES, like, lambda _: None)
            if tokenizer is not None:
                tokenizer.save_pretrained(str(model))
            _move(model, target)
    except (GalvatronError, OSError) as error:
        fault = str(error)
    faults = sorted(set(gather_objects(engine, fault)) - {""})
    if engine.rank == 0:
        shutil.rmtree(part, ignore_errors=True)
    if faults:
        raise GalvatronError(f"save_model: {'; '.join(faults)}")


def _move(model: Path, target: Path) -> None:
    """Give a whole folder its name, or put its files in place of those of the folder that has it, config.json last."""
    if not target.exists():
        move(model, target)
        return
    new = sorted(model.iterdir(), key=lambda file: file.name == CONFIG)
    names = {file.name for file in new}
    stale = [file for file in (*target.glob("model*.safetensors"), target / SHARDS) if file.name not in names]
    for file in new:
        file.replace(target / file.name)
    for file in stale:
        file.unlink(missing_ok=True)
    to_disk(target)
