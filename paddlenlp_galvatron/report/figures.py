"""Numbers and shapes that the pages draw: tiles, a bar of time for each stage, and the pipeline's time line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..cost_model.simulate import Span
from ..plan import Plan
from ..profiles.reserve import GIB_MIB, gpu_sheet
from .breakdown import TIME, StageBreakdown
from .facts import PlanFacts

MOST_SPANS = 6000  # spans that a time line draws: the first ones
LEAST_MS = 0.05  # of a part of a bar; less is nothing in a table with one decimal
LEAST_FOLDED = 0.25  # share of the step that is worth folding
FOLD_WIDTH = 0.03  # share of the drawing


@dataclass(frozen=True, slots=True)
class Tile:
    """One headline number."""

    name: str
    value: str
    note: str = ""


def tiles(facts: PlanFacts) -> tuple[Tile, ...]:
    """Speed, MFU, step time, peak memory, bubble. MFU is left out where the device's peak is not known."""
    plan, prediction, speed = facts.plan, facts.prediction, facts.tokens_per_s
    samples = f"{plan.global_batch} samples, {prediction.samples_per_s:.3g} samples/s"
    memory = f"{facts.memory_mib / facts.budget_mib:.0%} of {facts.budget_mib / GIB_MIB:.4g} GiB"
    words = f"{speed:,.0f} on all {plan.world_size}"
    shown = [Tile(f"tokens/s/{facts.device_word}", f"{speed / plan.world_size:,.0f}", words)]
    if facts.mfu and (sheet := gpu_sheet(facts.cost.device)):
        shown.append(Tile("MFU", f"{facts.mfu:.1%}", f"of {sheet.matmul_16bit.value:,.0f} TFLOP/s"))
    return (
        *shown,
        Tile("step", seconds(prediction.time_s), samples),
        Tile("peak memory", f"{facts.memory_mib / GIB_MIB:.1f} GiB", memory),
        Tile("pipeline bubble", f"{prediction.bubble_share:.1%}", "of all stages' time"),
    )


def seconds(time_s: float) -> str:
    """A time for people: `2.45 s`, `129 ms`, `0.129 ms`."""
    return f"{time_s:.3g} s" if time_s >= 1 else f"{1000 * time_s:.3g} ms"


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a bar."""

    key: str  # of TIME
    ms: float
    share: float  # of the step


def time_bar(stage: StageBreakdown, step_ms: float) -> tuple[list[Segment], list[Segment]]:
    """Terms of a stage's step, and the communication that overlaps its computation."""

    def segments(times_ms: Mapping[str, float], least_ms: float) -> list[Segment]:
        long = [(key, times_ms[key]) for key in TIME if times_ms.get(key, 0.0) > least_ms]
        return [Segment(key, ms, ms / step_ms) for key, ms in long]

    return segments(stage.time_ms, 0.0), segments(stage.hidden_ms, LEAST_MS)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Passes as drawn: `spans` of `drawn_ms` in all. Folded, what follows `fold_ms` was `skipped_ms` later."""

    spans: Sequence[Span]
    drawn_ms: float
    left_out: int  # passes at the end that are not drawn
    fold_ms: float = 0.0
    gap_ms: float = 0.0  # width of the fold
    skipped_ms: float = 0.0
    folded: int = 0  # micro-batches within the fold


def folded(spans: Sequence[Span], plan: Plan, step_ms: float) -> Timeline:
    """The time line without the middle of its steady phase, in which every round is like the one before."""
    ends = sorted(
        span.stop_ms
        for span in spans
        if span.stage == plan.pipeline - 1 and span.work and span.work.kind == "backward" and span.work.chunk == 0
    )
    shown = 2 * plan.pipeline * plan.chunks  # micro-batches at either end: the ramps, and as many rounds
    if len(ends) > 2 * shown + 1:
        first, last = ends[shown], ends[-shown - 1]
        if last - first > LEAST_FOLDED * step_ms:
            gap = FOLD_WIDTH * (step_ms - (last - first))
            before = [span for span in spans if span.start_ms < first]
            after = [span for span in spans if span.stop_ms > last]
            shift = last - first - gap
            drawn = [span._replace(stop_ms=min(span.stop_ms, first)) for span in before] + [
                span._replace(start_ms=max(span.start_ms, last) - shift, stop_ms=span.stop_ms - shift) for span in after
            ]
            left_out = max(0, len(drawn) - MOST_SPANS)
            return Timeline(drawn[:MOST_SPANS], step_ms - shift, left_out, first, gap, shift, len(ends) - 2 * shown - 1)
    return Timeline(spans[:MOST_SPANS], step_ms, max(0, len(spans) - MOST_SPANS))
