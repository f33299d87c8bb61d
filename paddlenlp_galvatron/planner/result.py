"""The result of a search: the best plan with its certificate, or the memory that one would need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import groupby
from math import ceil, floor, inf, log10
from typing import Any, Self

from ..base import GIB_MIB, MS_PER_S, GalvatronError, Infeasible, UserError, count
from ..cost_model import CostModel
from ..cost_model.costs import Prediction, StageMemory
from ..model import joint_fingerprint
from ..plan import Plan
from ..plan.strategy import gap_of
from ..profiles import Reserve
from .assumptions import assumptions_of
from .options import MOST_CHUNKS, SearchOptions
from .space import PlanFamily

ROUNDING = 1e-9  # largest relative difference between the core's sums and the cost model's
SHOWN_GAP = 0.0005  # share of a step; tables of gains show 0.1 %


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan and its cost."""

    plan: Plan
    prediction: Prediction  # its time and memory

    @property
    def time_s(self) -> float:
        """Predicted time of one step."""
        return self.prediction.time_s

    @property
    def samples_per_s(self) -> float:
        return self.prediction.samples_per_s

    @property
    def ms_per_sample(self) -> float:
        return MS_PER_S / self.samples_per_s

    @property
    def strategies(self) -> int:
        """Number of different strategies of layers."""
        return len(set(self.plan.layers))

    @property
    def segments(self) -> int:
        """Number of runs of layers with the same strategy."""
        return sum(1 for _ in groupby(self.plan.layers))

    def fits(self, device_mib: float) -> bool:
        """Whether the plan fits on devices of this size."""
        return all(stage.memory.total_mib <= device_mib * (1 + ROUNDING) for stage in self.prediction.stages)

    def parts_ms(self) -> dict[str, float]:
        """Step time by term, per sample, on the busiest stage."""
        plan, stages = self.plan, self.prediction.stages
        passes, sync = max(((plan.micro_batches * sum(s.passes_ms), s.sync_ms) for s in stages), key=lambda s: sum(s))
        waits = max(0.0, round(self.prediction.time_s * 1000 - passes - sync, 6))  # rounded: a single stage waits 0
        parts = {"forward and backward": passes, "gradient reduction and update": sync, "pipeline bubble": waits}
        return {name: ms / plan.global_batch for name, ms in parts.items()}

    def why_slower_than(self, best: Candidate) -> str:
        """The term of the step that lost most against the best plan."""
        parts, best_parts = self.parts_ms(), best.parts_ms()
        term = max(parts, key=lambda name: parts[name] - best_parts[name])
        slower = best.samples_per_s / self.samples_per_s - 1
        how = f"{slower:.1%} slower" if slower >= 0 else f"{-slower:.1%} faster, with more strategies"
        return f"{how}: {term} {parts[term]:.3g} ms per sample (best: {round(best_parts[term], 6):.3g})"


@dataclass(frozen=True, slots=True)
class Need:
    """Memory of a plan on the device with the highest peak, and its bottleneck there. If nothing fits: of the smallest
    plan."""

    plan: Plan
    prediction: Prediction
    stage: int  # the stage that needs most
    term: str  # the largest term of the stage's memory
    term_mib: float  # its size on a device
    part: str  # layer of the stage that has most of the term
    part_mib: float  # memory of the term in that layer
    enough_mib: float  # size of a device on which it fits

    @classmethod
    def of(cls, plan: Plan, cost: CostModel) -> Need:
        prediction = cost.predict(plan)
        totals = [stage.memory.total_mib for stage in prediction.stages]
        stage = totals.index(max(totals))
        memory = prediction.stages[stage].memory
        parts = dict(zip(_part_names(plan, stage), cost.stage_parts(plan, stage), strict=True))
        held = [n for chunk, n in enumerate(cost.in_flight(plan, stage)) for _ in cost.chunk_parts(plan, stage, chunk)]

        def most(mib: Mapping[str, float]) -> tuple[str, float]:
            return max(mib.items(), key=lambda item: item[1])

        term, term_mib = most(
            {
                "model states": memory.states_mib,
                "activations": memory.activations_mib,
                "working memory": memory.working_mib,
                "reserve": memory.context_mib,
            }
        )
        in_term: Mapping[str, Mapping[str, float]] = {
            "model states": {name: module.states_mib for name, module in parts.items()},
            "activations": {
                name: count * module.activation_mib for count, (name, module) in zip(held, parts.items(), strict=True)
            },
            "working memory": {name: module.workspace.total_mib for name, module in parts.items()},
            "reserve": {"every layer": memory.context_mib},
        }
        return cls(plan, prediction, stage, term, term_mib, *most(in_term[term]), memory.total_mib)

    def on(self, reserve: Reserve) -> Need:
        """The same need on devices with this reserve, which grows with their size."""
        tensors_mib = self.memory.total_mib - self.memory.context_mib
        return replace(self, enough_mib=reserve.bound_mib(tensors_mib, self.memory.working_mib))

    def under(self, cost: CostModel, options: SearchOptions) -> Need:
        """The same need with the devices' reserve, unless the user has set it."""
        by_device = cost.profiles.reserve.sets(cost.options.context_mib, options.memory_gib * GIB_MIB)
        return self.on(cost.profiles.reserve) if by_device else self

    @property
    def memory(self) -> StageMemory:
        """Memory on a device of the stage that needs most."""
        return self.prediction.stages[self.stage].memory

    @property
    def tensors_mib(self) -> float:
        """The estimate of its tensors."""
        return self.memory.tensors_mib

    @property
    def binds(self) -> str:
        """The largest term and its stage."""
        return f"{self.term} on stage {self.stage}" if self.plan.pipeline > 1 else self.term

    @property
    def enough_gib(self) -> str:
        """A sufficient memory_constraint, rounded up at the fourth digit."""
        gib = self.enough_mib / 1024
        digits = max(2, 3 - floor(log10(gib))) if gib > 0 else 2
        return f"{ceil(gib * 10**digits) / 10**digits:.{digits}f}"

    def __str__(self) -> str:
        layers = f"layers {self.plan.layer_spans(self.stage)}"
        largest = f"; largest: {self.part}, {self.part_mib / 1024:.2f} GiB" if self.part_mib < self.term_mib else ""
        return (
            f"the smallest plan needs {self.enough_gib} GiB per GPU, {self.term_mib / 1024:.2f} GiB of it "
            f"{self.term} on stage {self.stage} ({layers}{largest})"
        )


