"""The number of GPUs that a training task needs, and the speed of each number: one search per number, offline."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from ..base import GIB, Note, UserError, no_note
from ..base.limits import Layers, NodeLinks, Positive, Ranks, Samples, Size
from ..cost_model import CostModel
from ..options.foreign import Fate
from ..options.group import split_numbers
from ..options.model_options import SEQ, Model
from ..options.prices import MEASURED_NETWORK, TWO_SOURCES, JobOptions, LimitOptions
from ..plan import ModelShape, Products
from ..profiles import Device, Reserve, load_data_sheet
from ..profiles.files import allreduce_name, device_of, p2p_name, read_profile, sp_time_name
from .assumptions import note_doubts
from .branch_and_bound import Watch
from .hints import Hint, fewer_gpus, hints, larger_batch
from .options import BATCH, SearchOptions, TaskOptions
from .question import Question, SharedTime, budget_gib, prices
from .result import Candidate, Need
from .whole_run import Job, price_of

TOKENS = 1e9  # default number of tokens for days
DEVICE = "h100-80gb"  # if neither the user nor a profile names a device
NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # numbers of nodes that are tried
FURTHER = 3  # numbers of GPUs shown beyond the least that fits
MORE_GIB = 8.0
ROUGHLY: dict[str, Any] = {"gap": 0.005, "effort": 1_000_000}  # search options that suit a table with rounded speeds
_ALLREDUCE = r"allreduce_bandwidth_([1-9]\d{0,4})nodes_([1-9]\d{0,4})gpus_per_node\.json"
MOST_NUMBERS = 32  # numbers of GPUs in one table


def _names(value: object) -> object:
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_names), Field(min_length=1, max_length=MOST_NUMBERS)]
GpuCounts = Annotated[tuple[Ranks, ...], BeforeValidator(split_numbers), Field(min_length=1, max_length=MOST_NUMBERS)]


BF16 = "its times are those of bf16; others: galvatron search --mixed_precision"
PRECISION = {"bf16": Fate(BF16, "1"), "fp16": Fate(BF16, "0")}


class FitOptions(TaskOptions, LimitOptions, JobOptions):
    """The model, task and device."""

    model_size: str
    gpus: GpuCounts | None = None
    device: Names | None = None
    network: NodeLinks | None = None
    products: Products | None = None
    memory_constraint: Positive | None = None
    profiles: Path | None = None
    seq_length: Size | None = None
    global_train_batch_size: Samples = BATCH
    max_cp_deg: Ranks | None = None
    max_virtual_pp_deg: Layers | None = None
    use_flash_attention: bool | None = None
    days: Positive | None = None
    budget: Positive | None = None

    @model_validator(mode="after")
    def _budget_has_a_price(self) -> Self:
        if self.budget and not self.price_per_gpu_hour:
            raise ValueError("budget: a cost needs a price; give --price_per_gpu_hour too")
        return self

    def of(self, shape: ModelShape) -> FitOptions:
        """The options with a settled sequence length. Raises UserError if the model lacks positions for it or a device
        has no price."""
        for name in (None,) if self.profiles else self.device or (DEVICE,):
            price_of(self, name)
        most = shape.max_position_embeddings
        if (self.seq_length or 0) > most:
            raise UserError(
                f"seq_length: {self.seq_length} is beyond the {most} positions of {shape.name}; give a shorter one"
            )
        return self.model_copy(update={"seq_length": self.seq_length or min(SEQ, most)})

    @property
    def tokens_of_a_sample(self) -> int:
        """Raises ValueError before `of`."""
        if self.seq_length is None:
            raise ValueError("seq_length: not settled; call of(shape) first")
        return self.seq_length


@dataclass(frozen=True, slots=True)
class Fit:
    """The answer for one number of GPUs."""

    device: Device
    gpus: int
    best: Candidate | None  # the fastest plan within the bound
    held: Need | None  # memory of its plan, or of the smallest plan if none fits; None: no plan at all
    question: Question
    with_more: float | None  # samples/s with MORE_GIB more on each GPU; None: still nothing fits
    hopeful: bool = False  # no plan fits by its bound, but one by its tensors
    undecided: bool = False  # the search ended before it found a plan

    @property
    def gpu_gib(self) -> float:
        """Memory of a GPU."""
        return self.question.options.memory_gib

    @property
    def device_width(self) -> int:
        """GPUs of a node."""
        return self.device.gpus_per_node or self.question.options.num_gpus_per_node

    def job(self, options: FitOptions) -> Job:
        """The whole training on this number of GPUs. Raises UserError."""
        question, best = self.question, self.best
        speed = best.samples_per_s * options.tokens_of_a_sample if best else None
        return Job.of(options, question.model.shapes[0], options.trained, question.options, speed, TOKENS)

    @property
    def tensors_mib(self) -> float:
        """Tensors on the GPU with the highest peak, of the plan or of the smallest plan."""
        return self.held.tensors_mib if self.held else 0.0

    @property
    def bound_mib(self) -> float:
        """Upper bound of its memory, MiB."""
        return self.held.enough_mib if self.held else self.question.reserve.fixed_mib

    @property
    def verdict(self) -> str:
        """`at risk`: fits only if the allocator's overhead is smaller than in published runs."""
        if self.undecided:
            return "not found"
        return "fits" if self.best else "at risk" if self.hopeful else "does not fit"


