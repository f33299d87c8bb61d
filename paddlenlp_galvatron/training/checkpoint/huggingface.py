"""Weights in a Hugging Face directory: mapping tensors to PaddleNLP's weights, and reading parts of them.

    model/
      config.json
      model.safetensors                                      all tensors, or
      model-00001-of-00002.safetensors …                     parts of them and
      model.safetensors.index.json                           which file has which tensor

The two differ in names (`model.` for PaddleNLP's family name) and in that PaddleNLP's linear layers keep weights
[in, out], Hugging Face's [out, in]. Directories saved by PaddleNLP, with its names and layout, are also read.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from ...base.errors import UserError
from ...model import Weight
from ...model.shape import UNPLANNED
from ...model.unsupported import MTP_COUNTS
from ...plan import ModelShape, Precision, load_model
from ...runtime.weights import WHOLE, Array, Slice
from .weight_files import (
    CONFIG,
    LM_HEAD,
    opened,
    require_finite,
    require_plain,
    require_unwrapped,
    tensor_files,
    without_absent_mtp,
)

ROWS = 4096  # rows of a matrix compared at once
FREE = (*UNPLANNED, "initializer_range", "max_position_embeddings", "seq_length")


@dataclass(frozen=True)
class StoredWeight:
    """A weight of a whole model under both names."""

    name: str  # PaddleNLP's
    shape: tuple[int, ...]  # PaddleNLP's
    tensor: str  # Hugging Face's name
    transposed: bool
    state: bool = False  # fp32, also among 16-bit weights

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        return self.shape[::-1] if self.transposed else self.shape


Module = tuple[StoredWeight, ...]


def modules(shape: ModelShape) -> Iterator[Module]:
    """The weights of embedding, each decoder layer, and head."""

    def module(weights: Sequence[Weight], prefix: str = "") -> Module:
        ours, theirs = f"{shape.traits.prefix}.{prefix}", f"model.{prefix}"
        return tuple(stored(weight, ours, theirs) for weight in weights)

    def stored(weight: Weight, ours: str = "", theirs: str = "") -> StoredWeight:
        names = ours + weight.name, weight.shape, theirs + weight.name
        return StoredWeight(*names, transposed=weight.linear, state=weight.state)

    yield module(shape.embedding.weights)
    for index in range(shape.layers):
        yield module(shape.of(index).layer.weights, f"layers.{index}.")
    norm, lm_head, *bias = shape.head.weights
    yield (*module([norm]), *(stored(weight) for weight in (*(() if shape.tied_embeddings else (lm_head,)), *bias)))


def copies(shape: ModelShape) -> list[StoredWeight]:
    """Embedding and LM head again, as stored for MTP layers in Hugging Face directories."""
    if not shape.mtp_layers:
        return []
    [embedding], *_, (*_, head) = modules(shape)
    prefix, tied = f"model.layers.{shape.main_layers}.", shape.tied_embeddings
    return [
        replace(embedding, tensor=f"{prefix}embed_tokens.weight"),
        replace(embedding if tied else head, tensor=f"{prefix}shared_head.head.weight"),
    ]


class HuggingFaceWeights:
    """The weights of a directory, as a `runtime.weights.WeightSource`: only requested weights are read, as fp32."""

    def __init__(self, folder: Path, shape: ModelShape):
        """Raises UserError if files are missing or broken, tensors are missing, unknown or of another shape, or the
        directory holds another model."""
        require_directory_of(folder, shape)
        files, weights = tensor_files(folder), [weight for module in modules(shape) for weight in module]
        if weights[0].name in files:  # PaddleNLP saved it
            weights = [replace(weight, tensor=weight.name, transposed=False) for weight in weights]
        self._weights = {weight.name: weight for weight in weights}
        expected = {weight.tensor: weight for weight in weights}
        missing = [tensor for tensor in expected if tensor not in files]
        equal = {copy.tensor: self._weights[copy.name].tensor for copy in copies(shape) if copy.tensor in files}
        if shape.tied_embeddings and LM_HEAD in files:
            equal[LM_HEAD] = weights[0].tensor
        unknown = [tensor for tensor in files if tensor not in expected and tensor not in equal]
        self.left_out = [tensor for tensor in unknown if _predicts_more(tensor, shape)]
        unknown = [tensor for tensor in unknown if tensor not in self.left_out]
        require_plain(unknown, folder)
        if missing:
            require_unwrapped(unknown, missing[0], folder)
        if missing or unknown:
            untied = ", as tie_word_embeddings is false; if it is the embedding, write true there"
            hint = untied if missing == [LM_HEAD] else ""
            if shape.mtp_layers and missing and f".layers.{shape.main_layers}." in missing[0]:
                hint = f"; to train without MTP: --{MTP_COUNTS[0]} 0"
            raise UserError(
                [f"{folder}: lacks tensor {lacking}, which its {CONFIG} asks for{hint}" for lacking in _some(missing)]
                + [f"{folder}: has tensor {lacking}, which no {shape.family} has" for lacking in _some(unknown)]
            )
        self.files = sorted(set(files.values()))
        self._files = {tensor: files[tensor] for tensor in expected}
        types = _precisions(self._files, expected)
        numbers: Counter[Precision] = Counter()
        for name, precision in types.items():
            numbers[precision] += math.prod(self._weights[name].shape)
        self.precision = numbers.most_common(1)[0][0]  # precision of most numbers
        self.precisions = {name: precision for name, precision in types.items() if precision != self.precision}
        for tensor, original in equal.items():
            _require_equal(files, tensor, original)

    def __call__(self, name: str, shape: tuple[int, ...], rank_slice: Slice = WHOLE) -> Array:
        """Raises UserError: the tensor cannot be read."""
        weight = self._weights[name]
        real = []  # ids beyond the vocabulary are padding
        for axis, length in enumerate(shape):
            start, stop = rank_slice.interval(axis, length)
            real.append(slice(start, min(stop, length)) if start < length else slice(0))
        with opened(self._files[weight.tensor]) as file:
            stored = file.get_slice(weight.tensor)[tuple(real[::-1] if weight.transposed else real)]
        require_finite(stored, self._files[weight.tensor], weight.tensor)
        array: Array = np.ascontiguousarray(stored.T if weight.transposed else stored, np.float32)
        return rank_slice.pad(array, shape)

    @property
    def note(self) -> str:
        """A note on skipped tensors; "": none."""
        if not self.left_out:
            return ""
        return f"MTP is left out ({MTP_COUNTS[0]} 0): {len(self.left_out)} tensors such as {self.left_out[0]}"


def read_shape(folder: Path) -> ModelShape:
    """The model in a directory. Raises UserError if it has an unsupported feature."""
    return without_absent_mtp(load_model(folder.absolute() / CONFIG).trained(), folder)


def require_same_model(stored: ModelShape, wanted: ModelShape, where: Path) -> None:
    """Raise UserError unless both models have the same weights and computation."""
    has, wants = asdict(stored), asdict(wanted)
    faults = [
        f"{where}: {field} is {has[field]}, but {wants[field]} in the model {wanted.name}"
        for field in wants
        if field not in FREE and has[field] != wants[field]
    ]
    if faults:
        raise UserError(faults)


def require_directory_of(folder: Path, shape: ModelShape) -> None:
    """Raise UserError unless a directory is of the model, with MTP or without."""
    stored = read_shape(folder)
    require_same_model(stored.having(stored.main_layers, shape.mtp_layers), shape, folder / CONFIG)


def _predicts_more(tensor: str, shape: ModelShape) -> bool:
    """Whether a tensor belongs to MTP: to a layer after the last, or in ERNIE to separate modules."""
    number, mixture = re.match(r"model\.(?:layers\.(\d+)\.|mtp_)", tensor), shape.traits.mixture
    return bool(mixture and mixture.bias and number and int(number[1] or shape.layers) >= shape.layers)


def _some(tensors: Sequence[str]) -> list[str]:
    """The first tensor and the number of others, in words; "" for none."""
    more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    return [f"{tensor}{more}" for tensor in tensors[:1]]


def _require_equal(files: dict[str, Path], copy: str, original: str) -> None:
    """Raise UserError for an LM head that is not the embedding, though the model ties them, and for tables of MTP that
    are not the model's. transformers keeps both heads; here config.json decides the planned and trained model."""
    with opened(files[original]) as first, opened(files[copy]) as second:
        tied, head = first.get_slice(original), second.get_slice(copy)
        rows, _ = shape = tied.get_shape()
        blocks = (slice(row, min(row + ROWS, rows)) for row in range(0, rows, ROWS))
        same = head.get_shape() == shape and all(np.array_equal(tied[block], head[block]) for block in blocks)
    if not same:
        whose = "the embedding" if copy == LM_HEAD else original
        field = "tie_word_embeddings: false" if copy == LM_HEAD else f"{MTP_COUNTS[0]}: 0"
        raise UserError(
            f"{files[copy]}: {copy} is not {whose}, which {CONFIG} says it is; write {field} there, or remove the "
            "tensor"
        )


def _precisions(files: dict[str, Path], expected: dict[str, StoredWeight]) -> dict[str, Precision]:
    """The type of each weight that is not always fp32. Raises UserError for a wrong shape or type."""
    by_code = {precision.code: precision for precision in Precision}
    types = {}
    for path in sorted(set(files.values())):
        with opened(path) as file:
            for tensor in (tensor for tensor in expected if files[tensor] == path):
                stored = file.get_slice(tensor)
                size, wanted = tuple(stored.get_shape()), expected[tensor].tensor_shape
                if size != wanted:
                    raise UserError(f"{path}: tensor {tensor} has shape {size} instead of {wanted}")
                if stored.get_dtype() not in by_code:
                    raise UserError(
                        f"{path}: tensor {tensor} is of type {stored.get_dtype()}; supported: {', '.join(by_code)}; if "
                        "the model is quantised, take the one that it was made from"
                    )
                if not expected[tensor].state:
                    types[expected[tensor].name] = by_code[stored.get_dtype()]
    return types
