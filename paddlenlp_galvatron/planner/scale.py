"""A plan on another number of GPUs: the changed fields with reasons, and its facts before and after."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf, lcm, log

from galvatron_dp_core import Cancel

from ..base import GIB_MIB, Infeasible, UserError
from ..cost_model.facts import PlanFacts
from ..model import Recompute
from ..plan import Plan, even_stages, require_valid
from ..plan.fleet_layers import MODULES
from .even import EvenPlans
from .hints import LEAST_GAIN
from .origin import OriginOptions, origin_of
from .question import Question
from .result import Need, predicted
from .space import PlanFamily, suited

OF_SEARCH = ("lower_bound_s", "gap", "left_out_s")  # facts that only a search has


@dataclass(frozen=True)
class Scaled:
    """A plan before and after, with its facts, or the reason why they are unknown."""

    before: Plan
    after: Plan
    facts: tuple[PlanFacts, PlanFacts] | None
    why_not: str = ""
    hint: str = ""  # of a search that is likely to find a faster plan

    @property
    def changes(self) -> list[Change]:
        """The fields that differ, each with its reason."""
        return list(changes(self.before, self.after))


def scaled(
    plan: Plan, origin: OriginOptions, gpus: int, global_batch: int | None = None, relist: bool = False
) -> Scaled:
    """The least changed plan that fits into memory; if memory is unknown, the least changed plan. `relist`: choose the
    division and the recomputed layers again, as PaddleFleet can express them. Raises UserError, and Infeasible if none
    fits."""
    made = scalings(plan, gpus, global_batch)
    try:
        read, question = origin_of(plan, origin)
        facts_before = question.facts_of(read)
        placed = [origin_of(_placed(plan_made, question), origin) for plan_made in made]
        if relist:
            placed = [(_relisted(plan_made, there), there) for plan_made, there in placed]
        priced = [there.facts_of(plan_made) for plan_made, there in placed]
    except UserError as error:
        return Scaled(plan, replace(made[0], metadata={}), None, error.faults[0])
    for plan_made in priced:
        if plan_made.memory_mib <= plan_made.budget_mib:
            written = predicted(plan_made.prediction, 0.0)
            own_metadata = {"predicted": {name: value for name, value in written.items() if name not in OF_SEARCH}}
            gain = plan_made.prediction.samples_per_s / facts_before.prediction.samples_per_s
            slower = 1 - gain * plan.world_size / gpus
            device = f" --device {question.options.device}" if question.options.device else ""
            words = f"{question.model.name}{device} --gpus {gpus} --batch {plan_made.plan.global_batch}"
            hint = f"each GPU is {slower:.0%} slower; another plan is likely to be faster: galvatron search {words}"
            after = replace(plan_made.plan, metadata=plan_made.plan.metadata | own_metadata)
            return Scaled(plan, after, (facts_before, plan_made), hint=hint if slower > LEAST_GAIN else "")
    least, (_, there) = min(zip(priced, placed, strict=True), key=lambda plan_made: plan_made[0].memory_mib)
    need = Need.of(least.plan, there.cost).under(there.cost, there.options)
    raise Infeasible(
        f"gpus: with these strategies {gpus} GPUs need {need.enough_gib} GiB each, of "
        f"{least.budget_mib / GIB_MIB:.4g}; take more GPUs, or let galvatron search --gpus {gpus} choose strategies"
    )


def _placed(plan: Plan, question: Question) -> Plan:
    """The plan with its cluster in its metadata."""
    gpus, width = plan.world_size, question.options.num_gpus_per_node
    nodes, each = (gpus // width, width) if gpus % width == 0 else (1, gpus)
    searched = plan.metadata.get("searched_from") or {}
    cluster = {"num_nodes": nodes, "num_gpus_per_node": each}
    options = {**(searched.get("options") or {}), **cluster, "world_size": gpus, "settle_bsz": plan.global_batch}
    if question.options.context_mib is None:
        options.pop("context_mib", None)
    return replace(plan, metadata={"searched_from": {**searched, **cluster, "options": options}})


def _relisted(plan: Plan, question: Question) -> Plan:
    """The plan with the fastest division and lists of recomputed layers that PaddleFleet can express and that fit.
    Unchanged if none fits or activations are offloaded."""
    cost, family, layer = question.cost, PlanFamily.of(plan), max(plan.layers, key=lambda layer: layer.ep)
    even = EvenPlans("paddlefleet", question.model.shapes[0], cost, question.settled.budget_mib, plan)
    every = Recompute.NONE, Recompute.FULL, *MODULES
    of_types = [
        [replace(suited(layer, kind), recompute=each) for each in (every if kind.experts else every[:3])]  # no GATE_UP
        for kind in cost.models
    ]
    least_ms, best = inf, plan
    offloads = any(each.offload for each in plan.layers)
    for strategies in () if offloads else even.spaces(of_types, [plan.vocab], family):
        time_ms, _, _, division, choice = even.core(family, strategies).solve(least_ms, 0, Cancel(), 0.0)
        if division:
            least_ms, best = time_ms, strategies.plan(family, 0, division, choice, plan)
    return best


@dataclass(frozen=True, slots=True)
class Change:
    """A changed field of the plan's file with the reason."""

    field: str
    before: str
    after: str
    why: str