def hints_of(rows: Sequence[Fit], options: FitOptions) -> list[Hint]:
    """Options that speed up the first number of GPUs that fits, or the last that does not; more GPUs only if one number
    was requested, as rows show the others. Empty for several devices."""
    if len({row.device for row in rows}) > 1:
        return []
    row = next((row for row in rows if row.best), rows[-1])
    asked = hints(row.question, row.best, options.model_fields_set)
    fewer = fewer_gpus(row.question, row.best) if row.best and options.gpus is None else None
    shown = [hint for hint in asked if len(options.gpus or ()) == 1 or "num_nodes" not in hint.options]
    most = rows[-1]  # the largest number of GPUs suffers most from a small batch
    larger = larger_batch(most.question, most.best) if most.best and most.gpus % most.device_width == 0 else None
    return [*shown, *filter(None, (fewer, larger))]


@dataclass(frozen=True)
class _Kind:
    """GPUs of a kind, with the source of their prices."""

    device: Device
    per_node: int
    priced_by: Callable[[int, int], dict[str, Any]]  # nodes, GPUs of each -> options of the search


def fit(shape: ModelShape, options: FitOptions, note: Note = no_note, watch: Watch | None = None) -> Iterator[Fit]:
    """Yields a row per device and number of GPUs: the requested numbers, or from the least that fits; `options` are
    settled for the shape.

    `note` is called with the assumptions about profiles and about a budget beyond the device's memory, `watch` with
    each search's progress. Raises UserError for a number that is no whole number of nodes, or that the profiles lack.
    """
    kinds = [*_kinds(options)]
    asked = sorted(set(options.gpus or ()))
    time = SharedTime(options.time_limit or inf, 4 * len(kinds) * (len(asked) or FURTHER + 2))  # four shares a row
    budgets = (budget_gib(options.memory_constraint, kind.device, note) for kind in kinds)
    rows = [_Row(shape, kind, options, gib, note, watch, time) for kind, gib in zip(kinds, budgets, strict=True)]
    for row in rows:
        yield from map(row, asked) if asked else _from_the_least(row)


def _kinds(options: FitOptions) -> Iterator[_Kind]:
    """The devices that are named, else that of the profiles. Raises UserError."""
    if options.profiles:
        if options.device:
            raise UserError(TWO_SOURCES)
        if options.network:
            raise UserError(MEASURED_NETWORK)
        yield _measured(options.profiles)
        return
    for name in options.device or (DEVICE,):
        sheet = load_data_sheet(name)
        yield _Kind(Device.of(sheet), sheet.gpus_per_node, partial(_sheet, name))


def _sheet(name: str, *cluster: int) -> dict[str, Any]:
    """Search options for a data sheet, which has prices for any cluster."""
    return {"device": name}


def _from_the_least(row: _Row) -> Iterator[Fit]:
    """Rows from the last number that does not fit to FURTHER beyond the first that fits."""
    per_node = row.kind.per_node
    inside = [number for number in (1, 2, 4, 8, 16, 32) if number < per_node and per_node % number == 0]
    fitting, failed = 0, None
    for gpus in [*inside, *(nodes * per_node for nodes in NODES)]:
        if gpus < row.least_gpus:
            continue
        try:
            answer = row(gpus)
        except UserError:
            if fitting:
                return  # the profiles have no links for so many
            raise
        if answer.best is None and not fitting:
            failed = answer
            continue
        if failed:
            yield failed
            failed = None
        yield answer
        fitting += 1
        if fitting > FURTHER and answer.job(row.options).within(row.options.days):
            return
    if failed:
        yield failed


