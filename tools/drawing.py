"""Parts of a picture in SVG."""

from __future__ import annotations

from html import escape

COLOURS = ("#00897b", "#f4a259", "#5b8e7d", "#bc4b51", "#3d5a80", "#8d6a9f", "#c9a227", "#6c757d")
INK, PAPER, LINE = "#1d2b33", "#ffffff", "#d0d7de"
FONT = "font-family='system-ui, sans-serif'"
Words = dict[str, str]


def title(words: str) -> str:
    return text(16, 30, words, 14, weight=600)


def text(
    x: float, y: float, words: str, size: int = 13, ink: str = INK, anchor: str = "start", weight: int = 400
) -> str:
    place = f"x='{x:g}' y='{y:g}' font-size='{size}' font-weight='{weight}' fill='{ink}' text-anchor='{anchor}'"
    return f"<text {place}>{escape(words)}</text>"


def box(x: float, y: float, width: float, height: float, colour: str, round_: int = 5) -> str:
    return f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' rx='{round_}' fill='{colour}'/>"


def picture(width: int, height: int, parts: list[str]) -> str:
    frame = f"<rect width='{width}' height='{height}' rx='8' fill='{PAPER}' stroke='{LINE}'/>"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' {FONT}>"
    return "\n".join([head, frame, *parts, "</svg>"]) + "\n"
