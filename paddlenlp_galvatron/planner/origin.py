"""A plan's file and the question of the search that found it: model, cluster, profiles and options, from the file or
the user."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..base import GIB_MIB, Note, UserError, no_note
from ..options.group import canonical_options
from ..options.model_options import model_of_plan
from ..options.prices import LimitOptions, PriceOptions
from ..plan import Plan, read_plan
from ..plan.check import require_fits
from ..profiles import ProfileFile
from .options import PATH_OPTIONS, SearchOptions
from .question import Question, prices, within_size


class OriginOptions(PriceOptions, LimitOptions):
    """The plan and the source of its prices."""

    plan: Path


def read_origin(origin: OriginOptions, note: Note = no_note, budget_gb: float | None = None) -> tuple[Plan, Question]:
    """A plan and its search's question at the plan's batch. `budget_gb`: the default budget. Raises UserError."""
    return origin_of(read_plan(origin.plan, smallest_world=True), origin, note, budget_gb)


def origin_of(
    plan: Plan, origin: OriginOptions, note: Note = no_note, budget_gb: float | None = None
) -> tuple[Plan, Question]:
    """The question of a plan that was read before."""
    searched = plan.metadata.get("searched_from") or {}
    model = model_of_plan(plan, origin.model_size)
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
    return plan, Question(model, options, cost)


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
        asked = {name: value for name, value in asked.items() if name not in (*PATH_OPTIONS, "device", "network")}
        asked["profiles"] = origin.profiles
    if origin.device:
        asked = {name: value for name, value in asked.items() if name not in (*PATH_OPTIONS, "profiles")}
        asked["device"] = origin.device
    if origin.network:
        asked["network"] = origin.network
    if products := origin.products or plan.assumed.products:
        asked["products"] = products
    if origin.num_gpus_per_node:
        asked |= {"num_nodes": None, "num_gpus_per_node": origin.num_gpus_per_node, "world_size": plan.world_size}
    if origin.task and origin.task != asked.get("task"):
        asked |= {"task": origin.task, "lora_rank": None}
    if origin.lora_rank:
        asked["lora_rank"] = origin.lora_rank
    if origin.memory_constraint:
        asked["memory_constraint"] = origin.memory_constraint
    assumed = plan.assumed
    asked = {name: value for name, value in asked.items() if name not in ("top_k", "time_limit")}
    asked |= {name: getattr(origin, name) for name in LimitOptions.model_fields if name in origin.model_fields_set}
    asked |= {
        "settle_bsz": plan.global_batch,
        "default_dp_type": plan.default_dp_type,
        "seq_length": seq_length,
        "sequence_parallel": assumed.sequence_parallel,
        "mixed_precision": assumed.mixed_precision,
        "no_async_grad_reduce": not assumed.async_grad_reduce,
        "offload_optimizer": bool(assumed.offload_optimizer),
    }
    # The search may have set assumptions that the plan leaves open.
    stated = {"amp_master_grad": assumed.fp32_gradients, "use_flash_attention": assumed.flash_attention}
    asked |= {name: value for name, value in stated.items() if value is not None}
    return SearchOptions.from_values({name: value for name, value in asked.items() if value is not None})


def _mapping(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"galvatron.searched_from.{name}: is no object; leave it out")
    return value
