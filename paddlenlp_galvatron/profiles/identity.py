"""Whether a profile belongs to the model, the dtype and the cluster that are planned for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..base.errors import UserError
from ..plan.model import ModelShape, measured_fingerprint
from ..plan.strategy import Precision
from .files import Meta, ProfileFile

_NAME = re.compile(r"_profiling_(fp32|bf16|fp16)_(?:hidden_(\d+)_head_(\d+))?")


def require_same_model(path: str | Path, meta: Meta, models: Sequence[ModelShape], precision: Precision) -> None:
    """Raise UserError if the file's fingerprint or name says that it is of other layers (`models`: one shape a layer
    type) or another dtype. The number of layers is no matter."""
    told, model = meta.fingerprint, models[0]
    expected = measured_fingerprint(models)
    faults = []
    if told.model not in (None, expected):
        faults.append(f"the profile is of model {told.model}, not of {model.name} ({expected})")
    if told.dtype not in (None, precision.value):
        faults.append(f"the profile was measured in {told.dtype}, not in {precision}")
    if match := _NAME.search(Path(path).name):
        dtype, hidden, heads = match.groups()
        if dtype != precision.value and told.dtype is None:
            faults.append(f"the file's name says {dtype}, but mixed_precision is {precision}")
        if hidden and (int(hidden), int(heads)) != (model.hidden_size, model.heads):
            faults.append(
                f"the file's name says hidden size {hidden} and {heads} heads, but {model.name} has "
                f"{model.hidden_size} and {model.heads}"
            )
    if faults:
        raise UserError(f"{path}: {fault}; profile this model or pass --allow_foreign_profiles" for fault in faults)


def require_same_device(files: Iterable[ProfileFile]) -> None:
    """Raise UserError if the files were measured on devices of different names."""
    devices = {file.path: file.fingerprint.device for file in files if file.fingerprint.device}
    if len(set(devices.values())) > 1:
        told = ", ".join(f"{path} on {device}" for path, device in devices.items())
        raise UserError(f"profiles of different devices: {told}; profile on one, or pass --allow_foreign_profiles")


def require_parameter_size(path: str | Path, parameter_mib: float, model: ModelShape) -> None:
    """Raise UserError unless a layer's weights (MiB at 4 bytes each) are the model's within a quarter.

    A quarter: allocators round up, and Megatron-SP measurements include small buffers; another model or the wrong
    dialect is off by more.
    """
    expected = model.layer_parameters * 4 / 2**20
    if not 0.75 <= parameter_mib / expected <= 1.25:
        raise UserError(
            f"{path}: parameter_size: {parameter_mib:.1f} MiB of fp32 weights a layer, but a layer of {model.name} has "
            f"{expected:.1f}; profile this model, correct --profile_dialect, or pass --allow_foreign_profiles"
        )
