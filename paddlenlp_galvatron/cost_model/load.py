"""Loads a cost model from a folder of profile files (or their paths), or from the data sheet of a node."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, Unpack

from ..base import Faults, Note, UserError, member, no_note
from ..model import ModelShape, kinds_of
from ..plan.strategy import Assumptions
from ..profiles import ComputationProfile, Device, HardwareProfile, MemoryProfile
from ..profiles.analytic import analytic_computation, analytic_memory
from ..profiles.compute_time import ComputeTimes, TimeMode
from ..profiles.data_sheet import DataSheet
from ..profiles.files import ProfileSource, computation_name, memory_name, profile_path
from ..profiles.memory_use import MemoryMode, MemoryUse
from ..profiles.network import Network, analytic_hardware
from .costs import CostOptions, Profiles
from .model import CostModel


def load(
    model: ModelShape | Sequence[ModelShape],
    num_nodes: int,
    gpus_per_node: int,
    assumed: Assumptions,
    *,
    options: CostOptions = CostOptions(),
    note: Note = no_note,
    **source: Unpack[ProfileSource],
) -> CostModel:
    """Cost model from profile files.

    `note` receives a line for each assumption, derived entry and omission. Raises UserError with all faults: a file is
    missing, broken, or another model's (unless `allow_foreign_profiles`).
    """
    shapes, faults = kinds_of(model), Faults()
    if assumed.products:
        raise UserError("products: profiles have them in mixed_precision; give it with a data sheet (--device) alone")
    with faults.gathered():
        hardware = HardwareProfile.load(num_nodes, gpus_per_node, note=note, **source)
    with faults.gathered():
        times = _times(shapes, assumed, source, faults, note)
    with faults.gathered():
        memory, assumed = _memory(shapes, assumed, source, faults, note)
    faults.require_none()
    measured = {*times.profile.layer_ms, *(variant.layer_type for variant in memory.profile.layers)}
    if more := sorted(measured - set(range(len(shapes)))):
        keys = ", ".join(f"layertype_{layer_type}" for layer_type in more)
        note(f"{keys} ignored: the model has layers of {len(shapes)} type{'s' * (len(shapes) > 1)} (num_layertype)")
    if not source.get("allow_foreign_profiles"):
        from ..profiles.identity import require_same_device  # here: prices from a data sheet have no files

        require_same_device([*hardware.files, *times.profile.files, *memory.profile.files])
    return CostModel(model, Profiles.of(Network(hardware), times, memory), assumed, options)


def _times(
    shapes: Sequence[ModelShape], assumed: Assumptions, source: ProfileSource, faults: Faults, note: Note
) -> ComputeTimes:
    """Times of layers and vocabulary layers. Raises UserError; faults that hide no others go to `faults`."""
    from ..profiles import identity

    mode = member(TimeMode, source.get("time_profile_mode", TimeMode.STATIC), "time_profile_mode")
    documented = _documented(shapes, assumed)
    path = _place("time_profiling_path", source, computation_name(*documented), shapes[0])
    profile = ComputationProfile.load(path, *documented, seqs=_lengths(shapes, assumed), note=note)
    profile = profile.with_assumed_head(shapes[-1], note)
    if not source.get("allow_foreign_profiles"):
        with faults.gathered():
            identity.require_same_model(path, profile.meta, shapes, assumed.mixed_precision)
        fastest = {kind: min(ms / at.seq for at, ms in times.items()) for kind, times in profile.layer_ms.items()}
        identity.require_possible_times(path, fastest, shapes)
    return ComputeTimes(profile, mode)


def _memory(
    shapes: Sequence[ModelShape], assumed: Assumptions, source: ProfileSource, faults: Faults, note: Note
) -> tuple[MemoryUse, Assumptions]:
    """Memory profile, and the assumptions with its measured attention. Raises UserError as `_times` does."""
    from ..profiles import identity

    mode = member(MemoryMode, source.get("memory_profile_mode", MemoryMode.STATIC), "memory_profile_mode")
    documented, dialect = _documented(shapes, assumed), source.get("profile_dialect")
    path = _place("memory_profiling_path", source, memory_name(*documented), shapes[0])
    seqs = _lengths(shapes, assumed)
    profile = MemoryProfile.load(path, *documented, dialect=dialect, model=shapes[0], seqs=seqs, note=note)
    use = MemoryUse(profile, mode)
    if not source.get("allow_foreign_profiles"):
        with faults.gathered():
            identity.require_same_model(path, profile.meta, shapes, assumed.mixed_precision)
        for layer_type, kind in enumerate(shapes):
            with faults.gathered():
                identity.require_parameter_size(path, use.parameter_mib(layer_type), kind)
        identity.require_vocab_states(path, use.vocab_states_measured(), shapes)
    for layer_type, kind in enumerate(shapes):
        for line in identity.kv_heads_note(path, use.parameter_mib(layer_type), kind):
            note(line)
    assumed = _with_attention_of(profile, path, assumed)
    if assumed.sequence_parallel and (without := use.without_megatron_sp()):
        note(
            f"{path}: {', '.join(without)} measured without Megatron-SP; under sequence_parallel a layer of "
            "degree t keeps 1/t of its activations at degree 1, and the vocabulary layers all that was measured"
        )
    return use, assumed


def _documented(shapes: Sequence[ModelShape], assumed: Assumptions) -> tuple[str, int, int]:
    """Type, width and heads of the first layers, for the documented file names."""
    return assumed.mixed_precision.value, shapes[0].hidden_size, shapes[0].heads


def _lengths(shapes: Sequence[ModelShape], assumed: Assumptions) -> tuple[int, ...]:
    return tuple(length for kind in shapes if (length := kind.seq_length or assumed.seq_length))


def derive(
    model: ModelShape | Sequence[ModelShape],
    sheet: DataSheet,
    num_nodes: int,
    gpus_per_node: int,
    assumed: Assumptions,
    options: CostOptions = CostOptions(),
    kept_bytes: Callable[[int, int], float] | None = None,
) -> CostModel:
    """Cost model from a data sheet, without measurements and files: the same prices as from the files of `galvatron
    profile all --analytic`. It uses Paddle's fused kernels unless `assumed` differs. `kept_bytes`: see
    `analytic_computation`. Raises UserError without a sequence length."""
    seq = assumed.seq_length
    if seq is None:
        raise UserError("seq_length: missing; say how many tokens a sample has")
    assumed = replace(assumed, flash_attention=assumed.flash_attention is not False)
    precision, lengths, fused = assumed.mixed_precision, [seq], assumed.fused
    memory = analytic_memory(model, precision, lengths, fused, options.in_place, assumed.products)
    if sheet.allocator:
        memory = replace(memory, meta=memory.meta.with_extra({}, reserved=1 + sheet.allocator.value))
    how = fused, kept_bytes, options.kernels, assumed.sequence_parallel, assumed.products
    computation = analytic_computation(model, sheet, precision, lengths, *how)
    network = Network(analytic_hardware(sheet, num_nodes, gpus_per_node))
    profiles = Profiles(network, ComputeTimes(computation), MemoryUse(memory), Device.of(sheet))
    return CostModel(model, profiles, assumed, options)


def _with_attention_of(memory: MemoryProfile, path: Path, assumed: Assumptions) -> Assumptions:
    """The assumptions with the measured attention, if the file names it. Raises UserError if another is requested."""
    measured = memory.flash_attention
    if measured is None or assumed.flash_attention == measured:
        return assumed
    if assumed.flash_attention is not None:
        how = "with" if measured else "without"
        raise UserError(
            f"use_flash_attention: {path} was measured {how} flash attention; leave the option out, or measure: "
            f"galvatron profile all --use_flash_attention {int(not measured)}"
        )
    return replace(assumed, flash_attention=measured)


def _place(
    option: Literal["time_profiling_path", "memory_profiling_path"], source: ProfileSource, name: str, model: ModelShape
) -> Path:
    """The file at the option's path; else at its documented name in the folder; else the folder's only file of this
    kind and dtype that is not named after another model."""
    documented, exists = profile_path(source.get(option), source.get("folder"), name)
    if documented is None:
        raise UserError(f"{option}: missing; name the file, or the folder that holds {name}")
    if exists:
        return documented
    folder, prefix = documented.parent, name.partition("_hidden_")[0]
    found_all = sorted(p for p in folder.glob(f"{prefix}_*.json") if "_hidden_" not in p.name)
    from ..profiles.identity import name_faults

    others = [path for path in found_all if not name_faults(path, model)] or found_all
    if len(others) == 1:
        return others[0]
    if others:
        raise UserError(f"{option}: {folder} holds several: {', '.join(p.name for p in others)}; name one")
    command = f"galvatron profile {prefix.partition('_')[0]}"
    raise UserError(f"{documented}: no such file; measure it with `{command}` or name another by {option}")
