"""The question of a search: model, options, and prices from a data sheet or measured profiles, with the budget of their
device: its real size less its reserve, unless the user sets them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from time import process_time
from typing import Any

from galvatron_dp_core import Cancel

from ..base import GIB_MIB, Note, UserError, gib, no_note
from ..cost_model import CostModel, PlanFacts, Prediction, derive, load
from ..options.model_options import SEQ, Model, ModelOptions
from ..options.prices import JobOptions
from ..plan import Assumption, ModelShape, Plan
from ..profiles import Device, HardwareProfile, Reserve, load_data_sheet
from ..profiles.network import Network
from .assumptions import assumptions_of, note_doubts
from .branch_and_bound import Watch
from .engine import search
from .options import PATH_OPTIONS, SearchOptions
from .result import Candidate, SearchResult
from .whole_run import Job

LEAST_S = 0.5  # least time of a search after slow ones


def prices(models: Sequence[ModelShape], options: SearchOptions, note: Note = no_note) -> CostModel:
    """Build the cost model from the data sheet of `options.device`, else from the measured profiles. Raises
    UserError."""
    cluster = options.num_nodes, options.num_gpus_per_node
    if options.device is None:
        _require_folder(options)
        return load(models, *cluster, options.assumptions, **options.profile_arguments, note=note)
    sheet = load_data_sheet(options.device).with_network(options.network)
    return derive(models, sheet, *cluster, options.assumptions, options.cost_options)


@dataclass(frozen=True)
class Question:
    """The question of a search; `at` and others give it with a change."""

    model: Model
    options: SearchOptions  # context_mib unset: the device's reserve, which grows with the budget
    cost: CostModel  # cost model with the reserve
    asked: Mapping[str, Any] = field(default_factory=dict)  # the model's options as the user gave them
    watch: Callable[[], Watch] | None = None  # called as each search begins, to show its progress

    def __post_init__(self) -> None:
        object.__setattr__(self, "cost", self.cost.reserving(self.settled.reserve_mib, self.reserve.freed))

    @classmethod
    def of(cls, values: Mapping[str, Any], note: Note = no_note) -> Question:
        """Build the question from options of model and search by canonical name; `note` takes assumptions. Raises
        UserError."""
        asked = ModelOptions.from_values(values)
        model = asked.resolve_usual(SEQ)
        options = SearchOptions.from_values({**values, "seq_length": model.seq_length})
        if "bsz_scale" in options.model_fields_set and len(tried := options.batches) > 1:
            named = ", ".join(map(str, tried)) if len(tried) < 5 else f"{tried[0]}, {tried[1]}, …, {tried[-1]}"
            note(f"bsz_scale: batches {named}: a step, as in Galvatron's program; its guide speaks of a ratio")
        question = on_device(model, options, prices(model.shapes, options, note), note)
        note_doubts(question.options, question.cost, note)
        return replace(question, asked=asked.model_dump(mode="json", exclude_unset=True))

    @property
    def reserve(self) -> Reserve:
        """Memory of a device outside tensors, if set by the device and not by the user."""
        return self.cost.profiles.reserve if self.options.context_mib is None else Reserve()

    @property
    def settled(self) -> SearchOptions:
        """The options with the reserve of this budget."""
        if not self.reserve.parts:
            return self.options
        return self.options.model_copy(update={"context_mib": self.reserve.context_mib(self.budget_mib)})

    @property
    def shape(self) -> ModelShape | None:
        """The model's shape; None: layers of several kinds."""
        return self.model.shapes[0] if len(self.model.shapes) == 1 else None

    @property
    def budget_mib(self) -> float:
        """Memory of a device."""
        return self.options.memory_gib * GIB_MIB

    def at(self, batch: int) -> Question:
        """The same question for this batch and only the best plan."""
        return self.changed(settle_bsz=batch, top_k=1)

    def changed(self, hardware: HardwareProfile | None = None, **changes: Any) -> Question:
        """The same question with these options, or on other hardware. Raises UserError where the prices do not cover
        it."""
        if "num_nodes" in changes:
            changes["world_size"] = changes["num_nodes"] * self.options.num_gpus_per_node
        options, cost = self.options.model_copy(update=changes), self.cost
        if hardware or options.priced_by != self.options.priced_by:
            if options.device and not hardware:  # a data sheet has prices for any cluster and length
                cost = prices(self.model.shapes, options)
            else:
                profiles = replace(cost.profiles, network=Network(hardware)) if hardware else cost.profiles
                cost = CostModel(self.model.shapes, profiles, options.assumptions, options.cost_options)
        return replace(self, options=options, cost=cost)

    def search(
        self,
        log: Callable[[str], None] | None = None,
        watch: Watch | None = None,
        known: Sequence[Plan] = (),
        seconds: float | None = None,
        cancel: Cancel | None = None,
        compared: bool = True,
    ) -> SearchResult:
        """Search as `planner.search` does. The plan's file names the model as the user gave it, for further
        searches."""
        watch = watch or (self.watch and self.watch())
        inputs = self.model.shapes, self.cost, self.settled
        return search(*inputs, log, watch, known, seconds, cancel, compared).naming_model(self.asked)

    @property
    def assumptions(self) -> dict[str, Assumption]:
        """The numbers and choices on which its answers depend."""
        return assumptions_of(self.options, self.cost)

    def facts_of(self, plan: Plan) -> PlanFacts:
        """Raises UserError where the plan cannot be priced."""
        return PlanFacts(plan, self.cost.predict(plan), self.cost, self.shape, self.budget_mib, self.assumptions)

    def job(self, options: JobOptions, priced: Candidate | Prediction | None) -> Job | None:
        """The whole training under a plan; None where nothing fits, or layers differ in type. Raises UserError."""
        if priced is None or self.shape is None:
            return None
        speed, task = priced.samples_per_s * self.model.seq_length, self.cost.options.task
        return Job.of(options, self.shape, task, self.options, speed)


