"""The search space: batches, micro-batches, stages, and the strategies of layers and vocabulary.

Only `plan.check` decides whether a plan can run: every candidate passes its rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain, product
from math import gcd
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..base.errors import UserError
from ..cost_model import CostModel, LayerCost, StageSetting
from ..model.layer import PARTLY
from ..plan import DataParallel, LayerStrategy, ModelShape, Plan, Recompute, Schedule, VocabStrategy
from ..plan.check import MOE_RECOMPUTE, find_faults
from ..plan.mesh import Degrees, divisors
from ..plan.strategy import Assumptions, Experts, runs
from .options import SearchOptions

Choice = TypeVar("Choice")
States = tuple[DataParallel, int | None]  # data parallelism, and the number of ranks over which ZeRO shards
# Tokens of a piece of the loss: enough for products nearly as fast as of all tokens; more if the logits take little
# memory.
PIECE_TOKENS = 2048
PIECE_LOGITS = 2**25  # 128 MiB in fp32
MOST_RUNS = 8  # runs of one layer type in the core
MOST_PERIOD = 8  # layers after which types repeat
# Default chunks: this many of the largest numbers whose largest chunk has at most this many times the mean of layers.
COUNTS, UNEVEN = 3, 1.1


def cost_numbers(cost: LayerCost, freed: float | None) -> tuple[float, ...]:
    """A cost in the core's order. `freed`: see `CostOptions`."""
    times_ms = *cost.passes_ms, cost.sync_ms
    return *times_ms, cost.states_mib, cost.activation_mib, *((1 + (freed or 0.0)) * mib for mib in cost.workspace)


def unbeaten(choices: Sequence[Choice], numbers: NDArray[np.float64]) -> list[Choice]:
    """The choices that no other dominates in all numbers of their costs [choices, numbers]; dominated choices never
    improve a plan."""
    no_more = (numbers[:, None] <= numbers).all(axis=2)  # [first, second]: first is at most second in every number
    beaten = (no_more & ~np.tril(no_more & no_more.T)).any(axis=0)  # keeps the first of equal strategies
    return [choice for choice, gone in zip(choices, beaten, strict=True) if not gone]


@dataclass(frozen=True, slots=True)
class PlanFamily:
    """Plans that share their batch, micro-batches, number of stages and schedule."""

    global_batch: int
    micro_batches: int
    stages: int
    schedule: Schedule
    world_size: int
    chunks: int = 1  # chunks of layers a stage

    @classmethod
    def of(cls, plan: Plan) -> PlanFamily:
        """The family of a plan."""
        return cls(plan.global_batch, plan.micro_batches, plan.pipeline, plan.schedule, plan.world_size, plan.chunks)

    @property
    def stage_size(self) -> int:
        return self.world_size // self.stages

    @property
    def micro_batch(self) -> int:
        return self.global_batch // self.micro_batches

    @property
    def setting(self) -> StageSetting:
        """The setting of any of its stages."""
        return StageSetting(self.stage_size, self.micro_batch, self.micro_batches, self.stages)

    def __str__(self) -> str:
        chunks = f" of {self.chunks} chunks" if self.chunks > 1 else ""
        return (
            f"batch {self.global_batch}, {self.micro_batches} micro-batches, {self.stages} stages{chunks}, "
            f"{self.schedule}"
        )


def without_experts(layer: LayerStrategy) -> LayerStrategy:
    """The strategy for a dense layer."""
    return replace(layer, ep=1, etp=1, experts_dp_type=None)


def suited(layer: LayerStrategy, model: ModelShape) -> LayerStrategy:
    """The strategy for this kind of layer."""
    return layer if model.experts else without_experts(layer)


class LayerRun(NamedTuple):
    """Consecutive layers of one type, or periods of alternating types. A unit, a layer or a period, is in one stage and
    has one strategy."""

    types: tuple[int, ...]  # types of the layers of a unit
    start: int  # the first layer
    units: int


@lru_cache(maxsize=100)
def runs_of(layer_types: tuple[int, ...], skipped: int = 0) -> tuple[LayerRun, ...]:
    """The runs after the first layers, counted from there; runs of periods if there are too many for the core."""
    types = layer_types[skipped:]
    single = tuple(LayerRun((kind,), span.start, len(span)) for span, kind in runs(types))
    if len(single) <= MOST_RUNS:
        return single
    for period in range(2, min(MOST_PERIOD, len(types)) + 1):
        if types[period:] == types[:-period]:
            units = len(types) // period
            rest = runs_of(types, units * period)
            return LayerRun(types[:period], 0, units), *(run._replace(start=run.start + units * period) for run in rest)
    return single


