"""Weights on disk that training begins with."""

from __future__ import annotations

from pathlib import Path

from ...plan import ModelShape, UserError
from ...runtime.groups import world_from_environment
from ...runtime.weights import WeightSource
from .huggingface import CONFIG, HuggingFaceWeights, require_same_model
from .loading import CheckpointWeights
from .stored import INDEX, open_checkpoint, verify


def weights_from(folder: Path, shape: ModelShape) -> WeightSource:
    """The weights of a Hugging Face directory, or of a checkpoint, converted or a run's; for `Engine`'s `source`.

    Each rank reads the parts that it asks for. Before, a checkpoint's checksums are compared: each rank compares those
    of a share of the files. Raises UserError: something is broken, lacking, or of another model.
    """
    source = open_weights(folder, shape)
    if isinstance(source, CheckpointWeights):
        rank, world_size = world_from_environment()
        verify(source.checkpoint, range(rank, len(source.checkpoint.index.files), world_size))
    return source


def open_weights(folder: Path, shape: ModelShape) -> HuggingFaceWeights | CheckpointWeights:
    """The same without the checksums: what can be found wrong in a moment. Raises UserError."""
    if (folder / INDEX).exists():
        checkpoint = open_checkpoint(folder)
        require_same_model(checkpoint.shape, shape, folder / INDEX)
        return CheckpointWeights(checkpoint)
    if (folder / CONFIG).exists():
        return HuggingFaceWeights(folder, shape)
    raise UserError(f"{folder}: is neither a Hugging Face model ({CONFIG}) nor a checkpoint ({INDEX})")