def scalings(plan: Plan, gpus: int, global_batch: int | None = None) -> list[Plan]:
    """The plan on `gpus` ranks, the least changed first: with its number of stages, then near numbers, and last a
    single stage instead of a pipeline. `global_batch`: unset: the plan's, or the nearest multiple of whole
    micro-batches. Raises UserError if there is none."""
    unit = lcm(*(strategy.ranks for strategy in (*plan.layers, plan.vocab)))
    counts = [pp for pp in range(1, len(plan.layers) + 1) if gpus % (pp * unit) == 0]
    if not counts:
        raise UserError(
            f"gpus: {gpus} GPUs are no multiple of the {unit} that each stage needs for its degrees; choose a multiple "
            f"of {unit}, or search a plan: galvatron search --gpus {gpus}"
        )
    counts.sort(key=lambda pp: (pp == 1 < plan.pipeline, abs(log(pp / plan.pipeline)), -pp))
    valid, faults = [], []
    for pp in counts:
        try:
            valid.append(_scaled(plan, gpus, pp, global_batch))
        except UserError as error:
            faults.append(error)
    if valid:
        return valid
    raise faults[0]


def _scaled(plan: Plan, gpus: int, pipeline: int, global_batch: int | None) -> Plan:
    """The plan with `pipeline` stages. Raises UserError."""
    chunks = plan.chunks if pipeline > 1 and len(plan.layers) >= pipeline * plan.chunks else 1
    stages = plan.stages
    if (pipeline, chunks) != (plan.pipeline, plan.chunks):
        joined, rest = divmod(plan.pipeline, pipeline)
        stages = (
            tuple(sum(stages[first : first + joined]) for first in range(0, plan.pipeline, joined))
            if plan.chunks == 1 and not rest
            else even_stages(len(plan.layers), pipeline * chunks)
        )
    micro_batch = plan.micro_batch * (gpus // pipeline) // plan.stage_size
    batch = _nearest(global_batch or plan.global_batch, micro_batch)
    if global_batch not in (None, batch):
        raise UserError(
            f"batch: {global_batch} is no multiple of the {micro_batch} samples of a micro-batch on {gpus} GPUs; "
            f"choose a multiple of {micro_batch}"
        )
    count = batch // micro_batch
    made = replace(plan, world_size=gpus, global_batch=batch, micro_batches=count, stages=stages, chunks=chunks)
    require_valid(made)
    return made


def _nearest(batch: int, micro_batch: int) -> int:
    """The multiple of a micro-batch that is nearest to a batch, at least one."""
    return micro_batch * max(1, round(batch / micro_batch))


def changes(original: Plan, changed: Plan) -> Iterator[Change]:
    """The fields that differ, each with its reason."""
    stage = changed.stage_size
    share = f"each GPU keeps its samples of a micro-batch, which has {changed.micro_batch}"
    is_nearest = changed.global_batch == _nearest(original.global_batch, changed.micro_batch)
    for field, name, why in (
        ("world_size", "world_size", "as asked"),
        ("pp_deg", "pipeline", f"{changed.world_size} GPUs are {changed.pipeline} times the {stage} of a stage"),
        ("virtual_pp_deg", "chunks", f"{changed.pipeline} stages of {len(changed.layers)} layers"),
        ("pp_division", "stages", "the same layers on another number of stages"),
        ("recompute_enc", "recomputed", "the fastest that fits in the new stages"),
        ("chunks", "micro_batches", share),
        ("global_bsz", "global_batch", f"the nearest for which {share}" if is_nearest else "as asked"),
    ):
        old, new = (_shown(getattr(plan, name)) for plan in (original, changed))
        if old != new:
            yield Change(field, old, new, why)
    degrees = (dict.fromkeys((*map(plan.dp, plan.layers), plan.dp(plan.vocab))) for plan in (original, changed))
    old, new = (", ".join(map(str, each)) for each in degrees)
    if old != new:
        yield Change("data parallel", old, new, f"the {stage} GPUs of a stage, divided by the other degrees of a layer")


def _shown(value: int | tuple[int, ...]) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
