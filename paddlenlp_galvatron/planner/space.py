"""Which plans are searched: batches, micro-batches, stages, and what a layer or the vocabulary may do there.

`plan.check` alone decides whether a plan can run: every candidate passes its rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd

import numpy as np

from ..base.errors import UserError
from ..cost_model import CostModel, LayerCost
from ..plan import DataParallel, LayerStrategy, ModelShape, Plan, Recompute, Schedule, VocabStrategy
from ..plan.check import BESIDE_EXPERTS, find_faults
from ..plan.mesh import Degrees, divisors
from ..plan.strategy import Assumptions, Experts
from .options import SearchOptions

# Tokens of a piece of the loss: so many that products are about as fast as of all tokens; more, where all of its logits
# take little memory.
PIECE_TOKENS = 2048
PIECE_LOGITS = 2**25  # 128 MiB in fp32


def cost_numbers(cost: LayerCost, freed: float | None) -> tuple[float, ...]:
    """A cost in the core's order. `freed`: as `CostOptions` has it."""
    passes_ms = cost.forward_ms, cost.backward_ms, cost.sync_ms
    return *passes_ms, cost.states_mib, cost.activation_mib, *((1 + (freed or 0.0)) * mib for mib in cost.workspace)


@dataclass(frozen=True, slots=True)
class PlanFamily:
    """Plans that share their batch, micro-batches, number of stages and schedule."""

    global_batch: int
    micro_batches: int
    stages: int
    schedule: Schedule
    world_size: int
    chunks: int = 1  # of layers a stage

    @classmethod
    def of(cls, plan: Plan) -> PlanFamily:
        """The one that a plan belongs to."""
        return cls(plan.global_batch, plan.micro_batches, plan.pipeline, plan.schedule, plan.world_size, plan.chunks)

    @property
    def stage_size(self) -> int:
        return self.world_size // self.stages

    @property
    def micro_batch(self) -> int:
        return self.global_batch // self.micro_batches

    def __str__(self) -> str:
        chunks = f" of {self.chunks} chunks" if self.chunks > 1 else ""
        return (
            f"batch {self.global_batch}, {self.micro_batches} micro-batches, {self.stages} stages{chunks}, "
            f"{self.schedule}"
        )


@dataclass(frozen=True, eq=False)
class Strategies:
    """The strategies of a family's plans. Families share them, so each is only equal to itself."""

    layers: Sequence[Sequence[LayerStrategy]]  # of each layer type
    vocabularies: Sequence[VocabStrategy]

    def have(self, plan: Plan, layer_types: Sequence[int]) -> bool:
        """Whether a plan's strategies are among them."""
        used = set(zip(plan.layers, layer_types, strict=True))
        return plan.vocab in self.vocabularies and all(layer in self.layers[kind] for layer, kind in used)

    def plan(
        self,
        family: PlanFamily,
        vocab: int,
        division: Sequence[int],
        choice: Sequence[int],
        bare: Plan,
    ) -> Plan:
        """The plan that the core's numbers stand for; `bare` gives what is the same for all plans of a search."""
        strategies = [layer for some in self.layers for layer in some]
        return replace(
            bare,
            global_batch=family.global_batch,
            micro_batches=family.micro_batches,
            stages=tuple(division),
            layers=tuple(strategies[number] for number in choice),
            vocab=self.vocabularies[vocab],
            schedule=family.schedule,
            chunks=family.chunks,
        )


def families(options: SearchOptions, world_size: int, layers: int) -> Iterator[PlanFamily]:
    """Every family of one chunk a stage that the options leave. A pipeline of one stage has no schedule: it is listed
    under one."""
    most = min(options.max_pp_deg, layers) if options.allows("pp") else 1
    for batch in options.batches:
        for micro_batches in divisors(batch):
            if options.settle_chunk not in (-1, micro_batches):
                continue
            for stages in divisors(world_size):
                if stages > most:
                    break
                schedules = options.schedules if stages > 1 else (options.pipeline_type or Schedule.ONE_F_ONE_B,)
                for schedule in schedules:
                    yield PlanFamily(batch, micro_batches, stages, schedule, world_size)


