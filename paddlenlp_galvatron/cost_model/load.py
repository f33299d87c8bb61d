"""From a folder of profile files (or their paths) to a cost model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from ..base.errors import UserError
from ..plan.model import ModelShape
from ..plan.strategy import Assumptions
from ..profiles.computation import ComputationProfile
from ..profiles.compute_time import ComputeTimes, TimeMode
from ..profiles.files import Dialect, computation_name, memory_name
from ..profiles.hardware import HardwareProfile
from ..profiles.identity import require_parameter_size, require_same_device, require_same_model
from ..profiles.memory import MemoryProfile
from ..profiles.memory_use import MemoryMode, MemoryUse
from ..profiles.network import Network
from .costs import CostOptions
from .model import CostModel

Mode = TypeVar("Mode", TimeMode, MemoryMode)


def load(
    model: ModelShape | Sequence[ModelShape],
    num_nodes: int,
    gpus_per_node: int,
    assumed: Assumptions,
    *,
    folder: str | Path | None = None,
    time_profiling_path: str | Path | None = None,
    memory_profiling_path: str | Path | None = None,
    allreduce_bandwidth_config_path: str | Path | None = None,
    p2p_bandwidth_config_path: str | Path | None = None,
    overlap_coe_path: str | Path | None = None,
    sp_time_path: str | Path | None = None,
    time_profile_mode: str = "static",
    memory_profile_mode: str = "static",
    profile_dialect: Dialect | None = None,
    allow_foreign_profiles: bool = False,
    options: CostOptions = CostOptions(),
) -> CostModel:
    """Cost model from profile files: those named by a path (or its folder), the rest by their documented names from
    `folder`.

    Raises UserError: a file is missing, broken, or another model's (unless `allow_foreign_profiles`).
    """
    shapes = (model,) if isinstance(model, ModelShape) else tuple(model)
    shape, precision = shapes[0], assumed.mixed_precision
    documented = (precision.value, shape.hidden_size, shape.heads)
    time_path = _place(time_profiling_path, folder, computation_name(*documented), "time_profiling_path")
    memory_path = _place(memory_profiling_path, folder, memory_name(*documented), "memory_profiling_path")
    hardware = HardwareProfile.load(
        num_nodes,
        gpus_per_node,
        folder=folder,
        allreduce_path=allreduce_bandwidth_config_path,
        p2p_path=p2p_bandwidth_config_path,
        overlap_path=overlap_coe_path,
        sp_time_path=sp_time_path,
    )
    computation = ComputationProfile.load(time_path, *documented)
    memory = MemoryProfile.load(memory_path, *documented, dialect=profile_dialect)
    use = MemoryUse(memory, _mode(MemoryMode, memory_profile_mode, "memory_profile_mode"))
    if not allow_foreign_profiles:
        require_same_device([*hardware.files, *computation.files, *memory.files])
        require_same_model(time_path, computation.meta, shapes, precision)
        require_same_model(memory_path, memory.meta, shapes, precision)
        for layer_type, kind in enumerate(shapes):
            require_parameter_size(memory_path, use.parameter_mib(layer_type), kind)
    return CostModel(
        model,
        network=Network(hardware),
        times=ComputeTimes(computation, _mode(TimeMode, time_profile_mode, "time_profile_mode")),
        memory=use,
        num_nodes=num_nodes,
        gpus_per_node=gpus_per_node,
        assumed=assumed,
        options=options,
    )


def _mode(kind: type[Mode], value: str, name: str) -> Mode:
    try:
        return kind(value)
    except ValueError:
        raise UserError(f"{name}: {value!r} is unknown; choose one of {', '.join(kind)}") from None


def _place(path: str | Path | None, folder: str | Path | None, name: str, option: str) -> Path:
    """The file named, or the documented one in the folder, or the folder's only one of its kind and dtype."""
    if path is not None and not Path(path).is_dir():
        return Path(path)
    folder = path or folder
    if folder is None:
        raise UserError(f"{option}: missing; name the file, or the folder that holds {name}")
    found = Path(folder) / name
    if found.exists():
        return found
    prefix = name.partition("_hidden_")[0]
    others = sorted(p for p in Path(folder).glob(f"{prefix}_*.json") if "_hidden_" not in p.name)
    if len(others) == 1:
        return others[0]
    if others:
        raise UserError(f"{option}: {folder} holds several: {', '.join(p.name for p in others)}; name one")
    command = f"galvatron profile {prefix.partition('_')[0]}"
    raise UserError(f"{found}: no such file; measure it with `{command}` or name another by {option}")