def _part_names(plan: Plan, stage: int) -> list[str]:
    """Names in the order of `CostModel.stage_parts`."""
    names = []
    for chunk in range(plan.chunks):
        layers = [f"layer {layer}" for layer in plan.chunk_layers(stage, chunk)]
        if plan.is_first(stage, chunk):
            names += ["embedding and LM head" if plan.is_last(stage, chunk) else "embedding", *layers]
        elif plan.is_last(stage, chunk):
            names += [*layers, "LM head"]
        else:
            names += [f"the input of chunk {chunk}" if plan.chunks > 1 else "the stage's input", *layers]
    return names


class FamilyOutcome(IntEnum):
    """The outcome of a family of plans; the highest of a family searched in parts."""

    NOT_DIVISIBLE = 0  # no strategy splits batch, heads and ranks evenly
    OUT_OF_MEMORY = 1
    OUT_OF_BOUND = 2  # no plan of it beats the incumbents
    LEFT_OUT = 3  # of several chunks: tried in short, or not at all
    SOLVED = 4  # searched to the end
    GIVEN_UP = 5  # left with a gap: too little effort or memory, or resharding costs violate the triangle inequality

    @property
    def words(self) -> str:
        """The outcome in words."""
        return {
            FamilyOutcome.NOT_DIVISIBLE: "divisibility: batch, heads and ranks do not split evenly",
            FamilyOutcome.OUT_OF_MEMORY: "memory: no plan of it fits",
            FamilyOutcome.OUT_OF_BOUND: "bound: no plan of it beats the best found",
            FamilyOutcome.LEFT_OUT: "interleaving: left out, or after a short search",
            FamilyOutcome.SOLVED: "searched to the end",
            FamilyOutcome.GIVEN_UP: "left with a gap",
        }[self]


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best plan with its certificate, or the memory that a plan would need."""

    best: Candidate | None  # the simplest one within the tolerance
    lower_bound_s: float  # lower bound for plans of the best one's batch, and per sample for other batches
    search_time_s: float
    outcomes: Mapping[PlanFamily, FamilyOutcome]  # solved, or why not
    bounds_s: Mapping[PlanFamily, float] = field(default_factory=dict)  # least step times of rejected families
    runners_up: tuple[Candidate, ...] = ()  # the best of other families, if top_k asks for them
    need: Need | None = None  # set where nothing fits
    fastest: Candidate | None = None  # fastest plan at the best batch
    uniform: Candidate | None = None  # the fastest of that batch with one strategy for all layers
    uniform_bound_s: float | None = None  # no such plan takes less; infinite: none fits; None: it was not searched
    too_wide: int = 0  # families with too many strategies of layers, left out
    stopped: bool = False  # stopped early by its time limit or a signal
    left_out_s: float = inf  # lower bound of the interleaved families that `lower_bound_s` excludes

    @property
    def left_out(self) -> list[str]:
        """Notes on the families that a limit has left out."""
        wide = f"{self.too_wide} families of plans have too many strategies of layers, and are left with a gap"
        notes = [f"max_cp_deg, max_tp_deg, max_ep_deg: {wide}; lower one of these"] if self.too_wide else []
        if self.left_out_s < self.time_s < inf:
            families = count([*self.outcomes.values()].count(FamilyOutcome.LEFT_OUT), "family", "families")
            most = gap_of(self.left_out_s, self.time_s)
            notes.append(
                f"max_virtual_pp_deg: {families} of interleaved plans not searched to the end "
                f"may hold one of up to {most:.1%} less time; give {MOST_CHUNKS} to search all"
            )
        return notes

    @property
    def plan(self) -> Plan:
        """The best plan. Raises Infeasible."""
        return self.require().plan

    @property
    def time_s(self) -> float:
        """Predicted time of one step; infinite where nothing fits."""
        return self.best.time_s if self.best else inf

    @property
    def gap(self) -> float:
        """Fraction of the best plan's time by which the optimum may be faster; 0: it is the optimum."""
        return gap_of(self.lower_bound_s, self.best.time_s) if self.best else 0.0

    @property
    def fastest_gap(self) -> float:
        """The gap of the fastest plan; 0: the search was taken to its end."""
        return gap_of(self.lower_bound_s, self.fastest.time_s) if self.fastest else 0.0

    @property
    def uniform_gap(self) -> float:
        """The gap of the plans with one strategy for all layers."""
        return gap_of(self.uniform_bound_s or 0.0, self.uniform.time_s) if self.uniform else 0.0

    @property
    def layer_wise_gain(self) -> float | None:
        """The share by which the fastest plan is faster than the best one with one strategy for all layers; None: no
        such plan is known."""
        return self.uniform.time_s / self.fastest.time_s - 1 if self.uniform and self.fastest else None

    @property
    def given_up(self) -> int:
        """Number of families that were left with a gap."""
        return sum(outcome is FamilyOutcome.GIVEN_UP for outcome in self.outcomes.values())

    @property
    def undecided(self) -> bool:
        """Whether no plan was found although one may exist."""
        return self.best is None and bool(self.stopped or self.given_up)

    def outcome(self, family: PlanFamily) -> str:
        """The outcome of a family, for people."""
        outcome = self.outcomes[family]
        bound = f" (at least {self.bounds_s[family]:.4g} s a step)" if outcome is FamilyOutcome.OUT_OF_BOUND else ""
        return outcome.words + bound

    def naming_model(self, asked: Mapping[str, Any]) -> Self:
        """The result with the model's options, as the user gave them, in the record of the search in the best plan's
        file."""
        if self.best is None:
            return self
        plan = self.best.plan
        searched = plan.metadata["searched_from"] | {"model_options": dict(asked)}
        plan = replace(plan, metadata=plan.metadata | {"searched_from": searched})
        return replace(self, best=replace(self.best, plan=plan))

    def so_far(self, interrupted: bool) -> str:
        """A note on the answer of a search that a signal or its limit of time ended. Raises KeyboardInterrupt or
        UserError where it had found no plan."""
        why = "interrupted" if interrupted else "time_limit"
        if self.best is None and interrupted:
            raise KeyboardInterrupt("no plan was found yet, so none is written")
        self.require()
        return f"{why}: this is the best plan so far; the fastest takes at most {self.gap:.2%} less time"

    def require_in(self, seconds: float) -> Candidate:
        """The best plan of a search of `seconds`. Raises GalvatronError where it found none."""
        if self.undecided:
            raise GalvatronError(f"no plan was found in {seconds:.2g} s; galvatron search has no limit of time")
        return self.require()

    def require(self) -> Candidate:
        """The best plan. Raises Infeasible, which names the least memory that would do, or UserError where the search
        ended before any plan was found."""
        if self.best is None:
            if self.stopped:
                raise UserError("time_limit: no plan was found in this time; give more seconds, or leave it out")
            if self.given_up:
                raise UserError(
                    f"search_space: too wide: {self.given_up} of {len(self.outcomes)} families of plans were given up "
                    "before one was found; lower max_tp_deg or max_pp_deg, leave tp_consec at 1, or raise effort"
                )
            if self.need is None:
                raise Infeasible("no plan fits: no strategy splits batch, heads and ranks evenly")
            raise Infeasible(f"no plan fits: {self.need}; use more GPUs")
        return self.best


