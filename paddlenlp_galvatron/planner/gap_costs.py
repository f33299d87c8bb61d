"""Prices the fields of a plan that another program cannot express: each field in turn gets values of that program, and
the changed plans are priced like the plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product

from ..base import GIB_MIB
from ..model import Recompute
from ..plan import DataParallel, LayerStrategy, Plan, Schedule, even_stages, find_faults
from ..plan.export import PROGRAMS, gaps
from ..plan.fleet_layers import MODULES
from .even import EvenPlans
from .question import Question
from .space import suited

MOST_DIVISIONS = 64  # divisions to price: the first have the shortest longest stage
PLAIN = LayerStrategy(), LayerStrategy(dp_type=DataParallel.ZERO2)
# Field of the plan's file -> attributes of all layers, and of the vocabulary where it has them.
ATTRIBUTES = {
    **dict.fromkeys(("tp_sizes_enc", "vtp", "use_sp", "vsp"), ("degree", "ulysses")),
    **dict.fromkeys(("dp_types_enc", "embed_sdp", "sharding_sizes_enc", "vsharding"), ("dp_type", "sharding")),
    **{"cp_sizes_enc": ("context",), "tp_consecutive_flags": ("consecutive",), "offload_enc": ("offload",)},
    **{"ep_sizes_enc": ("ep",), "tp_of_ep_sizes_enc": ("etp",)},
    "dp_types_of_ep_enc": ("experts_dp_type", "experts_sharding"),
}


def costs_of_gaps(plan: Plan, question: Question, program: str) -> dict[str, str]:
    """The cost of each field, as text to append to its fault; empty if the program has no value for it.
    `program`: a name of --trainer. Raises UserError where the plan cannot be priced."""
    if (model := question.shape) is None:
        return {}

    def missing(changed: Plan) -> list[str]:
        return [gap.partition(":")[0] for gap in gaps(changed, PROGRAMS[program], model)]

    facts_now, words = question.facts_of(plan), {}
    for field in dict.fromkeys(missing(plan)):
        changed = [each for each in _changed(plan, field, question, program) if not find_faults(each, model)]
        priced = [question.facts_of(each) for each in changed if field not in missing(each)]
        if fitting := [facts for facts in priced if facts.memory_mib <= facts.budget_mib]:
            change = min(facts.prediction.time_s for facts in fitting) / facts_now.prediction.time_s - 1
            words[field] = f"; this field alone: {abs(change):.1%} {'slower' if change >= 0 else 'faster'}"
        elif priced:
            gib = min(facts.memory_mib for facts in priced) / GIB_MIB
            words[field] = f"; this field alone: needs {gib:.4g} GiB, of {facts_now.budget_mib / GIB_MIB:.4g}"
    return words


def _changed(plan: Plan, field: str, question: Question, program: str) -> Iterator[Plan]:
    """The plan with other values of one field."""
    model = question.model.shapes[0]
    if names := ATTRIBUTES.get(field):
        parts = (*plan.layers, plan.vocab, *PLAIN)
        values = (dict.fromkeys(getattr(each, name) for each in parts if hasattr(each, name)) for name in names)
        for chosen in product(*values):
            changes = dict(zip(names, chosen, strict=True))
            of_vocab = {name: value for name, value in changes.items() if hasattr(plan.vocab, name)}
            layers = tuple(suited(replace(layer, **changes), model.of(at)) for at, layer in enumerate(plan.layers))
            yield replace(plan, layers=layers, vocab=replace(plan.vocab, **of_vocab))
    elif field in ("recompute_enc", "checkpoint"):
        every, firsts = [each.recompute for each in plan.layers], [at for length in plan.stages for at in range(length)]
        kinds = [[kind if kind in MODULES else other for kind in every] for other in (Recompute.NONE, *MODULES)]
        kinds += [[Recompute(at < count) for at in firsts] for count in range(max(plan.stages) + 1)]
        for of_layers in kinds:
            recomputing = zip(plan.layers, of_layers, strict=True)
            yield replace(plan, layers=tuple(replace(layer, recompute=kind) for layer, kind in recomputing))
    elif field == "pp_division":
        even = EvenPlans(program, model, question.cost, question.budget_mib, plan)
        for stages in islice(even.divisions(len(plan.stages)), MOST_DIVISIONS):
            yield replace(plan, stages=stages)
    elif field == "virtual_pp_deg":
        yield replace(plan, chunks=1, stages=even_stages(len(plan.layers), plan.pipeline))
    elif field == "pipeline_type":
        yield replace(plan, schedule=Schedule.ONE_F_ONE_B)
    elif field == "loss_pieces":
        yield replace(plan, vocab=replace(plan.vocab, pieces=1))