@dataclass(frozen=True)
class _Row:
    """The search on one number of GPUs."""

    shape: ModelShape
    kind: _Kind
    options: FitOptions
    gpu_gib: float
    note: Note
    watch: Watch | None
    time: SharedTime  # time shared by all rows

    @property
    def least_gpus(self) -> float:
        """Least number of GPUs over which split weights and optimizer states fit."""
        cost = self._question(1, 1).cost
        states = cost.state_bytes.weight + (0 if cost.options.task.frozen else cost.state_bytes.optimizer)
        return self.shape.parameters * states / GIB / self.gpu_gib

    def __call__(self, gpus: int) -> Fit:
        per_node = self.kind.per_node
        nodes, rest = divmod(gpus, per_node)
        if nodes and rest:
            raise UserError(
                f"gpus: {gpus} are no whole number of nodes of {per_node} GPUs; give a multiple of {per_node}, or fewer"
            )
        question = self._question(max(nodes, 1), rest or per_node)
        note_doubts(question.options, question.cost, self.note)
        seconds, reserve = self.time.take(3), question.reserve
        now = question.search(watch=self.watch, seconds=seconds)
        for line in now.left_out:
            self.note(f"{line} ({gpus} GPUs)")
        plans = [candidate.plan for candidate in (now.best, now.fastest) if candidate]
        wider = question.changed(memory_constraint=self.gpu_gib + MORE_GIB, **ROUGHLY)
        more = wider.search(watch=self.watch, known=plans, seconds=self.time.take(), compared=False).best
        # The fastest plans are compared: the simplest may be slower.
        least = now.best.samples_per_s / now.fastest.samples_per_s if now.best and now.fastest else 1.0
        with_more = more.samples_per_s * least if more else None
        held = Need.of(now.best.plan, question.cost.reserving(0.0, reserve.freed)) if now.best else now.need
        tensors_alone = Reserve(reserve.parts).context_mib(question.budget_mib)
        hopeful = (
            now.best is None
            and not now.undecided
            and question.changed(context_mib=tensors_alone).search(compared=False).best is not None
        )
        held = held and held.on(reserve)
        return Fit(self.kind.device, gpus, now.best, held, question, with_more, hopeful, now.undecided)

    def _question(self, nodes: int, gpus: int) -> Question:
        """The question on a number of nodes with this many GPUs each."""
        options = SearchOptions(
            **{name: getattr(self.options, name) for name in TaskOptions.model_fields},
            num_nodes=nodes,
            num_gpus_per_node=gpus,
            memory_constraint=self.gpu_gib,
            settle_bsz=self.options.global_train_batch_size,
            seq_length=self.options.seq_length,
            max_cp_deg=self.options.max_cp_deg,
            max_virtual_pp_deg=self.options.max_virtual_pp_deg,
            use_flash_attention=self.options.use_flash_attention,
            network=self.options.network,
            products=self.options.products,
            gap=self.options.gap,
            time_limit=self.options.time_limit,
            **self.kind.priced_by(nodes, gpus),
        )
        model = Model((self.shape,), self.options.tokens_of_a_sample)
        asked = {"model_size": self.options.model_size, "seq_length": options.seq_length}
        cost = prices(model.shapes, options, self.note)
        if (nodes, gpus) != (cost.profiles.num_nodes, cost.profiles.gpus_per_node):  # measured on another cluster
            profiles = replace(cost.profiles, cluster=(nodes, gpus))
            cost = CostModel(model.shapes, profiles, cost.assumed, cost.options)
        return Question(model, options, cost, asked)


def _measured(folder: Path) -> _Kind:
    """Prices from a folder of profiles, possibly of another cluster, from whose groups other groups' costs are
    derived."""
    clusters = sorted(
        (int(match[1]) * int(match[2]), (int(match[1]), int(match[2])))
        for path in folder.glob("*.json")
        if (match := re.fullmatch(_ALLREDUCE, path.name))
    )
    if not clusters:
        raise UserError(
            f"profiles: {folder} holds no allreduce_bandwidth_*.json; measure it with `galvatron profile hardware`, "
            "or leave --profiles out"
        )
    measured_clusters = {cluster for _, cluster in clusters}
    largest = clusters[-1][1]
    device = device_of(*(meta for at in measured_clusters if (meta := read_profile(folder / allreduce_name(*at))[1])))

    def priced_by(*cluster: int) -> dict[str, Any]:
        names = {
            "allreduce_bandwidth_config_path": allreduce_name,
            "p2p_bandwidth_config_path": p2p_name,
            "sp_time_path": sp_time_name,
        }
        measured = cluster if cluster in measured_clusters else largest
        paths = {option: folder / name(*measured) for option, name in names.items()}
        return {"profiles": folder, **{option: path for option, path in paths.items() if path.exists()}}

    return _Kind(device, device.gpus_per_node or largest[1], priced_by)
