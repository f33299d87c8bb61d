"""The inputs of a plan's search: model, cluster, profiles and options, as its file or the user names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import isclose
from pathlib import Path
from typing import Any

from pydantic import Field

from ..base.errors import UserError
from ..base.limits import Positive, Ranks, Size
from ..cost_model import CostModel
from ..options.group import Options, canonical_options
from ..options.model_options import ModelOptions
from ..options.tuning import RANK, Kind
from ..plan import Plan, read_plan
from ..plan.check import require_valid
from ..planner import SearchOptions
from ..planner.options import PATH_OPTIONS
from ..planner.prices import prices, with_reserve, within_size
from ..profiles import ProfileFile
from ..profiles.reserve import GIB_MIB
from .why import Problem


class OriginOptions(Options):
    """The plan and the source of its prices."""

    plan: Path = Field(description="the plan file")
    profiles: Path | None = Field(None, description="folder of the profile files; unset: the one that the plan names")
    device: str | None = Field(None, description="price by this data sheet (h100, or a file); unset: as in the plan")
    model_size: str | None = Field(
        None, description="a preset's name, a config.json, or its folder; unset: the plan's model"
    )
    memory_constraint: Positive | None = Field(None, description="memory of a GPU, GiB; unset: as in the plan")
    num_gpus_per_node: Ranks | None = Field(None, description="GPUs per node; unset: as in the plan, or 8")
    task: Kind | None = Field(
        None, description="what is trained: pretrain, sft, lora or dpo; unset: what the plan was searched for"
    )
    lora_rank: Size | None = Field(
        None, description=f"rank of the adapters; unset: as the plan names it, or {RANK} with lora"
    )


def read_origin(
    origin: OriginOptions, note: Callable[[str], None] = lambda line: None, budget_gb: float | None = None
) -> tuple[Plan, Problem]:
    """A plan, and what it was searched from, at the plan's batch. `budget_gb`: where nobody names one. Raises
    UserError."""
    return origin_of(read_plan(origin.plan, smallest_world=True), origin, note, budget_gb)


def origin_of(
    plan: Plan, origin: OriginOptions, note: Callable[[str], None] = lambda line: None, budget_gb: float | None = None
) -> tuple[Plan, Problem]:
    """The same of a plan that has been read."""
    searched = plan.metadata.get("searched_from") or {}
    model = _model(searched, origin.model_size, plan).resolve(plan.assumed.seq_length)
    options = _options(searched, origin, plan, model.seq_length, budget_gb)
    plan = replace(plan, assumed=options.assumptions)
    if len(model.shapes) == 1:
        require_valid(plan, model.shapes[0])
    cost = prices(model.shapes, options, note)
    if _is_its_own_reserve(options.context_mib, searched.get("memory_constraint_gb"), cost):
        options = options.model_copy(update={"context_mib": None})
    options = within_size(options, cost, note)
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


def _is_its_own_reserve(context_mib: float | None, gb: object, cost: CostModel) -> bool:
    """Whether the reserve in a plan's file is what its devices take of that budget, and not the user's word."""
    if context_mib is None or not isinstance(gb, int | float) or not cost.reserve.parts:
        return False
    return isclose(context_mib, cost.reserve.context_mib(gb * GIB_MIB))


def _options(
    searched: Mapping[str, Any], origin: OriginOptions, plan: Plan, seq_length: int, budget_gb: float | None
) -> SearchOptions:
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
    if asked.get("memory_constraint") is None:
        asked["memory_constraint"] = budget_gb
    if asked["memory_constraint"] is None and not asked.get("device"):
        raise UserError("memory_constraint: missing, and the plan's file names none; give --memory_constraint")
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
    said = {"amp_master_grad": assumed.fp32_gradients, "use_flash_attention": assumed.flash_attention}
    asked |= {name: value for name, value in said.items() if value is not None}
    return SearchOptions.from_values({name: value for name, value in asked.items() if value is not None})


def _mapping(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"galvatron.searched_from.{name}: is no object; leave it out")
    return value
