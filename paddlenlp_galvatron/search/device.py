"""Budgets on the device that the profiles are of: its real size, and its own reserve where the user sets none."""

from __future__ import annotations

from ..cost_model import CostModel
from ..profiles.files import Note, no_note
from ..profiles.reserve import GIB_MIB, gpu_sheet
from .options import SearchOptions


def on_device(options: SearchOptions, cost: CostModel, note: Note = no_note) -> tuple[SearchOptions, CostModel]:
    """Options and cost model with the reserve of their device, and a budget within its size.

    Nothing changes where no profile names a GPU, as in Galvatron's files: all of `memory_constraint` is taken then.
    `note` hears what became of a budget.
    """
    options = within_size(options, cost, note)
    if options.context_mib is None and (reserve := cost.reserve).parts:
        device_mib = options.memory_constraint * GIB_MIB
        parts = ", ".join(f"{part.name} {part.mib:,.0f}" for part in reserve.told(device_mib))
        context_mib = reserve.context_mib(device_mib)
        note(f"context_mib: {context_mib:,.0f} of {cost.device}: {parts}; --context_mib sets another")
    return with_reserve(options, cost)


def within_size(options: SearchOptions, cost: CostModel, note: Note = no_note) -> SearchOptions:
    """Options with a budget that the device has."""
    sheet, gb = gpu_sheet(cost.device), options.memory_constraint
    if sheet is None or gb <= sheet.memory.value:
        return options
    note(
        f"memory_constraint: {gb:g} GB, but {cost.device} has {sheet.memory.value:g} (1024 MiB each); "
        "planned for what it has"
    )
    return options.model_copy(update={"memory_constraint": sheet.memory.value})


def with_reserve(options: SearchOptions, cost: CostModel) -> tuple[SearchOptions, CostModel]:
    """Options and cost model with the device's own reserve of this budget, where the user sets none."""
    if options.context_mib is None and (reserve := cost.reserve).parts:
        options = options.model_copy(update={"context_mib": reserve.context_mib(options.memory_constraint * GIB_MIB)})
    return options, cost.reserving(options.reserve_mib)