class SharedTime:
    """Seconds of processor time that several searches share: slow ones may use the rest of fast ones."""

    def __init__(self, seconds: float, shares: int, least_s: float | None = None):
        self._end, self._shares = process_time() + seconds, shares
        self._least_s = LEAST_S if least_s is None else least_s

    def take(self, shares: int = 1) -> float:
        """Seconds of the next search."""
        share = shares / max(shares, self._shares)
        self._shares -= shares
        return max(self._least_s, (self._end - process_time()) * share)


def _require_folder(options: SearchOptions) -> None:
    """Raises UserError where the folder of the profiles is missing, and files of it are needed."""
    folder = options.profiles
    if folder.is_dir() or any(getattr(options, name) for name in PATH_OPTIONS):
        return
    siblings = [path.name for path in folder.absolute().parent.glob("*/")] if folder.absolute().parent.is_dir() else []
    near = get_close_matches(folder.name, siblings, n=1)
    meant = f"did you mean {folder.with_name(near[0])}? Or " if near else ""
    raise UserError(
        f"profiles: no folder {folder}; {meant}measure with galvatron profile all, or give --device h100-80gb, which "
        "needs no measurement"
    )


def on_device(model: Model, options: SearchOptions, cost: CostModel, note: Note = no_note) -> Question:
    """The question with a budget within the size of its device, less the device's reserve.

    If no profile names a GPU, as in Galvatron's files, plans may use all of `memory_constraint`. `note` receives the
    outcome for a budget.
    """
    question = Question(model, within_size(options, cost, note), cost)
    if (reserve := question.reserve).parts:
        parts = ", ".join(f"{amount.name} {gib(amount.mib)}" for amount in reserve.parts_on(question.budget_mib))
        parts += f", and {reserve.working:.0%} of working memory" if reserve.working else ""
        reserved = f"reserve of {cost.profiles.device.name}: {gib(question.settled.reserve_mib)} GiB"
        note(f"{reserved}: {parts}; --context_mib sets another, in MiB")
    return question


def within_size(
    options: SearchOptions, cost: CostModel, note: Note = no_note, unknown_gib: float | None = None
) -> SearchOptions:
    """Options with a budget that the device has. Raises UserError as `budget_gib`."""
    gib = budget_gib(options.memory_constraint, cost.profiles.device, note, unknown_gib)
    return options.model_copy(update={"memory_constraint": gib})


def budget_gib(
    asked_gib: float | None, device: Device, note: Note = no_note, unknown_gib: float | None = None
) -> float:
    """Memory of a device that a plan may use, GiB: by default all of it; `unknown_gib` if its size is unknown. Raises
    UserError if this is None as well."""
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
