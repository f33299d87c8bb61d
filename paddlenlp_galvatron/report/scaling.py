"""A plan on another number of GPUs: which fields changed and why, and its speed and memory beside those before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.table import Table

from ..base.errors import Infeasible, UserError
from ..base.printing import table
from ..plan import Plan
from ..plan.scale import changes, scalings
from ..profiles.reserve import GIB_MIB
from ..search.engine import predicted
from .facts import PlanFacts
from .origin import OriginOptions, origin_of
from .why import Problem

OF_SEARCH = ("lower_bound_s", "gap")  # facts that only a search knows


@dataclass(frozen=True)
class Scaled:
    """A plan before and after, with its facts where they are known, else with the reason."""

    before: Plan
    after: Plan
    facts: tuple[PlanFacts, PlanFacts] | None
    why_not: str = ""


def scaled(plan: Plan, origin: OriginOptions, gpus: int, global_batch: int | None = None) -> Scaled:
    """The least changed plan that fits into memory; where memory is not known, the least changed one. Raises UserError,
    and Infeasible where none fits."""
    made = scalings(plan, gpus, global_batch)
    try:
        read, problem = origin_of(plan, origin)
        before = problem.facts_of(read)
        placed = [origin_of(_placed(one, problem), origin) for one in made]
        priced = [there.facts_of(one) for one, there in placed]
    except UserError as error:
        return Scaled(plan, replace(made[0], metadata={}), None, error.faults[0])
    for one in priced:
        if one.memory_mib <= one.budget_mib:
            told = predicted(one.prediction, 0.0)
            own = {"predicted": {name: value for name, value in told.items() if name not in OF_SEARCH}}
            return Scaled(plan, replace(one.plan, metadata=one.plan.metadata | own), (before, one))
    least = min(priced, key=lambda one: one.memory_mib)
    raise Infeasible(
        f"gpus: with these strategies {gpus} GPUs need {least.memory_mib / GIB_MIB:.1f} GiB each, of "
        f"{least.budget_mib / GIB_MIB:.4g}; take more GPUs, or let galvatron search --gpus {gpus} choose strategies"
    )


def _placed(plan: Plan, problem: Problem) -> Plan:
    """With the cluster that the plan is for in its metadata."""
    gpus, width = plan.world_size, problem.options.num_gpus_per_node
    nodes, each = (gpus // width, width) if gpus % width == 0 else (1, gpus)
    searched = plan.metadata.get("searched_from") or {}
    where = {"num_nodes": nodes, "num_gpus_per_node": each}
    options = {**(searched.get("options") or {}), **where, "world_size": gpus, "settle_bsz": plan.global_batch}
    if problem.options.context_mib is None:
        options.pop("context_mib", None)
    return replace(plan, metadata={"searched_from": {**searched, **where, "options": options}})


def printed(of: Scaled) -> Iterator[str | Table]:
    """Lines and a table, to be printed one below the other."""
    columns = ("field", f"{of.before.world_size} GPUs", f"{of.after.world_size} GPUs", "why")
    shown = table(*columns, left=columns)
    for change in changes(of.before, of.after):
        shown.add_row(change.field, change.before, change.after, change.why)
    yield shown
    yield "unchanged: each layer's degrees, ZeRO and recompute, and the samples of a GPU in a micro-batch"
    if of.facts:
        before, after = of.facts
        yield (
            f"memory of the fullest GPU: {before.memory_mib / GIB_MIB:.2f} -> {after.memory_mib / GIB_MIB:.2f} GiB of "
            f"{after.budget_mib / GIB_MIB:.4g}"
        )
        yield f"step: {before.prediction.time_s:.4g} -> {after.prediction.time_s:.4g} s"
        yield f"speed: {before.speed_words} -> {after.speed_words}"
    else:
        yield f"time and memory are left out: {of.why_not}"


def summary(of: Scaled) -> dict[str, Any]:
    """The same for programs: time in s, memory in MiB, before and after."""
    facts = of.facts or ()
    return {
        "changes": [asdict(change) for change in changes(of.before, of.after)],
        "time_s": [one.prediction.time_s for one in facts] or None,
        "memory_mib": [one.memory_mib for one in facts] or None,
        "samples_per_s": [one.prediction.samples_per_s for one in facts] or None,
    }
