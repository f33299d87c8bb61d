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
    sheet, gb = gpu_sheet(cost.device), options.memory_constraint
    if sheet and gb > sheet.memory.value:
        note(
            f"memory_constraint: {gb:g} GB, but {cost.device} has {sheet.memory.value:g} (1024 MiB each); "
            "planned for what it has"
        )
        gb = sheet.memory.value
    context_mib = options.context_mib
    if context_mib is None and (reserve := cost.reserve).parts:
        context_mib = reserve.context_mib(gb * GIB_MIB)
        parts = ", ".join(f"{part.name} {part.mib:,.0f}" for part in reserve.told(gb * GIB_MIB))
        note(f"context_mib: {context_mib:,.0f} of {cost.device}: {parts}; --context_mib sets another")
    settled = options.model_copy(update={"memory_constraint": gb, "context_mib": context_mib})
    return settled, cost.reserving(settled.reserve_mib)
