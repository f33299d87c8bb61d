"""Which plans are searched: batches, micro-batches, stages, and what a layer or the vocabulary may do there.

What can run is decided by `plan.check` alone: every candidate passes its rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from ..plan import DataParallel, LayerStrategy, ModelShape, Plan, Schedule, UserError, VocabStrategy
from ..plan.check import find_faults
from ..plan.strategy import Assumptions
from .options import SearchOptions


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


def divisors(number: int) -> list[int]:
    """Divisors, rising."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


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

    def __init__(self, model: ModelShape, assumed: Assumptions, options: SearchOptions):
        self._one_layer = replace(model, layers=1)
        self._assumed = assumed
        self._options = options
        if faults := self._faults(1, 1, 1, False, 1, True):  # even of one rank with one sample: no strategy helps
            raise UserError(faults)
        self._fits = lru_cache(maxsize=None)(lambda *where: not self._faults(*where))

    def layers(self, family: PlanFamily) -> list[LayerStrategy]:
        """Strategies of one layer."""
        options = self._options
        return [
            LayerStrategy(degree, ulysses, consecutive, dp_type, recompute, context=context)
            for degree, ulysses, context in self._degrees(family, "tp")
            for consecutive in ((True, False) if self._strides(family, degree * context) else (True,))
            for dp_type in self._dp_types(family, degree, ulysses)
            for recompute in options.recomputes
        ]

    def vocabularies(self, family: PlanFamily) -> list[VocabStrategy]:
        """Strategies of the vocabulary layers."""
        return [
            VocabStrategy(degree, ulysses, dp_type, context=context)
            for degree, ulysses, context in self._degrees(family, "vtp")
            for dp_type in self._vocab_dp_types(family, degree, ulysses)
        ]

    def uniform(self, family: PlanFamily) -> Iterator[tuple[LayerStrategy, VocabStrategy]]:
        """One strategy for all layers, and its like for the vocabulary."""
        vocabularies = self.vocabularies(family)
        for layer in self.layers(family):
            for vocab in vocabularies:
                if vocab.axes == layer.axes:
                    yield layer, vocab

    def _degrees(self, family: PlanFamily, tensor: str) -> Iterator[tuple[int, bool, int]]:
        """Degrees, whether they are Ulysses, and degrees of context parallelism beside them, of layers (`tensor` "tp")
        or of the vocabulary ("vtp")."""
        options, size = self._options, family.stage_size
        for degree in divisors(size):
            if degree > options.max_tp_deg:
                return
            for context in divisors(size // degree):
                if context > (options.max_cp_deg if options.allows("cp") else 1):
                    break
                if degree * context < size and not options.allows("dp") and options.allows(tensor):
                    continue
                for ulysses in (False, True):
                    allowed = options.allows("sp" if ulysses else tensor) if degree > 1 else not ulysses
                    if allowed and self._fits(size, family.micro_batch, degree, ulysses, context, tensor == "tp"):
                        yield degree, ulysses, context

    def _strides(self, family: PlanFamily, ranks: int) -> bool:
        return not self._options.tp_consec and 1 < ranks < family.stage_size

    def _dp_types(self, family: PlanFamily, degree: int, ulysses: bool) -> list[DataParallel]:
        default = self._options.default_dp_type
        alone = degree == family.stage_size and not ulysses  # no other rank holds these weights
        if alone or default is DataParallel.ZERO3 or not self._options.allows("sdp"):
            return [default]
        return [default, DataParallel.ZERO3]

    def _vocab_dp_types(self, family: PlanFamily, degree: int, ulysses: bool) -> list[DataParallel]:
        alone, wanted = degree == family.stage_size and not ulysses, self._options.embed_sdp
        if wanted is None:
            return self._dp_types(family, degree, ulysses)
        return [DataParallel.ZERO3 if wanted and not alone else self._options.default_dp_type]

    def _faults(
        self, stage_size: int, micro_batch: int, degree: int, ulysses: bool, context: int, for_layer: bool
    ) -> list[str]:
        """Why no layer (or vocabulary) can have these degrees on such a stage."""
        one = Plan(
            world_size=stage_size,
            global_batch=micro_batch,
            micro_batches=1,
            stages=(1,),
            layers=(LayerStrategy(degree, ulysses, context=context),),
            vocab=VocabStrategy(degree, ulysses, context=context),
            assumed=self._assumed,
        )
        return find_faults(one, self._one_layer if for_layer else None)
