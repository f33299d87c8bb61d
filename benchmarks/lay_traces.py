"""Draws a predicted and a measured time line of one step over each other, for the documents.

    galvatron plan trace plan.json -o predicted.json
    galvatron train plan.json --model my-model/ --trace 4-13
    python benchmarks/lay_traces.py predicted.json output/trace.json -o docs/images/traces.svg

The shortest measured step is drawn, which other work of the machine disturbed least. Each rank has a lane; the
predicted one of a stage stands above the measured ones of its ranks, on one scale of ms.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment

COLOURS = {  # category -> what it is called, colour
    "forward": ("forward", "#2f6fc9"),
    "backward": ("backward", "#ad5f18"),
    "collective": ("waiting for a collective", "#c04545"),
    "wait": ("waiting for another stage", "#8a929e"),
    "sync": ("gradients, optimizer", "#277d50"),
    "optimizer": ("gradients, optimizer", "#277d50"),
}
INSIDE = ("collective", "optimizer")  # drawn over what they are in
LANE, LEFT, WIDTH = 26, 130, 960  # pixels: height of a lane, its name, the whole
SHORTEST = 0.3  # pixels of a span that is drawn
TEMPLATE = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {{ width }} {{ height }}" font-family="sans-serif" font-size="12">
<rect width="100%" height="100%" fill="#ffffff"/>
<text x="8" y="18" fill="#1d2127">{{ title }}</text>
{% for name, colour in legend %}
<rect x="{{ left + loop.index0 * 165 }}" y="28" width="12" height="12" fill="{{ colour }}"/>
<text x="{{ left + 16 + loop.index0 * 165 }}" y="38" fill="#1d2127">{{ name }}</text>
{% endfor %}
{% for lane in lanes %}
<text x="8" y="{{ lane.y + 17 }}" fill="#1d2127"{% if lane.bold %} font-weight="bold"{% endif %}>{{ lane.name }}</text>
<rect x="{{ left }}" y="{{ lane.y }}" width="{{ width - left - 8 }}" height="22" fill="#eef0f3"/>
{% for x, wide, colour, low in lane.spans %}
<rect x="{{ x }}" y="{{ lane.y + low }}" width="{{ wide }}" height="{{ 22 - low }}" fill="{{ colour }}"/>
{% endfor %}
{% endfor %}
{% for x, text in ticks %}
<line x1="{{ x }}" x2="{{ x }}" y1="46" y2="{{ height - 18 }}" stroke="#8a929e" stroke-width=".5"/>
<text x="{{ x }}" y="{{ height - 5 }}" text-anchor="{{ "end" if loop.last else "middle" }}">{{ text }}</text>
{% endfor %}
</svg>
"""


@dataclass(frozen=True)
class Step:
    """The events of one step by rank, in ms from its begin."""

    ranks: dict[int, list[tuple[str, float, float]]]  # category, start and stop
    length_ms: float


def read(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


def predicted(events: list[dict[str, Any]]) -> Step:
    return _step(events, 0.0, max(event["ts"] + event["dur"] for event in events))


def measured(events: list[dict[str, Any]]) -> Step:
    """The shortest step, from the begin of the rank that begins first."""
    steps: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        if event["cat"] == "step":
            steps.setdefault(event["name"], []).append(event)
    begin = {name: min(event["ts"] for event in some) for name, some in steps.items()}
    end = {name: max(event["ts"] + event["dur"] for event in some) for name, some in steps.items()}
    lengths = {end[name] - begin[name]: name for name in steps}
    name = lengths[min(lengths)]
    return _step(events, begin[name], end[name])


def _step(events: list[dict[str, Any]], begin_us: float, end_us: float) -> Step:
    ranks: dict[int, list[tuple[str, float, float]]] = {}
    for event in sorted(events, key=lambda event: (event["cat"] in INSIDE, event["ts"])):
        start = event["ts"] - begin_us
        if event["cat"] in COLOURS and 0 <= start + event["dur"] / 2 <= end_us - begin_us:
            ranks.setdefault(event["pid"], []).append((event["cat"], start / 1000, (start + event["dur"]) / 1000))
    return Step(ranks, (end_us - begin_us) / 1000)


def draw(guess: Step, truth: Step) -> str:
    longest = max(guess.length_ms, truth.length_ms)
    scale = (WIDTH - LEFT - 8) / longest
    firsts = sorted(guess.ranks)
    lanes: list[dict[str, Any]] = []

    def add(name: str, spans: list[tuple[str, float, float]], bold: bool) -> None:
        drawn = [
            (
                round(LEFT + start * scale, 2),
                round((stop - start) * scale, 2),
                COLOURS[kind][1],
                10 if kind in INSIDE else 0,
            )
            for kind, start, stop in spans
            if (stop - start) * scale >= SHORTEST
        ]
        lanes.append({"name": name, "y": 50 + LANE * len(lanes), "spans": drawn, "bold": bold})

    for stage, first in enumerate(firsts):
        following = firsts[stage + 1] if stage + 1 < len(firsts) else max(truth.ranks) + 1
        add("predicted" if len(firsts) == 1 else f"predicted, stage {stage}", guess.ranks[first], True)
        for rank in range(first, following):
            add(f"measured, rank {rank}", truth.ranks.get(rank, []), False)
    present = {kind for step in (guess, truth) for spans in step.ranks.values() for kind, *_ in spans}
    legend = dict.fromkeys(pair for kind, pair in COLOURS.items() if kind in present)
    title = f"one step: predicted {guess.length_ms / 1000:.3g} s, measured {truth.length_ms / 1000:.3g} s"
    ticks = [
        (round(LEFT + longest * part / 4 * scale, 1), f"{longest * part / 4:.0f}{' ms' * (part == 4)}")
        for part in range(5)
    ]
    return (
        Environment(trim_blocks=True, autoescape=True)
        .from_string(TEMPLATE)
        .render(
            lanes=lanes, legend=legend, title=title, ticks=ticks, left=LEFT, width=WIDTH, height=74 + LANE * len(lanes)
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("predicted", type=Path)
    parser.add_argument("measured", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    given.output.write_text(draw(predicted(read(given.predicted)), measured(read(given.measured))))
    print(f"{given.output}: {given.output.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
