"""Checks that a profile belongs to the planned model, dtype and cluster."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from ..base import MIB, UserError
from ..model import ModelShape, load_model, measured_fingerprint, preset_names
from ..plan.precision import Precision
from .dialects import fits_layer, is_near, layer_mib
from .files import Meta, ProfileFile

_DTYPE = re.compile(r"_profiling_(fp32|bf16|fp16)(?=[_.])")
_SIZES = re.compile(r"_hidden_?(\d+)_head_?(\d+)")
_PART = re.compile(r"_(attention|mlp)(?=[_.])")
_MODEL = re.compile(r"([a-z]+)-?(\d[\d.]*)?-(\d+(?:\.\d+)?)b(?![a-z])")  # llama2-7b: family, version, billions
# Families in names of Galvatron's models, including families that are not planned here.
FAMILIES = ("llama", "qwen", "gpt", "t5", "bert", "vit", "swin", "mixtral", "moe")
_FAMILY = re.compile(rf"_profiling_(?:fp32|bf16|fp16)_({'|'.join(FAMILIES)})(?![a-z])")
FOREIGN = ", or galvatron search --allow_foreign_profiles"
FLOPS_A_MS = 1e13  # limit for a device: four times the fastest matrix units of 2025


def require_same_model(path: str | Path, meta: Meta, models: Sequence[ModelShape], precision: Precision) -> None:
    """Raise UserError if the file's fingerprint or name has other layers (`models`: one shape per layer type) or
    another dtype. The number of layers is ignored."""
    named, model = meta.fingerprint, models[0]
    expected = measured_fingerprint(models)
    faults = []
    if named.model not in (None, expected):
        faults.append(f"the profile is of model {named.model}, not of {model.name} ({expected})")
    if named.dtype not in (None, precision.value):
        faults.append(f"the profile was measured in {named.dtype}, not in {precision}")
    if (match := _DTYPE.search(Path(path).name)) and match[1] != precision.value and named.dtype is None:
        faults.append(f"the file's name says {match[1]}, but mixed_precision is {precision}")
    if named.model is None:
        faults += name_faults(path, model)
    if faults:
        raise UserError(f"{path}: {fault}; profile this model{FOREIGN}" for fault in faults)


def name_faults(path: str | Path, model: ModelShape) -> list[str]:
    """Faults of a file whose name states other layers than this model's."""
    name = Path(path).name.lower()
    if of_part := _PART.search(name):
        return [f"the file's name says that it is of {of_part[1]} alone"]
    if match := _SIZES.search(name):
        hidden, heads = int(match[1]), int(match[2])
        if (hidden, heads) != (model.hidden_size, model.heads):
            return [
                f"the file's name says hidden size {hidden} and {heads} heads, but {model.name} has "
                f"{model.hidden_size} and {model.heads}"
            ]
        return []
    if other := _another_model(name, model):
        return [f"the file's name says {other}, but the model is {model.name}"]
    return []


def _another_model(name: str, model: ModelShape) -> str | None:
    """The model in a name, if it is another: of another family, other layers, or another size."""
    for preset in preset_names():
        if re.search(rf"_{re.escape(preset)}(?![\da-z])", name):
            return None if _layer(_preset(preset)) == _layer(model) else preset
    family = _FAMILY.search(name)
    if family and family[1] != model.traits.line:
        return family[1]
    named, this_model = _MODEL.search(name), _MODEL.search(model.name.lower())
    if named and this_model and named[1] in FAMILIES and named[3] != this_model[3]:
        return named[0]
    return None


def _layer(model: ModelShape) -> tuple[int, ...]:
    return (model.hidden_size, model.intermediate_size, model.heads, model.kv_heads, model.head_dim)


@cache
def _preset(name: str) -> ModelShape:
    return load_model(name)


def require_same_device(files: Iterable[ProfileFile]) -> None:
    """Raise UserError if the files were measured on devices of different names."""
    devices = {file.path: file.fingerprint.device for file in files if file.fingerprint.device}
    if len(set(devices.values())) > 1:
        named = ", ".join(f"{path} on {device}" for path, device in devices.items())
        raise UserError(f"profiles of different devices: {named}; profile on one{FOREIGN}")


def require_parameter_size(path: str | Path, parameter_mib: float, model: ModelShape) -> None:
    """Raise UserError unless a layer's weights (MiB at 4 bytes each) are the model's."""
    if not fits_layer(parameter_mib, model):
        raise UserError(
            f"{path}: parameter_size: {parameter_mib:.1f} MiB of fp32 weights a layer, but a layer of {model.name} has "
            f"{layer_mib(model):.1f}; profile this model, or galvatron search --profile_dialect{FOREIGN}"
        )


def kv_heads_note(path: str | Path, parameter_mib: float, model: ModelShape) -> Iterator[str]:
    """A note about a layer that was measured with as many kv heads as heads."""
    if not is_near(parameter_mib, layer_mib(model)):
        yield (
            f"{path}: a layer has {parameter_mib:.1f} MiB of fp32 weights, as {model.name} would with {model.heads} kv "
            f"heads instead of {model.kv_heads}: measured so, and priced so"
        )


def require_vocab_states(path: str | Path, states_mib: Mapping[str, float], models: Sequence[ModelShape]) -> None:
    """Raise UserError unless the vocabulary layers' weights at degree 1 (MiB at 16 bytes each) are the model's.

    `states_mib`: by role of the stage. From four fifths to five quarters and 640 MiB: published ones are up to 512 MiB
    above their weights, for any model. A model that ties its tables may have been measured with two.
    """
    first, last = (model.embedding.parameters * 16 / MIB for model in (models[0], models[-1]))
    tied = models[0].tied_embeddings
    expected = {"only": (last if tied else first + last, first + last), "first": (first, first), "last": (last, last)}
    faults = []
    for role, measured in states_mib.items():
        least, most = expected[role]
        if not 0.8 * least <= measured <= 1.25 * most + 640:
            faults.append(
                f"{path}: model_states: {measured:.0f} MiB for the vocabulary layers ({role} stage), but "
                f"{models[0].name} with {models[0].vocab_size} words has {least:.0f}; "
                f"profile this model{FOREIGN}"
            )
    if faults:
        raise UserError(faults)


def require_possible_times(path: str | Path, sample_ms: Mapping[int, float], models: Sequence[ModelShape]) -> None:
    """Raise UserError if a layer is faster than any device. `sample_ms`: layer type -> the least ms a token."""
    for layer_type, ms in sample_ms.items():
        flops = 2 * models[min(layer_type, len(models) - 1)].layer_parameters
        if flops > ms * FLOPS_A_MS:
            raise UserError(
                f"{path}: layertype_{layer_type}: {ms:.3g} ms a token is {flops / ms / 1e12:,.0f} PFLOP/s, more than "
                f"any device does; are these seconds? write ms{FOREIGN}"
            )
