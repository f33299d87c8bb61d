"""Terms of a step's time, measured (from spans of the time line) and predicted (from prices)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...cost_model import CostModel
from ...plan import Plan
from ...report.breakdown import TIME, layouts_ms, part_ms

TERMS = {key: name for key, name in TIME.items() if key != "vocabulary"} | {
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


def predicted_ms(plan: Plan, cost: CostModel, stage: int, step_ms: float) -> dict[str, float]:
    """The same terms of one stage, predicted; `waiting` includes being idle."""
    parts = [part_ms(part.terms, plan.micro_batches) for part in cost.stage_parts(plan, stage)]
    terms = {name: sum(part.get(name, 0.0) for part in parts) for name in BUSY}
    terms["layouts"] = layouts_ms(plan, cost, stage)
    return {**terms, "waiting": step_ms - sum(terms.values()), "idle": 0.0}


def busy_ms(terms: Mapping[str, float]) -> float:
    """Without waiting and being idle."""
    return sum(terms[name] for name in BUSY)
