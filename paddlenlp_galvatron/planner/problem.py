"""The inputs of a plan's search, to search again with a change: model, cluster, profiles and options, as the plan's
file or the user names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time
from typing import Any

from ..base.errors import GalvatronError, UserError
from ..base.units import GIB_MIB
from ..cost_model import CostModel
from ..cost_model.facts import PlanFacts
from ..options.group import canonical_options
from ..options.model_options import SEQ, ModelOptions
from ..options.prices import JobOptions, PriceOptions
from ..plan import ModelShape, Plan, read_plan
from ..plan.check import require_fits
from ..profiles import ProfileFile
from ..profiles.hardware import HardwareProfile
from ..profiles.network import Network
from .branch_and_bound import Watch
from .engine import search
from .options import PATH_OPTIONS, SearchOptions
from .question import prices, with_reserve, within_size
from .result import Candidate, Job, SearchResult

LEAST_S = 0.5  # of a search whose time others have taken


@dataclass(frozen=True)
class Problem:
    """The inputs of a plan's search, to search again with a change. Its batch is the plan's alone."""

    shapes: tuple[ModelShape, ...]
    cost: CostModel  # with the reserve that the options ask for
    options: SearchOptions  # context_mib unset: the device's own reserve, which changes with the budget
    watch: Callable[[], Watch] | None = None  # asked as each search begins, to show how far it is

    def __post_init__(self) -> None:
        # Every change asks for this batch, not for the range that the plan was chosen from.
        if self.options.settle_bsz == -1:
            raise ValueError("settle_bsz: a problem is of one batch")

    @property
    def shape(self) -> ModelShape | None:
        """The model's shape; None: layers of several kinds."""
        return self.shapes[0] if len(self.shapes) == 1 else None

    @property
    def budget_mib(self) -> float:
        """Memory of a device."""
        return self.options.memory_gib * GIB_MIB

    def facts_of(self, plan: Plan) -> PlanFacts:
        """Raises UserError where the plan cannot be priced."""
        return PlanFacts(plan, self.cost.predict(plan), self.cost, self.shape, self.budget_mib)

    def job(self, options: JobOptions, samples_per_s: float) -> Job | None:
        """The whole training at this speed; None where layers are of several types. Raises UserError."""
        if self.shape is None:
            return None
        speed, task = samples_per_s * (self.options.seq_length or SEQ), self.cost.options.task
        return Job.of(options, self.shape, task, self.cost.world_size, speed, device=self.options.device)

    def search(
        self,
        hardware: HardwareProfile | None = None,
        known: Sequence[Plan] = (),
        seconds: float | None = None,
        compared: bool = False,
        **changes: Any,
    ) -> SearchResult:
        """Search with these options changed, or on other hardware, from the results `known`, for at most `seconds`;
        `compared` as `planner.search` has it. Raises UserError where that cannot be priced."""
        if "num_nodes" in changes:
            changes["world_size"] = changes["num_nodes"] * self.options.num_gpus_per_node
        options = self.options.model_copy(update=changes)
        if (options.device or "num_nodes" in changes) and hardware is None:  # prices of another cluster or length
            cost = prices(self.shapes, options)
        else:
            profiles = self.cost.profiles
            profiles = replace(profiles, network=Network(hardware)) if hardware else profiles
            cost = CostModel(self.shapes, profiles, options.assumptions, options.cost_options)
        options, cost = with_reserve(options, cost)
        watch = self.watch() if self.watch else None
        return search(self.shapes, cost, options, watch=watch, known=known, seconds=seconds, compared=compared)


def best_of(result: SearchResult, seconds: float) -> Candidate:
    """The plan that a search found in `seconds`. Raises GalvatronError where it found none."""
    if result.best is None and result.given_up:
        raise GalvatronError(f"no plan was found in {seconds:.2g} s; galvatron search has no limit of time")
    return result.require()


class SharedTime:
    """Seconds of processor time that some searches share: slow ones may use the rest of quick ones."""

    def __init__(self, seconds: float, shares: int, least_s: float | None = None):
        self._end, self._shares = process_time() + seconds, shares
        self._least_s = LEAST_S if least_s is None else least_s

    def take(self, shares: int = 1) -> float:
        """Seconds of the next search."""
        part = shares / max(shares, self._shares)
        self._shares -= shares
        return max(self._least_s, (self._end - process_time()) * part)


class OriginOptions(PriceOptions):
    """The plan and the source of its prices."""

    plan: Path


