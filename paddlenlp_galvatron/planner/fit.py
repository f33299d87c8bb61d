"""How many GPUs a training task needs, and how fast each number of GPUs is: one search a number, offline."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from ..base.errors import UserError
from ..base.limits import Positive, Ranks, Samples, Size
from ..base.units import GIB, GIB_MIB
from ..cost_model import CostModel, derive, load
from ..options.foreign import Fate
from ..options.model_options import SEQ, Model
from ..options.prices import TWO_SOURCES, JobOptions
from ..plan import ModelShape
from ..plan.strategy import Assumptions
from ..profiles.data_sheet import Device, load_data_sheet
from ..profiles.dialects import Note
from ..profiles.files import allreduce_name, device_of, no_note, p2p_name, read_profile, sp_time_name
from ..profiles.reserve import Reserve
from .branch_and_bound import Watch
from .hints import Hint, hints, larger_batch
from .options import BATCH, SearchOptions, TaskOptions
from .question import Question, budget_gib
from .result import Candidate, Job, Need, price_of

TOKENS = 1e9  # for days, where nobody says how many
DEVICE = "h100-80gb"  # where neither the user nor a profile names one
NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # numbers of nodes that are tried
FURTHER = 3  # numbers of GPUs shown beyond the least that fits
MORE_GIB = 8.0
_ALLREDUCE = r"allreduce_bandwidth_([1-9]\d{0,4})nodes_([1-9]\d{0,4})gpus_per_node\.json"
MOST_NUMBERS = 32  # of GPUs in one table


def _numbers(value: object) -> object:
    if isinstance(value, str):
        return value.replace(" ", "").split(",")
    return [value] if isinstance(value, int) else value


def _names(value: object) -> object:
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_names), Field(min_length=1, max_length=MOST_NUMBERS)]
GpuCounts = Annotated[tuple[Ranks, ...], BeforeValidator(_numbers), Field(min_length=1, max_length=MOST_NUMBERS)]


BF16 = "its times are those of bf16; others: galvatron search --mixed_precision"
PRECISION = {"bf16": Fate(BF16, "1"), "fp16": Fate(BF16, "0")}


class FitOptions(TaskOptions, JobOptions):
    """The model, task and device."""

    model_size: str
    gpus: GpuCounts | None = None
    device: Names | None = None
    memory_constraint: Positive | None = None
    profiles: Path | None = None
    seq_length: Size | None = None
    global_train_batch_size: Samples = BATCH
    max_cp_deg: Ranks = 1
    days: Positive | None = None
    budget: Positive | None = None

    @model_validator(mode="after")
    def _budget_has_a_price(self) -> Self:
        if self.budget and not self.price_per_gpu_hour:
            raise ValueError("budget: a cost needs a price; give --price_per_gpu_hour too")
        return self

    def of(self, shape: ModelShape) -> FitOptions:
        """The options with the length of samples settled. Raises UserError where the model has no positions for it, or
        a device has no price."""
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
    held: Need | None  # by its plan, or by the one that needs least where none fits; None: no plan at all
    reserve: Reserve
    gpu_gib: float
    question: Question
    with_more: float | None  # samples/s with MORE_GIB more on each GPU; None: still nothing fits
    hopeful: bool = False  # nothing fits by its bound, but something by its tensors

    @property
    def device_width(self) -> int:
        """GPUs of a node."""
        return self.device.gpus_per_node or self.question.options.num_gpus_per_node

    @property
    def tensors_mib(self) -> float:
        """Tensors on the GPU with the highest peak: of the plan, or of the one that needs least."""
        return self.held.tensors_mib if self.held else 0.0

    @property
    def bound_mib(self) -> float:
        """Upper bound of its memory, MiB."""
        return self.held.enough_mib if self.held else self.reserve.fixed_mib

    @property
    def verdict(self) -> str:
        """`at risk`: only if the allocator holds less besides tensors than it did in published runs."""
        return "fits" if self.best else "at risk" if self.hopeful else "does not fit"


def hints_of(found: Sequence[Fit], options: FitOptions) -> list[Hint]:
    """Options with which the first number of GPUs that fits, or the last that does not, is faster; more GPUs only
    where one number was requested, as rows show the others. None for several devices."""
    if len({one.device for one in found}) > 1:
        return []
    one = next((one for one in found if one.best), found[-1])
    asked = hints(one.question, one.best, options.model_fields_set)
    shown = [hint for hint in asked if len(options.gpus or ()) == 1 or "num_nodes" not in hint.options]
    most = found[-1]  # which a small batch keeps least busy
    larger = larger_batch(most.question, most.best) if most.best and most.gpus % most.device_width == 0 else None
    return [*shown, larger] if larger else shown


def job_of(one: Fit, shape: ModelShape, options: FitOptions) -> Job:
    """The whole training on this number of GPUs. Raises UserError."""
    speed = one.best.samples_per_s * options.tokens_of_a_sample if one.best else None
    return Job.of(options, shape, options.trained, one.gpus, speed, TOKENS, one.question.options.device)


@dataclass(frozen=True)
class _Kind:
    """GPUs of a kind, with the prices of the model on them."""

    device: Device
    per_node: int
    model_on: Callable[[int, int], CostModel]  # nodes, GPUs of each -> prices
    sheet: str | None = None  # name of their data sheet; None: prices are measured


def fit(shape: ModelShape, options: FitOptions, note: Note = no_note, watch: Watch | None = None) -> list[Fit]:
    """A row a device and number of GPUs: those requested, or from the least that fits; `options` are settled for the
    shape.

    `note` is called with the assumptions about profiles and about a budget beyond the device's memory, `watch` with
    how far each search is. Raises UserError for a number that is no whole number of nodes, or that the profiles lack.
    """
    found: list[Fit] = []
    for kind in _kinds(shape, options, note):
        gib = budget_gib(options.memory_constraint, kind.device, note)
        row = _Row(shape, kind, options, gib, watch)
        found += [row(gpus) for gpus in sorted(set(options.gpus))] if options.gpus else _from_the_least(row)
    return found


def _kinds(shape: ModelShape, options: FitOptions, note: Note) -> Iterator[_Kind]:
    """The devices that are named, else that of the profiles. Raises UserError."""
    if options.profiles:
        if options.device:
            raise UserError(TWO_SOURCES)
        yield _measured(shape, options, options.profiles, note)
        return
    for name in options.device or (DEVICE,):
        sheet = load_data_sheet(name)
        model_on = partial(derive, shape, sheet, assumed=_assumed(options), options=options.priced)
        yield _Kind(Device.of(sheet), sheet.gpus_per_node, model_on, name)


def _from_the_least(row: _Row) -> Iterator[Fit]:
    """Rows from the last number that does not fit to some beyond the first that does."""
    per_node = row.kind.per_node
    inside = [number for number in (1, 2, 4, 8, 16, 32) if number < per_node and per_node % number == 0]
    fitting, failed = 0, None
    for gpus in [*inside, *(nodes * per_node for nodes in NODES)]:
        if gpus < row.least_gpus:
            continue
        found = row(gpus)
        if found.best is None and not fitting:
            failed = found
            continue
        if failed:
            yield failed
            failed = None
        yield found
        fitting += 1
        if fitting > FURTHER and job_of(found, row.shape, row.options).within(row.options.days):
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
    watch: Watch | None

    @property
    def least_gpus(self) -> float:
        """Least number of GPUs over which split weights and optimizer states fit."""
        cost = self.kind.model_on(1, 1)
        states = cost.state_bytes.weight + (0 if cost.options.task.frozen else cost.state_bytes.optimizer)
        return self.shape.parameters * states / GIB / self.gpu_gib

    def __call__(self, gpus: int) -> Fit:
        per_node = self.kind.per_node
        nodes, rest = divmod(gpus, per_node)
        if nodes and rest:
            raise UserError(
                f"gpus: {gpus} are no whole number of nodes of {per_node} GPUs; give a multiple of {per_node}, or fewer"
            )
        cost = self.kind.model_on(max(nodes, 1), rest or per_node)
        reserve = cost.profiles.reserve
        cost = cost.reserving(0.0, reserve.freed)
        question = self._question(cost, reserve, self.gpu_gib)
        now = question.search(watch=self.watch)
        more = self._question(cost, reserve, self.gpu_gib + MORE_GIB).search(watch=self.watch)
        with_more = more.best.samples_per_s if more.best else None
        held = Need.of(now.best.plan, cost) if now.best else now.need
        held = held and held.on(reserve)
        tensors_alone = Reserve(reserve.parts)
        hopeful = (
            now.best is None
            and self._question(cost, tensors_alone, self.gpu_gib).search(compared=False).best is not None
        )
        return Fit(self.kind.device, gpus, now.best, held, reserve, self.gpu_gib, question, with_more, hopeful)

    def _question(self, cost: CostModel, reserve: Reserve, gib: float) -> Question:
        context_mib = reserve.context_mib(gib * GIB_MIB)
        options = SearchOptions(
            task=self.options.task,
            lora_rank=self.options.lora_rank,
            document_tokens=self.options.document_tokens,
            offload_optimizer=self.options.offload_optimizer,
            num_nodes=cost.profiles.num_nodes,
            num_gpus_per_node=cost.profiles.gpus_per_node,
            memory_constraint=gib,
            context_mib=context_mib,
            settle_bsz=self.options.global_train_batch_size,
            seq_length=self.options.seq_length,
            max_cp_deg=self.options.max_cp_deg,
            device=self.kind.sheet,
        )
        asked = {"model_size": self.options.model_size, "seq_length": options.seq_length}
        model = Model(cost.given, self.options.tokens_of_a_sample)
        return Question(model, options, cost.reserving(context_mib, reserve.freed), reserve, asked)


def _measured(shape: ModelShape, options: FitOptions, folder: Path, note: Note) -> _Kind:
    """Prices from a folder of profiles, whose cluster may be another: the costs of its groups give those of others."""
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
    known = {cluster for _, cluster in clusters}
    largest = clusters[-1][1]
    device = device_of(*(meta for at in known if (meta := read_profile(folder / allreduce_name(*at))[1])))

    def model_on(nodes: int, gpus: int) -> CostModel:
        cluster = (nodes, gpus) if (nodes, gpus) in known else largest

        def there(name: str) -> Path | None:
            return folder / name if (folder / name).exists() else None

        return load(
            shape,
            nodes,
            gpus,
            _assumed(options),
            folder=folder,
            allreduce_bandwidth_config_path=there(allreduce_name(*cluster)),
            p2p_bandwidth_config_path=there(p2p_name(*cluster)),
            sp_time_path=there(sp_time_name(*cluster)),
            options=options.priced,
            note=note,
        )

    return _Kind(device, device.gpus_per_node or largest[1], model_on)


def _assumed(options: FitOptions) -> Assumptions:
    return SearchOptions(seq_length=options.seq_length).assumptions