def interleaved_families(options: SearchOptions, world_size: int, layers: int) -> Iterator[PlanFamily]:
    """Every family that the options leave in which stages have several chunks."""
    for family in families(options, world_size, layers):
        if family.stages > 1 and family.schedule.of_chunks:
            for chunks in range(2, min(options.max_virtual_pp_deg, layers // family.stages) + 1):
                yield replace(family, chunks=chunks)


class Space:
    """Strategies of layers and vocabulary, by family. Raises UserError for a model that no strategy can train."""

    def __init__(self, model: ModelShape, assumed: Assumptions, options: SearchOptions, cost: CostModel | None = None):
        """With `cost`, strategies of experts are left out that another one beats."""
        self._one_layer = replace(model, layers=1)
        self._cost = cost
        self._assumed = assumed
        self._options = options
        if faults := self._faults(1, 1, Degrees(), True):  # even of one rank with one sample: no strategy helps
            raise UserError(faults)
        self._recomputes = [each for each in options.recomputes if not model.experts or each in BESIDE_EXPERTS]
        self._allowed = lru_cache(maxsize=None)(options.degrees)
        self._fits = lru_cache(maxsize=None)(lambda *where: not self._faults(*where))
        self._layers_of = lru_cache(maxsize=None)(self._every_layer)

    def layers(self, family: PlanFamily) -> list[LayerStrategy]:
        """Strategies of one layer."""
        layers = [
            layer for degrees in self._degrees(family, "tp") for layer in self._layers_of(family.stage_size, degrees)
        ]
        if not self._one_layer.experts:
            return layers
        halves = {again: self._experts(family, again) for again in self._recomputes}
        return [layer.having(half) for layer in layers for half in halves[layer.recompute]]

    def _experts(self, family: PlanFamily, recompute: Recompute) -> list[Experts]:
        """Strategies of a layer's experts. All that is counted of a layer is the sum of its halves', so that a half
        that another beats, or equals, in every number is in no plan that is better than all others."""
        size, model = family.stage_size, self._one_layer
        halves = [
            Experts(ep, etp, dp_type)
            for ep, etp in self._options.expert_degrees(size)
            if model.experts % ep == 0 and model.expert_size % etp == 0
            for dp_type in self._dp_types(size, ep * etp)
        ]
        if self._cost is None:
            return halves
        where = {"stage_size": size, "micro_batch": family.micro_batch}
        where |= {"micro_batches": family.micro_batches, "pipeline": family.stages}
        numbers = np.array([cost_numbers(self._cost.expert_cost(half, recompute, **where), None) for half in halves])
        no_more = (numbers[:, None] <= numbers).all(axis=2)  # [one, other]: one takes no more of anything
        beaten = (no_more & ~np.tril(no_more & no_more.T)).any(axis=0)  # of equal ones the first is left
        return [half for half, gone in zip(halves, beaten, strict=True) if not gone]

    def _every_layer(self, stage_size: int, degrees: Degrees) -> list[LayerStrategy]:
        return [
            LayerStrategy(**degrees.named, consecutive=consecutive, dp_type=dp_type, recompute=recompute)
            for consecutive in ((True, False) if self._strides(stage_size, degrees.ranks) else (True,))
            for dp_type in self._dp_types(stage_size, degrees.tp)
            for recompute in self._recomputes
        ]

    def vocabularies(self, family: PlanFamily) -> list[VocabStrategy]:
        """Strategies of the vocabulary layers."""
        return [
            VocabStrategy(**degrees.named, dp_type=dp_type, pieces=pieces)
            for degrees in self._degrees(family, "vtp")
            for dp_type in self._vocab_dp_types(family.stage_size, degrees.tp)
            for pieces in self._pieces(family, degrees.tp)
        ]

    def _pieces(self, family: PlanFamily, tp: int) -> list[int]:
        """Numbers of pieces of a rank's tokens: one, and as many as keep the logits of each small."""
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
            if samples % dp:  # most fail the check for this; it takes far less to see so
                continue
            # A degree that splits the fewest samples splits a multiple of them: one test suffices.
            if self._fits(size, dp, degrees, layer) or self._fits(size, samples, degrees, layer):
                yield degrees

    def _strides(self, stage_size: int, ranks: int) -> bool:
        return not self._options.tp_consec and 1 < ranks < stage_size

    def _dp_types(self, stage_size: int, tp: int) -> list[DataParallel]:
        default = self._options.default_dp_type
        alone = tp == stage_size  # no other rank holds these weights
        if alone or default is DataParallel.ZERO3 or not self._options.allows("sdp"):
            return [default]
        return [default, DataParallel.ZERO3]

    def _vocab_dp_types(self, stage_size: int, tp: int) -> list[DataParallel]:
        wanted = self._options.embed_sdp
        if wanted is None:
            return self._dp_types(stage_size, tp)
        return [DataParallel.ZERO3 if wanted and tp < stage_size else self._options.default_dp_type]

    def _faults(self, stage_size: int, micro_batch: int, degrees: Degrees, for_layer: bool) -> list[str]:
        """Why no layer (or vocabulary) can have these degrees on such a stage."""
        vocab = VocabStrategy(**degrees.named)
        one = Plan(
            world_size=stage_size,
            global_batch=micro_batch,
            micro_batches=1,
            stages=(1,),
            layers=(vocab.as_layer(),),
            vocab=vocab,
            assumed=self._assumed,
        )
        return find_faults(one, self._one_layer if for_layer else None)
