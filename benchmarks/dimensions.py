"""Predicted gains of interleaved 1F1B, recompute by parts and context parallelism: alone, and together.

    python benchmarks/dimensions.py [--profiles FOLDER] [--only TEXT] [--picture docs/images]

Searches without the three, with each, and with all: models of Llama 3.1 on H100 from their data sheet and, with
`--profiles`, llama2-7b on published profiles. Prints a table: the step without them; its time over that with
interleaved 1F1B (v), recompute by parts, context parallelism, and all; where the step without them goes, in per cent:
to waiting, which interleaving could save, to recompute, which parts could, and to collectives, which context
parallelism could; the gap to the optimum. `--picture` draws it, in both languages.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paddlenlp_galvatron.base.writing import write_text
from paddlenlp_galvatron.cost_model import CostModel, derive, load
from paddlenlp_galvatron.cost_model.facts import COMMUNICATION, breakdown
from paddlenlp_galvatron.plan import load_model
from paddlenlp_galvatron.planner import SearchOptions, SearchResult, search
from paddlenlp_galvatron.profiles.data_sheet import load_data_sheet

sys.path.append(str(Path(__file__).parents[1] / "tools"))
from pictures import box, picture, text, title

KI, TOKENS = 1024, 4 * 2**20  # of a step, whatever the length of its samples
SPLITS = 32  # widest degree of tensor parallelism, Ulysses and context parallelism
DIMENSIONS: dict[str, dict[str, Any]] = {
    "interleaved": {"max_virtual_pp_deg": 4},
    "parts": {"recompute_parts": True},
    "cp": {"max_cp_deg": SPLITS},
}
CHOICES = {
    "without": {},
    **DIMENSIONS,
    "all": {name: value for each in DIMENSIONS.values() for name, value in each.items()},
}
H100 = (  # model, GPUs, Ki tokens of sequence length
    ("llama3.1-8b", 8, 4),
    ("llama3.1-8b", 8, 32),
    ("llama3.1-8b", 64, 32),
    ("llama3.1-8b", 64, 128),
    ("llama3.1-8b", 1024, 256),
    ("llama3.1-70b", 64, 4),
    ("llama3.1-70b", 64, 32),
    ("llama3.1-70b", 256, 32),
    ("llama3.1-70b", 1024, 128),
    ("llama3.1-70b", 1024, 256),
    ("llama3.1-405b", 256, 4),
    ("llama3.1-405b", 1024, 4),
    ("llama3.1-405b", 1024, 32),
    ("llama3.1-405b", 1024, 256),
)
A800 = ((16, 64), (24, 64), (40, 256))  # GB of memory, global batch size, of 2,048 tokens on 8 devices
WORDS = {
    "en": {
        "title": "Predicted step time of the best plan without the three dimensions / with them",
        "interleaved": "interleaved 1F1B",
        "parts": "recompute by parts",
        "cp": "context parallelism",
        "all": "all three",
    },
    "zh": {
        "title": "不含这三个维度的最佳方案与含有它们的最佳方案的预测单步时间之比",
        "interleaved": "交错 1F1B",
        "parts": "部分重计算",
        "cp": "上下文并行",
        "all": "三者同时",
    },
}
COLOURS = {"interleaved": "#00897b", "parts": "#f4a259", "cp": "#3d5a80", "all": "#8d6a9f"}
ROW, BAR, LEFT, WIDE, TALLEST = 62, 11, 250, 430, 2.0  # of the picture, in pixels; and the largest ratio it shows


def problem(name: str, gpus: int, seq: int, **more: Any) -> tuple[CostModel, SearchOptions]:
    """Options of a search: ZeRO-2, the device's own reserve of memory, and `more`. A model with fewer positions gets as
    many as a sample has."""
    sheet, shape = load_data_sheet("h100-80gb"), load_model(name)
    shape = replace(shape, max_position_embeddings=max(seq, shape.max_position_embeddings))
    nodes, cards = max(gpus // sheet.gpus_per_node, 1), min(gpus, sheet.gpus_per_node)
    options = SearchOptions(
        num_nodes=nodes,
        num_gpus_per_node=cards,
        world_size=gpus,
        memory_constraint=sheet.memory.value,
        settle_bsz=TOKENS // seq,
        seq_length=seq,
        sp_space="tp+sp",
        default_dp_type="zero2",
        **more,
    )
    cost = derive(shape, sheet, nodes, cards, options.assumptions)
    context_mib = cost.reserve.context_mib(sheet.memory.value * KI)
    return cost.reserving(context_mib), options.model_copy(update={"context_mib": context_mib})


@dataclass(frozen=True)
class Case:
    """One row: searches of the same problem with other dimensions."""

    name: str
    found: dict[str, SearchResult]
    cost: CostModel

    def gain(self, choice: str) -> float | None:
        """Time without the dimensions over that with these; None where either does not fit."""
        without, result = self.found["without"], self.found[choice]
        return without.time_s / result.time_s if without.best and result.best else None

    def told(self, choice: str) -> str:
        if (gain := self.gain(choice)) is not None:
            return f"{gain:.3f}"
        return "fits" if self.found[choice].best else "-"

    @property
    def goes_to(self) -> str:
        """Shares of the step without the dimensions, on the stage that works longest: waits, recompute, collectives."""
        best = self.found["without"].best
        if best is None:
            return "-"
        stage = max(breakdown(best.plan, self.cost, best.prediction), key=lambda stage: stage.busy_ms)
        times_ms = stage.time_ms
        each = times_ms["waiting"], times_ms["recompute"], sum(times_ms[name] for name in COMMUNICATION)
        return " ".join(f"{100 * ms / sum(times_ms.values()):.0f}" for ms in each)

    @property
    def row(self) -> str:
        without, every = self.found["without"], self.found["all"]
        time_s = f"{without.time_s:.4g}" if without.best else "-"
        gap = max(result.gap for result in self.found.values() if result.best) if every.best else 0.0
        gains = " | ".join(self.told(choice) for choice in CHOICES if choice != "without")
        return f"| {self.name} | {time_s} | {gains} | {self.goes_to} | {exponent(gap)} |"


def exponent(gap: float) -> str:
    """`2e-3`."""
    return f"{gap:.0e}".replace("e-0", "e-") if gap else "0"


def on_h100(model: str, gpus: int, length: int) -> Case:
    cost, options = problem(model, gpus, length * KI, max_tp_deg=SPLITS)
    return _case(f"{model.removeprefix('llama3.1-')}, {gpus} H100, {length}K", cost, options)


def on_a800(folder: Path, memory_gb: float, batch: int) -> Case:
    options = SearchOptions(memory_constraint=memory_gb, settle_bsz=batch, sp_space="tp+sp", seq_length=2048)
    cost = load(load_model("llama2-7b"), 1, 8, options.assumptions, folder=folder, options=options.cost_options)
    return _case(f"7b, 8 A800 of {memory_gb} GB, 2K", cost, options)


def _case(name: str, cost: CostModel, options: SearchOptions) -> Case:
    found = {
        choice: search(cost.models, cost, options.model_copy(update=given), compared=False)
        for choice, given in CHOICES.items()
    }
    return Case(name, found, cost)


def cases(profiles: Path | None, only: str) -> Iterator[Case]:
    for case in H100:
        if only in case[0]:
            yield on_h100(*case)
    if profiles and only in "llama2-7b":
        for memory_gb, batch in A800:
            yield on_a800(profiles, memory_gb, batch)


def draw(file: Path, found: list[Case], words: dict[str, str]) -> None:
    """Bars of each row, from 1 on, as SVG."""
    parts = [title(words["title"])]
    for number, (choice, colour) in enumerate(COLOURS.items()):
        parts += [box(12 + 170 * number, 44, 12, 12, colour, 0), text(30 + 170 * number, 55, words[choice], 12)]
    for row, case in enumerate(found):
        top = 72 + ROW * row
        parts.append(text(12, top + 28, case.name, 12))
        for number, (choice, colour) in enumerate(COLOURS.items()):
            gain, y = case.gain(choice), top + number * (BAR + 2)
            width = 0.0
            if gain is not None:
                width = max(1.0, (min(gain, TALLEST) - 1) / (TALLEST - 1) * WIDE)
                parts.append(box(LEFT, y, width, BAR, colour, 0))
            told = case.told(choice) if gain is None else f"{gain:.2f}"
            parts.append(text(LEFT + width + 5, y + BAR - 1, told, 10))
    write_text(file, picture(LEFT + WIDE + 70, 80 + ROW * len(found), parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", type=Path, help="folder of published profiles of llama2-7b on 8 devices")
    parser.add_argument("--only", default="", help="models whose name has this in it")
    parser.add_argument("--picture", type=Path, help="folder with en/ and zh/")
    given = parser.parse_args()
    print("| model, devices, tokens | without, s | v | parts | cp | all | goes to, % | gap |")
    print("|---" * 8 + "|")
    found = []
    for case in cases(given.profiles, given.only):
        print(case.row, flush=True)
        found.append(case)
    if given.picture:
        for language, words in WORDS.items():
            draw(given.picture / language / "dimensions.svg", found, words)


if __name__ == "__main__":
    main()
