"""Renders an accuracy as one HTML file without network: predicted against measured, residuals, terms, every plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import PackageLoader

from ...report.page import filled
from .accuracy import TERMS, Accuracy
from .options import ValidateOptions
from .words import short, summary_lines

SIDE = 400.0  # of a drawing
BAND = 0.05  # errors that are shaded in the residuals


@dataclass(frozen=True, slots=True)
class Dot:
    """A plan in a drawing."""

    x: float
    y: float
    kind: str
    tip: str


def render(accuracy: Accuracy, model: str, options: ValidateOptions) -> str:
    """The page."""
    kinds = list(dict.fromkeys(one.kind for one in accuracy.outcomes))
    times = [(one.predicted_s, one.measured_s) for one in accuracy.outcomes]
    memory = [(stage.predicted_mib, stage.peak_mib, one) for one in accuracy.outcomes for stage in one.stages]
    tips = [
        f"{one.key}, {one.kind}: predicted {one.predicted_s:.4g} s, measured {one.measured_s:.4g} s "
        f"({one.time_error:+.1%}), {one.at_fault} {one.off_ms()[one.at_fault]:+.1f} ms; {short(one.plan)}"
        for one in accuracy.outcomes
    ]
    widest = max(BAND, *(abs(one.time_error) for one in accuracy.outcomes))
    slowest = max(one.measured_s for one in accuracy.outcomes)
    residuals = [
        Dot(SIDE * one.measured_s / slowest, SIDE / 2 * (1 - one.time_error / widest), one.kind, tip)
        for one, tip in zip(accuracy.outcomes, tips, strict=True)
    ]
    return filled(
        PackageLoader("paddlenlp_galvatron.check.validation", "."),
        "page.html.jinja",
        model=model,
        options=options,
        accuracy=accuracy,
        summary=list(summary_lines(accuracy)),
        kinds={kind: number for number, kind in enumerate(kinds)},
        scatter=_scatter(times, [one.kind for one in accuracy.outcomes], tips),
        memory=_scatter(
            [(guess, peak) for guess, peak, _ in memory],
            [one.kind for *_, one in memory],
            [f"{one.key}: predicted {guess:.1f} MiB, measured {peak:.1f} MiB" for guess, peak, one in memory],
        ),
        residuals=residuals,
        side=SIDE,
        band=SIDE / 2 * BAND / widest,
        widest=widest,
        terms=[(TERMS[name] if name != "waiting" else "waiting", *both) for name, both in accuracy.terms().items()],
        short=short,
    )


def _scatter(points: Sequence[tuple[float, float]], kinds: Sequence[str], tips: Sequence[str]) -> list[Dot]:
    """Predicted to the right, measured upwards, on one scale."""
    scale = SIDE / max(max(point) for point in points)
    return [Dot(scale * x, SIDE - scale * y, kind, tip) for (x, y), kind, tip in zip(points, kinds, tips, strict=True)]
