"""From a Hugging Face directory to a checkpoint and back, one weight in memory at a time.

A converted checkpoint has step 0 and no moments, one file per module, and loads under any plan. The model's config.json
and tokenizer are next to it, so that a run or the reverse conversion accepts it as the model.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from ...base.buckets import in_buckets
from ...base.errors import UserError
from ...base.writing import whole_folder, write_text
from ...plan import ModelShape, Precision, load_model, plan_from_dict
from ...runtime.weights import WHOLE, Array
from .companions import companions, config_like, copy_companions, without_absent_code
from .huggingface import HuggingFaceWeights, StoredWeight, copies, modules, require_directory_of
from .loading import CheckpointWeights, WeightPiece
from .stored import INDEX, WEIGHT, Checkpoint, write_index
from .weight_files import CONFIG, SHARDS, SINGLE, Tensor, write_tensors

Advance = Callable[[int], object]  # receives the number of written bytes


def to_checkpoint(source: Path, shape: ModelShape, target: Path, advance: Advance) -> None:
    """Convert a Hugging Face directory of the model. Raises UserError, or GalvatronError for a full disk."""
    weights = HuggingFaceWeights(source, shape)
    if weights.note:
        sys.stderr.write(f"note: {weights.note}\n")
    with whole_folder(target) as folder:
        files = []
        for number, module in enumerate(modules(shape)):
            path = folder / f"module-{number:05d}.safetensors"
            tensors, stored = [], []
            for k, weight in enumerate(module):
                piece = WeightPiece(weight.name, weight.shape, WHOLE, 0, math.prod(weight.shape))
                read = partial(weights, weight.name, weight.shape)
                tensors.append(Tensor(f"{k:05d}.{WEIGHT}", (piece.stop,), read))
                stored.append({"key": f"{k:05d}", "parts": [asdict(piece) | {"offset": 0}]})
            facts = write_tensors(path, tensors, Precision.FP32, advance)
            files.append(asdict(facts) | {"tensors": stored})
        index = {
            "step": 0,
            "model": asdict(shape),
            "model_fingerprint": shape.fingerprint,
            "plan": None,
            "precision": weights.precision,  # type of the weights when converted back
            **({"precisions": weights.precisions} if weights.precisions else {}),
            "optimizer": {},
            "loss_scale": None,
            "data": None,
            "files": files,
        }
        write_index(folder, index)
        copy_companions({CONFIG: source / CONFIG, **companions(source)}, folder)
        if shape.mtp_layers != load_model(source / CONFIG).mtp_layers:
            write_text(folder / CONFIG, json.dumps(config_like(shape, source / CONFIG), indent=2) + "\n")


def to_huggingface(
    checkpoint: Checkpoint,
    target: Path,
    precision: Precision | None,
    max_shard_bytes: int,
    like: Path | None,
    advance: Advance,
) -> None:
    """Convert a checkpoint. `precision`: of all tensors; None: the original or trained precision of each. `like`: a
    Hugging Face directory with config.json and tokenizer to use instead of the checkpoint's. Raises UserError, or
    GalvatronError for a full disk."""
    folder, shape = like or checkpoint.folder, checkpoint.shape
    config = None
    try:
        if like or (folder / CONFIG).exists():
            require_directory_of(folder, shape)
            config = config_like(shape, folder / CONFIG)
    except UserError as error:
        if like:
            raise
        sys.stderr.write(f"note: {CONFIG} is written from the trained model: {error.faults[0]}\n")
    weights, config = CheckpointWeights(checkpoint), config or config_like(shape, None)
    types = (precision, {}) if precision else types_of(weights)
    stored, trained = str(config.get("torch_dtype")), types[0].dtype
    if not precision and checkpoint.index.plan and stored not in ("None", trained):
        command = "`galvatron convert g2h --dtype`"
        sys.stderr.write(f"note: tensors are in {trained}, as trained; the model came in {stored}: {command}\n")
    write_model(shape, weights, target, config, types, max_shard_bytes, companions(folder), advance)


def write_model(
    shape: ModelShape,
    weights: Callable[[str, tuple[int, ...]], Array],
    target: Path,
    config: dict[str, Any],
    types: tuple[Precision, Mapping[str, Precision]],
    max_shard_bytes: int,
    files: Mapping[str, Path],
    advance: Advance,
) -> None:
    """Write a Hugging Face directory of weights by PaddleNLP's names. `config`: see `config_like`; `types`: the main
    type, and weights with another type; `files`: see `companions`."""
    most, others = types

    def type_of(weight: StoredWeight) -> Precision:
        return Precision.FP32 if weight.state else others.get(weight.name, most)

    def read(weight: StoredWeight) -> Array:
        array = weights(weight.name, weight.shape)
        return array.T if weight.transposed else array

    every = [weight for module in (*modules(shape), copies(shape)) for weight in module]
    sizes = [math.prod(weight.shape) * type_of(weight).bytes for weight in every]
    shards = in_buckets(every, sizes, max_shard_bytes)
    with whole_folder(target) as folder:
        places: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            tensors = [Tensor(each.tensor, each.tensor_shape, partial(read, each), type_of(each)) for each in shard]
            write_tensors(folder / name, tensors, most, advance)
            places |= {weight.tensor: name for weight in shard}
        if len(shards) > 1:
            total = {"total_size": sum(sizes)}
            write_text(folder / SHARDS, json.dumps({"metadata": total, "weight_map": places}, indent=2) + "\n")
        copy_companions(files, folder)
        config = without_absent_code(config, folder) | {"torch_dtype": most.dtype}
        write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")


def types_of(weights: HuggingFaceWeights | CheckpointWeights) -> tuple[Precision, Mapping[str, Precision]]:
    """The type of most of a model's elements, and the weights with another type."""
    if isinstance(weights, HuggingFaceWeights):
        return weights.precision, weights.precisions
    return precision_of(weights.checkpoint), weights.checkpoint.index.precisions


def precision_of(checkpoint: Checkpoint) -> Precision:
    """The original or trained type of a checkpoint's model."""
    index = checkpoint.index
    if index.plan is None:
        assert index.precision is not None  # `Index` checks that one of both is set
        return index.precision
    return plan_from_dict(index.plan, source=str(checkpoint.folder / INDEX)).assumed.mixed_precision
