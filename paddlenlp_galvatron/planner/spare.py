"""Plans for fewer nodes of the same cluster with the same global batch, for when nodes are lost."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from ..base.errors import UserError
from ..plan import Plan
from .question import Question, SharedTime
from .result import Candidate


@dataclass(frozen=True, slots=True)
class Spare:
    """The fastest plan on a number of nodes."""

    nodes: int
    gpus: int
    best: Candidate | None
    why_not: str  # reason why no plan fits
    samples_per_s: float  # 0: no plan
    lost: float  # lost share of the speed of all nodes
    lost_per_gpu: float  # lost share of a GPU's speed


def spares(plan: Plan, question: Question, nodes: Sequence[int]) -> list[Spare]:
    """A search for each number of nodes, the largest first. Raises UserError for a number that is not below the plan's,
    or without prices."""
    each = question.options.num_gpus_per_node
    whole = plan.world_size // each
    if plan.world_size % each or any(number >= whole for number in nodes):
        raise UserError(
            f"num_nodes: {', '.join(map(str, nodes))}: the plan has {plan.world_size} GPUs, {each} on a node; give "
            f"numbers below {plan.world_size / each:g}"
        )
    speed = question.facts_of(plan).prediction.samples_per_s
    made, time = [], SharedTime(question.options.time_limit or inf, len(nodes))
    for number in sorted(set(nodes), reverse=True):
        result = question.changed(num_nodes=number).search(seconds=time.take(), compared=False)
        asked = (plan.metadata.get("searched_from") or {}).get("model_options")
        best = (result.naming_model(asked) if asked else result).best
        nothing = "none was found in time" if result.undecided else "no strategy splits batch, heads and GPUs evenly"
        why_not = "" if best else str(result.need or nothing)
        now = best.samples_per_s if best else 0.0
        kept = now / speed
        made.append(Spare(number, number * each, best, why_not, now, 1 - kept, 1 - kept * whole / number))
    return made
