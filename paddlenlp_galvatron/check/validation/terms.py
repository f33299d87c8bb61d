"""What a step's time goes to, the same terms measured (from spans of the time line) and predicted (from prices)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...cost_model import CostModel
from ...plan import Plan

# In the order of the table.
TERMS = {
    "forward": "forward",
    "backward": "backward",
    "recompute": "recompute",
    "tensor": "collectives of split layers",
    "layouts": "changes of layout",
    "gathers": "gathers of zero3's weights",
    "gradients": "sums of gradients",
    "publish": "gathers of zero2's weights",
    "optimizer": "clipping and optimizer",
    "waiting": "waiting for a neighbouring stage",
    "idle": "waiting for all ranks, data, everything else",
}
BUSY = tuple(name for name in TERMS if name not in ("waiting", "idle"))
COLLECTIVE = "collective"
# Categories of spans with a term of their own; what happens inside them, collectives too, is theirs.
WHOLE = {
    "recompute": "recompute",
    "layout": "layouts",
    "gather": "gathers",
    "gradients": "gradients",
    "sync": "gradients",
}
OPEN = {"forward": "forward", "backward": "backward", "optimizer": "optimizer", "wait": "waiting"}
US_PER_MS = 1000.0


def measured_ms(spans: Iterable[Mapping[str, Any]], step_ms: float) -> dict[str, float]:
    """Terms of one step of one rank in ms; they add up to `step_ms`. `spans`: as `runtime.trace` notes them.

    Each moment counts for the innermost span that has a term. A collective is tensor parallelism's inside a pass or a
    recompute, a gather of zero2's weights inside the optimizer; where all meet, for loss and norm, a rank is idle.
    """
    terms = dict.fromkeys(TERMS, 0.0)
    open_spans: list[tuple[float, str]] = []  # end in us, term; from the outermost to the innermost
    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        start, length = span["ts"], span["dur"]
        while open_spans and open_spans[-1][0] <= start:
            open_spans.pop()
        outer = open_spans[-1][1] if open_spans else "idle"
        term = _term(span, outer)
        terms[outer] -= length / US_PER_MS
        terms[term] += length / US_PER_MS
        open_spans.append((start + length, term))
    terms["idle"] += step_ms
    return terms


def _term(span: Mapping[str, Any], outer: str) -> str:
    category = span["cat"]
    if outer in ("layouts", "gathers", "gradients"):
        return outer
    if category == COLLECTIVE:
        if outer in ("forward", "backward", "recompute"):
            return "tensor"
        return "publish" if outer == "optimizer" and span["name"] == "all_gather" else "idle"
    return WHOLE.get(category) or OPEN.get(category) or outer


def predicted_ms(plan: Plan, cost: CostModel, stage: int, step_ms: float, speed: float = 1.0) -> dict[str, float]:
    """The same terms of one stage, predicted; waiting and being idle are told together, as waiting. `speed`: of the
    stage, against that of its prices."""
    parts, times = [part.terms for part in cost.stage_parts(plan, stage)], plan.micro_batches
    switches = [ms for chunk in range(plan.chunks) for ms in cost.chunk_switches(plan, stage, chunk)]
    terms = {
        "forward": times * sum(one.forward_ms for one in parts),
        "backward": times * sum(one.backward_ms for one in parts),
        "recompute": times * sum(one.recompute_ms for one in parts),
        "tensor": times * sum(one.tensor_forward_ms + one.tensor_backward_ms for one in parts),
        "layouts": times * sum(forward + backward for forward, backward in switches),
        "gathers": times * sum(one.gather_forward_ms + one.gather_backward_ms for one in parts),
        "gradients": sum((times if one.reduced_each else 1) * one.reduce_ms + one.finish_ms for one in parts),
        "publish": sum(one.publish_ms for one in parts),
        "optimizer": sum(one.optimizer_ms for one in parts),
    }
    terms = {name: ms / speed for name, ms in terms.items()}
    return {**terms, "waiting": step_ms - sum(terms.values()), "idle": 0.0}


def busy_ms(terms: Mapping[str, float]) -> float:
    """Without waiting and being idle."""
    return sum(terms[name] for name in BUSY)