def read_origin(
    origin: OriginOptions, note: Callable[[str], None] = lambda line: None, budget_gb: float | None = None
) -> tuple[Plan, Problem]:
    """A plan, and what it was searched from, at the plan's batch. `budget_gb`: where nobody names one. Raises
    UserError."""
    return origin_of(read_plan(origin.plan, smallest_world=True), origin, note, budget_gb)


def origin_of(
    plan: Plan, origin: OriginOptions, note: Callable[[str], None] = lambda line: None, budget_gb: float | None = None
) -> tuple[Plan, Problem]:
    """The problem of a plan that has been read."""
    searched = plan.metadata.get("searched_from") or {}
    given, seq_length = _model(searched, origin.model_size, plan), plan.assumed.seq_length
    model = given.resolve(seq_length) if seq_length else given.resolve_usual(SEQ)
    options = _options(searched, origin, plan, model.seq_length)
    plan = replace(plan, assumed=options.assumptions)
    if len(model.shapes) == 1:
        require_fits(plan, model.shapes[0])
    cost = prices(model.shapes, options, note)
    gb = searched.get("memory_constraint_gb")
    if isinstance(gb, int | float) and cost.profiles.reserve.sets(options.context_mib or 0.0, gb * GIB_MIB):
        options = options.model_copy(update={"context_mib": None})
    options = within_size(options, cost, note, budget_gb)
    for path in ProfileFile.changed(searched.get("profiles")):
        note(f"{path} has changed since the plan was searched; search again for the best plan")
    return plan, Problem(model.shapes, with_reserve(options, cost)[1], options)


def _model(searched: Mapping[str, Any], given: str | None, plan: Plan) -> ModelOptions:
    if given:
        return ModelOptions.from_values({"model_size": given, "seq_length": plan.assumed.seq_length})
    if asked := searched.get("model_options"):
        return ModelOptions.from_mapping(_mapping("model_options", asked))
    if name := searched.get("model"):
        return ModelOptions.from_values({"model_size": str(name), "seq_length": plan.assumed.seq_length})
    raise UserError("model_size: missing, and the plan's file names no model; give --model_size")


def _options(searched: Mapping[str, Any], origin: OriginOptions, plan: Plan, seq_length: int) -> SearchOptions:
    asked = canonical_options(_mapping("options", searched.get("options") or {}), SearchOptions.model_fields)
    if not asked:  # written by hand, or by another program
        asked = {
            "num_nodes": searched.get("num_nodes"),
            "num_gpus_per_node": searched.get("num_gpus_per_node"),
            "memory_constraint": searched.get("memory_constraint_gb"),
            "world_size": plan.world_size,
        } | SearchOptions.wide_enough(plan)
        files = searched.get("profiles")
        if isinstance(files, list) and files:
            asked["profiles"] = str(Path(str(_mapping("profiles", files[0]).get("path"))).parent)
    if origin.profiles:
        asked = {name: value for name, value in asked.items() if name not in (*PATH_OPTIONS, "device")}
        asked["profiles"] = origin.profiles
    if origin.device:
        asked = {name: value for name, value in asked.items() if name not in (*PATH_OPTIONS, "profiles")}
        asked["device"] = origin.device
    if origin.num_gpus_per_node:
        asked |= {"num_nodes": None, "num_gpus_per_node": origin.num_gpus_per_node, "world_size": plan.world_size}
    if origin.task and origin.task != asked.get("task"):
        asked |= {"task": origin.task, "lora_rank": None}
    if origin.lora_rank:
        asked["lora_rank"] = origin.lora_rank
    if origin.memory_constraint:
        asked["memory_constraint"] = origin.memory_constraint
    assumed = plan.assumed
    asked.pop("top_k", None)
    asked |= {
        "settle_bsz": plan.global_batch,
        "default_dp_type": plan.default_dp_type,
        "seq_length": seq_length,
        "sequence_parallel": assumed.sequence_parallel,
        "mixed_precision": assumed.mixed_precision,
        "no_async_grad_reduce": not assumed.async_grad_reduce,
    }
    # The search may have set assumptions that the plan leaves open.
    stated = {"amp_master_grad": assumed.fp32_gradients, "use_flash_attention": assumed.flash_attention}
    asked |= {name: value for name, value in stated.items() if value is not None}
    return SearchOptions.from_values({name: value for name, value in asked.items() if value is not None})


def _mapping(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"galvatron.searched_from.{name}: is no object; leave it out")
    return value