def documented(
    best: Candidate, cost: CostModel, options: SearchOptions, lower_bound_s: float, left_out_s: float
) -> Candidate:
    """The plan with its "predicted" and "searched_from"."""
    metadata = {
        "predicted": predicted(best.prediction, lower_bound_s, left_out_s),
        "searched_from": {
            "model": cost.given[0].name,
            "model_fingerprint": joint_fingerprint(cost.given),
            "num_nodes": cost.profiles.num_nodes,
            "num_gpus_per_node": cost.profiles.gpus_per_node,
            "memory_constraint_gb": options.memory_gib,
            "device": cost.profiles.device.model_dump(exclude_none=True),
            "profiles": [file.summary() for file in cost.profiles.files],
            "assumptions": {name: value._asdict() for name, value in assumptions_of(options, cost).items()},
            "options": options.model_dump(mode="json", exclude_unset=True) | (cost.load._asdict() if cost.load else {}),
        },
    }
    return Candidate(replace(best.plan, metadata=metadata), best.prediction)


def predicted(prediction: Prediction, lower_bound_s: float, left_out_s: float = inf) -> dict[str, Any]:
    """The strategy file's "predicted": step time, certificate, and each stage's times and memory."""
    return {
        "time_s": prediction.time_s,
        "lower_bound_s": lower_bound_s,
        "gap": gap_of(lower_bound_s, prediction.time_s),
        **({"left_out_s": left_out_s} if left_out_s < prediction.time_s else {}),
        "samples_per_s": prediction.samples_per_s,
        "stages": [stage.summary() for stage in prediction.stages],
    }