@dataclass(frozen=True, eq=False)
class Strategies:
    """The strategies of a family's plans. Shared between families and compared by identity.

    Dense layers at the start may be priced as part of the embedding: `prefixes` are their strategies. They are then in
    the first stage, with at least one other layer, and the core sees the layers after them. Likewise an MTP layer may
    be part of the LM head: `suffixes`.
    """

    layers: Sequence[Sequence[LayerStrategy]]  # of each run of layers of a type that the core sees
    vocabularies: Sequence[VocabStrategy]
    prefixes: Sequence[tuple[LayerStrategy, ...]] = ((),)
    suffixes: Sequence[tuple[LayerStrategy, ...]] = ((),)  # strategies with the token layout of all `vocabularies`
    most_first: int | None = None  # layers of the first stage; None: any number
    units: Sequence[Sequence[ModelShape]] = ()  # kinds of a unit's layers for each run; (): units of one layer

    @property
    def in_front(self) -> int:
        """Layers that are priced with the embedding."""
        return len(self.prefixes[0])

    def runs(self, layer_types: tuple[int, ...]) -> tuple[LayerRun, ...]:
        """The runs of layers that the core sees."""
        return runs_of(layer_types[: len(layer_types) - len(self.suffixes[0])], self.in_front)

    @property
    def alike(self) -> bool:
        """Whether layers have no choice."""
        return max(map(len, self.layers)) == 1

    @property
    def ends(self) -> list[tuple[VocabStrategy, tuple[LayerStrategy, ...], tuple[LayerStrategy, ...]]]:
        """(vocabulary, dense prefix, MTP suffix); the core sees each of these as one vocabulary strategy."""
        return list(product(self.vocabularies, self.prefixes, self.suffixes))

    def can_divide(self, family: PlanFamily, layer_types: tuple[int, ...]) -> bool:
        """Whether the stages of a family can divide the layers; interleaving needs a single run of layers. Only
        interleaved families count MTP as part of the LM head."""
        fits = len(self.layers) == 1 if family.chunks > 1 else not self.suffixes[0]
        return fits and sum(run.units for run in self.runs(layer_types)) >= family.stages * family.chunks

    def _of_units(self) -> list[list[tuple[LayerStrategy, ...]]]:
        """The strategies of a unit's layers, for each run."""
        if not self.units:
            return [[(layer,) for layer in choices] for choices in self.layers]
        of_units = zip(self.units, self.layers, strict=True)
        return [[tuple(suited(layer, kind) for kind in unit) for layer in choices] for unit, choices in of_units]

    def have(self, plan: Plan, layer_types: tuple[int, ...]) -> bool:
        """Whether a plan uses only these strategies."""
        first, skipped, stop = plan.stages[0], self.in_front, len(layer_types) - len(self.suffixes[0])
        if (self.most_first is not None and first > self.most_first) or (skipped and first <= skipped):
            return False
        ends_fit = (plan.vocab, plan.layers[:skipped], plan.layers[stop:]) in self.ends
        starts = {len(layer_types)}
        for run, choices in zip(self.runs(layer_types), self._of_units(), strict=True):
            width, begin = len(run.types), skipped + run.start
            of_run = range(begin, begin + width * run.units, width)
            starts |= set(of_run)
            ends_fit = ends_fit and {plan.layers[start : start + width] for start in of_run} <= set(choices)
        return ends_fit and starts >= set(accumulate(plan.stages))

    def plan(self, family: PlanFamily, vocab: int, division: Sequence[int], choice: Sequence[int], bare: Plan) -> Plan:
        """The plan of the core's numbers; `bare` has the fields that all plans of a search share."""
        of_units = [unit for choices in self._of_units() for unit in choices]
        units, (of_vocab, prefix, suffix) = [of_units[number] for number in choice], self.ends[vocab]
        ends = [0, *accumulate(map(len, units))]  # layers up to each unit
        stages = [ends[stop] - ends[stop - count] for count, stop in zip(division, accumulate(division), strict=True)]
        stages[-1] += len(suffix)
        return replace(
            bare,
            global_batch=family.global_batch,
            micro_batches=family.micro_batches,
            stages=(len(prefix) + stages[0], *stages[1:]),
            layers=(*prefix, *chain(*units), *suffix),
            vocab=of_vocab,
            schedule=family.schedule,
            chunks=family.chunks,
        )


