"""A plan on another number of GPUs: which fields changed and why, and its speed and memory beside those before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.table import Table

from ..base.errors import Infeasible, UserError
from ..cost_model import Prediction
from ..plan import Plan
from ..plan.scale import changes, scalings
from ..search.engine import predicted
from .figures import GIB_MIB, speed_words
from .origin import OriginOptions, origin_of
from .why import Problem

OF_SEARCH = ("lower_bound_s", "gap")  # what only a search knows of a plan


@dataclass(frozen=True)
class Priced:
    """A plan, and what it costs."""

    plan: Plan
    problem: Problem
    prediction: Prediction

    @staticmethod
    def of(plan: Plan, origin: OriginOptions) -> Priced:
        """Raises UserError where the plan cannot be priced."""
        plan, problem = origin_of(plan, origin)
        return Priced(plan, problem, problem.cost.predict(plan))

    @property
    def memory_mib(self) -> float:
        """Peak of the fullest device."""
        return max(stage.memory.total_mib for stage in self.prediction.stages)

    @property
    def budget_mib(self) -> float:
        return self.problem.options.memory_constraint * GIB_MIB

    @property
    def speed(self) -> str:
        shapes = self.problem.shapes
        return speed_words(self.plan, self.prediction, shapes[0] if len(shapes) == 1 else None, self.problem.cost)


@dataclass(frozen=True)
class Scaled:
    """A plan before and after, with prices where they are known, else with the reason."""

    before: Plan
    after: Plan
    prices: tuple[Priced, Priced] | None
    why_not: str = ""


def scaled(plan: Plan, origin: OriginOptions, gpus: int, global_batch: int | None = None) -> Scaled:
    """The least changed plan that fits into memory; where memory is not known, the least changed one. Raises UserError,
    and Infeasible where none fits."""
    made = scalings(plan, gpus, global_batch)
    try:
        before = Priced.of(plan, origin)
        own_reserve = before.problem.options.context_mib is None
        priced = [Priced.of(_placed(one, before.problem, own_reserve), origin) for one in made]
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


def _placed(plan: Plan, problem: Problem, own_reserve: bool) -> Plan:
    """With the cluster that the plan is for in its metadata."""
    gpus, width = plan.world_size, problem.options.num_gpus_per_node
    nodes, each = (gpus // width, width) if gpus % width == 0 else (1, gpus)
    searched = plan.metadata.get("searched_from") or {}
    where = {"num_nodes": nodes, "num_gpus_per_node": each}
    options = {**(searched.get("options") or {}), **where, "world_size": gpus, "settle_bsz": plan.global_batch}
    if own_reserve:
        options.pop("context_mib", None)
    return replace(plan, metadata={"searched_from": {**searched, **where, "options": options}})


def printed(of: Scaled) -> Iterator[str | Table]:
    """Lines and a table, to be printed one below the other."""
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("field", f"{of.before.world_size} GPUs", f"{of.after.world_size} GPUs", "why"):
        shown.add_column(column)
    for change in changes(of.before, of.after):
        shown.add_row(change.field, change.before, change.after, change.why)
    yield shown
    yield "unchanged: each layer's degrees, ZeRO and recompute, and the samples of a GPU in a micro-batch"
    if of.prices:
        before, after = of.prices
        yield (
            f"memory of the fullest GPU: {before.memory_mib / GIB_MIB:.2f} -> {after.memory_mib / GIB_MIB:.2f} GiB of "
            f"{after.budget_mib / GIB_MIB:.4g}"
        )
        yield f"step: {before.prediction.time_s:.4g} -> {after.prediction.time_s:.4g} s"
        yield f"speed: {before.speed} -> {after.speed}"
    else:
        yield f"time and memory are left out: {of.why_not}"


def summary(of: Scaled) -> dict[str, Any]:
    """The same for programs: time in s, memory in MiB, before and after."""
    prices = of.prices or ()
    return {
        "changes": [asdict(change) for change in changes(of.before, of.after)],
        "time_s": [one.prediction.time_s for one in prices] or None,
        "memory_mib": [one.memory_mib for one in prices] or None,
        "samples_per_s": [one.prediction.samples_per_s for one in prices] or None,
    }
