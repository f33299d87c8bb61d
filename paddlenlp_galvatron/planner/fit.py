"""How many cards a training task needs, and how fast each number of cards is: one search a number, offline."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from ..base.errors import UserError
from ..base.limits import Positive, Ranks, Samples, Size
from ..cost_model import CostModel, derive, load
from ..options.model_options import SEQ, Model
from ..plan import ModelShape
from ..plan.strategy import Assumptions
from ..profiles.data_sheet import DataSheet, load_data_sheet
from ..profiles.dialects import Note
from ..profiles.files import allreduce_name, no_note, p2p_name, read_profile, sp_time_name
from ..profiles.reserve import GIB_MIB, Reserve, gpu_sheet, reserve_of
from .engine import Watch
from .options import BATCH, SearchOptions, TaskOptions
from .question import Question
from .result import Candidate, Need, SearchResult

DEVICE = "h100-80gb"  # where neither the user nor a profile names one
NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # numbers of nodes that are tried
FURTHER = 3  # numbers of cards shown beyond the least that fits
MORE_GIB = 8.0
_ALLREDUCE = r"allreduce_bandwidth_([1-9]\d{0,4})nodes_([1-9]\d{0,4})gpus_per_node\.json"
MOST_NUMBERS = 32  # of cards in one table


def _numbers(value: object) -> object:
    if isinstance(value, str):
        return value.replace(" ", "").split(",")
    return [value] if isinstance(value, int) else value


Cards = Annotated[tuple[Ranks, ...], BeforeValidator(_numbers), Field(min_length=1, max_length=MOST_NUMBERS)]


class FitOptions(TaskOptions):
    """The model, task and device."""

    model_size: str = Field(description="a preset's name, a config.json, or its folder")
    gpus: Cards | None = Field(
        None, description="numbers of cards, such as 8,16,32; unset: from the smallest number that fits upwards"
    )
    device: str | None = Field(
        None,
        description=f"data sheet of the nodes: name of a shipped one, or a file; unset: the profiles', else {DEVICE}",
    )
    memory_constraint: Positive | None = Field(None, description="memory of a GPU, GiB; unset: all that the device has")
    profiles: Path | None = Field(
        None, description="folder of measured profiles; unset: times and memory are derived from the data sheet"
    )
    seq_length: Size | None = Field(
        None, description=f"sequence length; unset: {SEQ}, or the model's positions where they are fewer"
    )
    global_train_batch_size: Samples = Field(BATCH, description="global batch size, samples")
    max_cp_deg: Ranks = Field(1, description="largest number of ranks over which context parallelism splits a sample")
    tokens: float = Field(
        1e9, gt=0, le=1e18, allow_inf_nan=False, description="number of tokens to train on, for the column of days"
    )

    def of(self, shape: ModelShape) -> FitOptions:
        """With the length of samples settled. Raises UserError where the model has no positions for it."""
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
    """The answer for one number of cards."""

    gpus: int
    best: Candidate | None  # the fastest plan within the bound
    held: Need | None  # by its plan, or by the one that needs least where none fits; None: no plan at all
    reserve: Reserve
    card_gib: float
    with_more: float | None  # samples/s with MORE_GIB more on each card; None: still nothing fits
    hopeful: bool = False  # nothing fits by its bound, but something by what tensors take

    @property
    def tensors_mib(self) -> float:
        """On the fullest card: of the plan, or of the one that needs least."""
        return self.held.tensors_mib if self.held else 0.0

    @property
    def bound_mib(self) -> float:
        """The most that it can take."""
        return self.held.enough_mib if self.held else self.reserve.fixed_mib

    @property
    def verdict(self) -> str:
        """`at risk`: only if the allocator holds less beside tensors than it did in published runs."""
        return "fits" if self.best else "at risk" if self.hopeful else "does not fit"


def sheet_of(options: FitOptions) -> DataSheet:
    """The data sheet that is named, or that of the device of the profiles. Raises UserError."""
    measured = None
    if options.device is None and options.profiles:
        metas = (read_profile(path)[1] for path in sorted(options.profiles.glob("allreduce_bandwidth_*.json")))
        measured = next((sheet for meta in metas if meta and (sheet := gpu_sheet(meta.fingerprint.device))), None)
    return measured or load_data_sheet(options.device or DEVICE)


def fit(
    shape: ModelShape, sheet: DataSheet, options: FitOptions, note: Note = no_note, watch: Watch | None = None
) -> list[Fit]:
    """A row a number of cards: those asked for, or from the least that fits; `options` are settled for the shape.

    `note` hears what was assumed of profiles, and of a card that is told larger than it is, `watch` how far each search
    is. Raises UserError for a number that is no whole number of nodes, or that the profiles say nothing of.
    """
    model_on = _measured(shape, sheet, options, note) if options.profiles else _derived(shape, sheet, options)
    size_gib = sheet.memory.value
    card_gib = min(options.memory_constraint or size_gib, size_gib)
    if (options.memory_constraint or 0.0) > size_gib:
        note(f"memory_constraint: {options.memory_constraint:g} GiB, but {sheet.device} has {size_gib:g}, which hold")
    row = _Row(shape, model_on, sheet, options, card_gib, watch)
    if options.gpus:
        return [row(gpus) for gpus in sorted(set(options.gpus))]
    return list(_from_the_least(sheet.gpus_per_node, row))


def _from_the_least(per_node: int, row: _Row) -> Iterator[Fit]:
    """Rows from the last number that does not fit to some beyond the first that does."""
    inside = [number for number in (1, 2, 4, 8, 16, 32) if number < per_node and per_node % number == 0]
    fitting, failed = 0, None
    for gpus in [*inside, *(nodes * per_node for nodes in NODES)]:
        if gpus < row.least_cards:
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
        if fitting > FURTHER:
            return
    if failed:
        yield failed


@dataclass(frozen=True)
class _Row:
    """The search on one number of cards."""

    shape: ModelShape
    model_on: Callable[[int, int], CostModel]  # nodes, cards of each -> prices
    sheet: DataSheet
    options: FitOptions
    card_gib: float
    watch: Watch | None

    @property
    def least_cards(self) -> float:
        """With fewer not even weights and optimizer states fit, split over all cards."""
        cost = self.model_on(1, 1)
        states = cost.state_bytes.weight + (0 if cost.task.frozen else cost.state_bytes.optimizer)
        return self.shape.parameters * states / 2**30 / self.card_gib

    def __call__(self, gpus: int) -> Fit:
        per_node = self.sheet.gpus_per_node
        nodes, cards = divmod(gpus, per_node)
        if nodes and cards:
            raise UserError(
                f"gpus: {gpus} are no whole number of nodes of {per_node} cards; give a multiple of {per_node}, "
                "or fewer"
            )
        cost = self.model_on(max(nodes, 1), cards or per_node)
        reserve = cost.reserve if cost.device else reserve_of(self.sheet.device, gpus)
        cost = cost.reserving(0.0, reserve.freed)
        now, more = (self._search(cost, reserve, gib) for gib in (self.card_gib, self.card_gib + MORE_GIB))
        with_more = more.best.samples_per_s if more.best else None
        held = Need.of(now.best.plan, cost) if now.best else now.need
        held = held and held.on(reserve)
        tensors_alone = Reserve(reserve.parts)
        hopeful = now.best is None and self._search(cost, tensors_alone, self.card_gib).best is not None
        return Fit(gpus, now.best, held, reserve, self.card_gib, with_more, hopeful)

    def _search(self, cost: CostModel, reserve: Reserve, gib: float) -> SearchResult:
        context_mib = reserve.context_mib(gib * GIB_MIB)
        options = SearchOptions(
            task=self.options.task,
            lora_rank=self.options.lora_rank,
            document_tokens=self.options.document_tokens,
            offload_optimizer=self.options.offload_optimizer,
            num_nodes=cost.num_nodes,
            num_gpus_per_node=cost.gpus_per_node,
            memory_constraint=gib,
            context_mib=context_mib,
            settle_bsz=self.options.global_train_batch_size,
            seq_length=self.options.seq_length,
            max_cp_deg=self.options.max_cp_deg,
        )
        asked = {"model_size": self.options.model_size, "seq_length": options.seq_length}
        model = Model(tuple(cost.models), self.options.tokens_of_a_sample)
        cost = cost.reserving(context_mib, reserve.freed)
        return Question(model, options, cost, reserve, asked).search(watch=self.watch)


def _derived(shape: ModelShape, sheet: DataSheet, options: FitOptions) -> Callable[[int, int], CostModel]:
    """Prices by arithmetic from the data sheet."""
    priced = _assumed(options), options.priced
    return lambda nodes, cards: derive(shape, sheet, nodes, cards, *priced)


def _measured(shape: ModelShape, sheet: DataSheet, options: FitOptions, note: Note) -> Callable[[int, int], CostModel]:
    """Prices from a folder of profiles, whose cluster may be another: what its groups cost tells that of others."""
    folder = options.profiles
    assert folder is not None
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

    def model_on(nodes: int, cards: int) -> CostModel:
        cluster = (nodes, cards) if (nodes, cards) in known else clusters[-1][1]

        def named(name: str) -> Path | None:
            return folder / name if (folder / name).exists() else None

        cost = load(
            shape,
            nodes,
            cards,
            _assumed(options),
            folder=folder,
            allreduce_bandwidth_config_path=named(allreduce_name(*cluster)),
            p2p_bandwidth_config_path=named(p2p_name(*cluster)),
            sp_time_path=named(sp_time_name(*cluster)),
            options=options.priced,
            note=note,
        )
        if (measured := gpu_sheet(cost.device)) and measured != sheet:
            note(f"profiles: measured on {cost.device}; size and peak of a card are those of --device {sheet.name}")
        return cost

    return model_on


def _assumed(options: FitOptions) -> Assumptions:
    return SearchOptions(seq_length=options.seq_length).assumptions