def families(options: SearchOptions, world_size: int, layers: int) -> Iterator[PlanFamily]:
    """Every family with one chunk a stage that the options allow. With one stage or one micro-batch all schedules are
    equal: only one is listed."""
    most = min(options.max_pp_deg, layers) if options.allows("pp") else 1
    for batch in options.batches:
        for micro_batches in divisors(batch):
            if options.settle_chunk not in (-1, micro_batches):
                continue
            for stages in divisors(world_size):
                if stages > most:
                    break
                schedules = options.schedules
                if stages == 1 or micro_batches == 1:
                    schedules = (options.pipeline_type or Schedule.ONE_F_ONE_B,)
                for schedule in schedules:
                    yield PlanFamily(batch, micro_batches, stages, schedule, world_size)


def interleaved_families(options: SearchOptions, world_size: int, layers: int) -> Iterator[PlanFamily]:
    """Every family with several chunks a stage that the options allow. By default only numbers of chunks that divide
    layers almost evenly and micro-batches that are a multiple of the stages, as in Megatron-LM."""
    asked = options.max_virtual_pp_deg is not None
    for family in families(options, world_size, layers):
        if family.stages == 1 or not family.schedule.of_chunks or (family.micro_batches % family.stages and not asked):
            continue
        counts = range(2, min(options.most_chunks, layers // family.stages) + 1)
        parts = [family.stages * chunks for chunks in counts]
        even = [number // family.stages for number in parts if -(-layers // number) * number <= UNEVEN * layers]
        for chunks in counts if asked else even[-COUNTS:]:
            yield replace(family, chunks=chunks)


class Space:
    """Strategies of layers and vocabulary, by family. Raises UserError for a model that no strategy can train."""

    def __init__(
        self,
        model: ModelShape,
        assumed: Assumptions,
        options: SearchOptions,
        cost: CostModel | None = None,
        layer_type: int = 0,
    ):
        """List the strategies; with `cost`, without dominated strategies of experts."""
        self._one_layer = replace(model, layers=1)
        self._cost, self._layer_type = cost, layer_type
        self._assumed = assumed
        self._options = options
        if faults := self._faults(1, 1, Degrees(), True):  # even of one rank with one sample: no strategy helps
            raise UserError(faults)
        taken = MOE_RECOMPUTE if model.experts else (Recompute.NONE, Recompute.FULL, Recompute.SUBLAYER, *PARTLY)
        self._recomputes = [each for each in options.recomputes if each in taken]
        self._allowed = lru_cache(maxsize=None)(options.degrees)
        self._fits = lru_cache(maxsize=None)(lambda *where: not self._faults(*where))
        self._layers_of = lru_cache(maxsize=None)(self._every_layer)

    def layers(self, family: PlanFamily) -> list[LayerStrategy]:
        """Strategies of one layer."""
        layers = [layer for split in self._degrees(family, "tp") for layer in self._layers_of(family.stage_size, split)]
        layers = [*layers, *self._offloaded(layers, family)]
        if not self._one_layer.experts:
            return layers
        halves = {recompute: self._experts(family, recompute) for recompute in {layer.recompute for layer in layers}}
        return [layer.having(half) for layer in layers for half in halves[layer.recompute]]

    def _offloaded(self, layers: Sequence[LayerStrategy], family: PlanFamily) -> Iterator[LayerStrategy]:
        """The same layers with as many offloaded activations as their passes hide."""
        for layer in layers if self._options.offload_activations else ():
            if layer.recompute in (Recompute.NONE, Recompute.FULL):
                hidden = self._cost.hidden_percent(layer, family.setting, self._layer_type) if self._cost else 100
                if hidden:
                    yield replace(layer, offload=hidden)

    def _experts(self, family: PlanFamily, recompute: Recompute) -> list[Experts]:
        """Strategies of a layer's experts that no other dominates. A layer's costs are the sums of its two halves'
        costs, so a dominated half never improves a plan, at any percentage of offloaded activations."""
        size, model = family.stage_size, self._one_layer
        halves = [
            Experts(ep, etp, *states)
            for ep, etp in self._options.expert_degrees(size)
            if model.experts % ep == 0 and model.expert_size % etp == 0
            for states in self._states(size, ep * etp)
        ]
        if self._cost is None or self._options.trainer != "galvatron":  # other trainers cannot have every half
            return halves
        costs = [self._cost.expert_cost(half, recompute, family.setting, self._layer_type) for half in halves]
        return unbeaten(halves, np.array([cost_numbers(cost, None) for cost in costs]))

    def _every_layer(self, stage_size: int, degrees: Degrees) -> list[LayerStrategy]:
        strides = not self._options.tp_consec
        return [
            LayerStrategy(
                **degrees.named, consecutive=consecutive, dp_type=dp_type, recompute=recompute, sharding=sharding
            )
            for consecutive in ((True, False) if strides and 1 < degrees.ranks < stage_size else (True,))
            for dp_type, sharding in self._states(stage_size, degrees.tp, 1 if not consecutive else degrees.tp)
            for recompute in self._recomputes
        ]

    def vocabularies(self, family: PlanFamily) -> list[VocabStrategy]:
        """Strategies of the vocabulary layers."""
        return [
            VocabStrategy(**degrees.named, dp_type=dp_type, sharding=sharding, pieces=pieces)
            for degrees in self._degrees(family, "vtp")
            for dp_type, sharding in self._vocab_states(family.stage_size, degrees.tp)
            for pieces in self._pieces(family, degrees.tp)
        ]

    def _pieces(self, family: PlanFamily, tp: int) -> list[int]:
        """Numbers of pieces of a rank's tokens: one, and as many as keep each piece's logits small."""
        tokens = family.micro_batch * (self._assumed.seq_length or 0) * tp // family.stage_size
        columns = self._one_layer.padded_vocab_size(tp) // tp
        pieces = -(-tokens // max(PIECE_TOKENS, PIECE_LOGITS // columns))
        return [1, pieces] if pieces > 1 and self._options.trainer == "galvatron" else [1]

    def _degrees(self, family: PlanFamily, tensor: str) -> Iterator[Degrees]:
        """Degrees of layers (`tensor` "tp") or of the vocabulary ("vtp")."""
        size = family.stage_size
        samples = gcd(family.micro_batch, size)  # a divisor of the ranks divides a micro-batch as it divides these
        for degrees in self._allowed(size, tensor):
            dp, layer = size // degrees.ranks, tensor == "tp"
            if samples % dp:  # cheap test that most candidates fail
                continue
            # A degree that splits the fewest samples splits a multiple of them: one test suffices.
            if self._fits(size, dp, degrees, layer) or self._fits(size, samples, degrees, layer):
                yield degrees

    def _states(self, stage_size: int, split: int, apart: int | None = None) -> list[States]:
        """Choices for weights that `split` ranks hold together. Ranks with the same weights are `apart` (default
        `split`) from each other."""
        default = self._options.default_dp_type
        alone = split == stage_size  # no other rank holds these weights
        searched = not alone and default is not DataParallel.ZERO3 and self._options.allows("sdp")
        types = [default, DataParallel.ZERO3] if searched else [default]
        shardings = self._options.shardings(stage_size // split, apart or split)
        whole: list[int | None] = [None]
        return [(kind, size) for kind in types for size in (whole if kind is DataParallel.DDP else shardings)]

    def _vocab_states(self, stage_size: int, tp: int) -> list[States]:
        wanted, states = self._options.embed_sdp, self._states(stage_size, tp)
        if wanted is None:
            return states
        dp_type = DataParallel.ZERO3 if wanted and tp < stage_size else self._options.default_dp_type
        return [each for each in states if each[0] is dp_type] or [(dp_type, None)]

    def _faults(self, stage_size: int, micro_batch: int, degrees: Degrees, for_layer: bool) -> list[str]:
        """The faults of these degrees for a layer (or the vocabulary) on such a stage."""
        vocab = VocabStrategy(**degrees.named)
        plan = Plan(
            world_size=stage_size,
            global_batch=micro_batch,
            micro_batches=1,
            stages=(1,),
            layers=(vocab.as_layer(),),
            vocab=vocab,
            assumed=self._assumed,
        )
        return find_faults(plan, self._one_layer if for_layer else None)
