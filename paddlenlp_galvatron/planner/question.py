"""The question of a search: model, options, and prices from a data sheet or measured profiles, with the budget on their
device: its real size, less its own reserve where the user sets none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Self

from galvatron_dp_core import Cancel

from ..base.errors import UserError
from ..base.text import gib
from ..base.units import GIB_MIB
from ..cost_model import CostModel, derive, load
from ..options.model_options import SEQ, Model, ModelOptions
from ..options.prices import JobOptions
from ..plan import ModelShape
from ..profiles.data_sheet import Device, load_data_sheet
from ..profiles.dialects import Note
from ..profiles.files import no_note
from ..profiles.reserve import Reserve
from .branch_and_bound import Watch
from .engine import search
from .options import PATH_OPTIONS, SearchOptions
from .result import Job, SearchResult


def prices(models: Sequence[ModelShape], options: SearchOptions, note: Note = no_note) -> CostModel:
    """Build the cost model from the data sheet of `options.device`, else from the measured profiles. Raises
    UserError."""
    where = options.num_nodes, options.num_gpus_per_node, options.assumptions
    if options.device is None:
        _require_folder(options)
        return load(models, *where, **options.profile_arguments, note=note)
    return derive(models, load_data_sheet(options.device), *where, options.cost_options)


@dataclass(frozen=True)
class Question:
    """The question of a search, with nothing left open."""

    model: Model
    options: SearchOptions
    cost: CostModel
    reserve: Reserve  # of the device, unless the user has set one
    asked: Mapping[str, Any]  # the model's options as they were given

    @classmethod
    def of(cls, values: Mapping[str, Any], note: Note = no_note) -> Self:
        """Build the question from options of model and search by canonical name; `note` takes assumptions. Raises
        UserError."""
        given = ModelOptions.from_values(values)
        model = given.resolve_usual(SEQ)
        options = SearchOptions.from_values({**values, "seq_length": model.seq_length})
        if "bsz_scale" in options.model_fields_set and len(tried := options.batches) > 1:
            named = ", ".join(map(str, tried)) if len(tried) < 5 else f"{tried[0]}, {tried[1]}, …, {tried[-1]}"
            note(f"bsz_scale: batches {named}: a step, as in Galvatron's program; its guide speaks of a ratio")
        cost = prices(model.shapes, options, note)
        reserve = cost.profiles.reserve if options.context_mib is None else Reserve()
        asked = given.model_dump(mode="json", exclude_unset=True)
        return cls(model, *on_device(options, cost, note), reserve, asked)

    def search(
        self,
        log: Callable[[str], None] | None = None,
        watch: Watch | None = None,
        seconds: float | None = None,
        cancel: Cancel | None = None,
        compared: bool = True,
    ) -> SearchResult:
        """Search as `planner.search` does. The plan's file names the model as the user gave it, for further
        searches."""
        where = self.model.shapes, self.cost, self.options
        result = search(*where, log, watch, seconds=seconds, cancel=cancel, compared=compared)
        return result.naming_model(self.asked)

    def job(self, options: JobOptions, result: SearchResult) -> Job | None:
        """The whole training under the best plan; None where nothing fits, or layers are of several types."""
        if result.best is None or len(self.model.shapes) > 1:
            return None
        tokens_per_s = result.best.samples_per_s * self.model.seq_length
        shape, task, device = self.model.shapes[0], self.cost.options.task, self.options.device
        return Job.of(options, shape, task, self.cost.world_size, tokens_per_s, device=device)


def _require_folder(options: SearchOptions) -> None:
    """Raises UserError where the folder of the profiles is missing, and files of it are needed."""
    folder = options.profiles
    if folder.is_dir() or any(getattr(options, name) for name in PATH_OPTIONS):
        return
    beside = [path.name for path in folder.absolute().parent.glob("*/")] if folder.absolute().parent.is_dir() else []
    near = get_close_matches(folder.name, beside, n=1)
    meant = f"did you mean {folder.with_name(near[0])}? Or " if near else ""
    raise UserError(
        f"profiles: no folder {folder}; {meant}measure with galvatron profile all, or give --device h100-80gb, which "
        "needs no measurement"
    )


def on_device(options: SearchOptions, cost: CostModel, note: Note = no_note) -> tuple[SearchOptions, CostModel]:
    """Options and cost model with the reserve of their device, and a budget within its size.

    Where no profile names a GPU, as in Galvatron's files, all of `memory_constraint` is taken. `note` receives the
    outcome for a budget.
    """
    options = within_size(options, cost, note)
    if options.context_mib is None and (reserve := cost.profiles.reserve).parts:
        device_mib = options.memory_gib * GIB_MIB
        parts = ", ".join(f"{part.name} {gib(part.mib)}" for part in reserve.parts_on(device_mib))
        context_mib = reserve.context_mib(device_mib)
        parts += f", and {reserve.working:.0%} of working memory" if reserve.working else ""
        name = cost.profiles.device.name
        note(f"reserve of {name}: {gib(context_mib)} GiB: {parts}; --context_mib sets another, in MiB")
    return with_reserve(options, cost)


def within_size(
    options: SearchOptions, cost: CostModel, note: Note = no_note, unknown_gib: float | None = None
) -> SearchOptions:
    """Options with a budget that the device has. Raises UserError as `budget_gib`."""
    gib = budget_gib(options.memory_constraint, cost.profiles.device, note, unknown_gib)
    return options.model_copy(update={"memory_constraint": gib})


def budget_gib(
    asked_gib: float | None, device: Device, note: Note = no_note, unknown_gib: float | None = None
) -> float:
    """Memory of a device that a plan may take, GiB: all that it has, where the user names none; `unknown_gib` where
    nobody knows that either. Raises UserError where this is None, too."""
    own_gib = device.memory_gib
    if asked_gib is None:
        if (gib := own_gib or unknown_gib) is None:
            raise UserError(
                f"memory_constraint: missing, and the profiles lack the memory of {device.name or 'a device'}; "
                "give --memory_constraint, in GiB"
            )
        return gib
    if own_gib is None or asked_gib <= own_gib:
        return asked_gib
    note(f"memory_constraint: {asked_gib:.4g} GiB, but {device.name} has {own_gib:.4g}; planned for that")
    return own_gib


def with_reserve(options: SearchOptions, cost: CostModel) -> tuple[SearchOptions, CostModel]:
    """Options and cost model with the device's own reserve of this budget, where the user sets none."""
    freed = None
    if options.context_mib is None and (reserve := cost.profiles.reserve).parts:
        options = options.model_copy(update={"context_mib": reserve.context_mib(options.memory_gib * GIB_MIB)})
        freed = reserve.freed
    return options, cost.reserving(options.reserve_mib, freed)
