"""Writes how good predictions from data sheets are, in one sentence, into every page that says so.

python tools/accuracy.py           write it
python tools/accuracy.py --check   exit code 1 where it is not current
"""

from __future__ import annotations

import re
import runpy
import sys
from math import ceil
from pathlib import Path
from statistics import fmean

from pages import write_or_check

from paddlenlp_galvatron.profiles.data_sheet import load_data_sheet

ROOT = Path(__file__).parents[1]
SENTENCES = {
    "en": "Steps derived from a data sheet are off by {mean:.1%} on average over {rows} published runs of at most "
    "{long:,} tokens, nine of ten within {most:.1%}, the worst by {worst:.1%}; numbers of the sheets were fitted to "
    "many of these runs.",
    "zh": "由硬件参数文件推算的单步时间，与 {rows} 次已发表的训练（不超过 {long:,} 个 token）相比，"
    "平均误差 {mean:.1%}，十分之九在 {most:.1%} 以内，最大 {worst:.1%}；参数文件中的一些数值是由其中许多训练拟合的。",
}
PAGES = {
    "en": (ROOT / "README.md", ROOT / "docs/en/planner.md"),
    "zh": (ROOT / "README_zh.md", ROOT / "docs/zh/planner.md"),
}
PLACE = re.compile(r"(?<=<!-- accuracy -->\n)(?:.*\n)+?(?=(?:> )?<!-- end -->)")


def sentences() -> dict[str, str]:
    """The sentence by language, of all rows up to 8,192 tokens."""
    benchmark = runpy.run_path(str(ROOT / "benchmarks" / "published_runs.py"))
    figures, long = benchmark["figures"], benchmark["LONG"]
    tables = [benchmark["read_runs"](path) for path in sorted((ROOT / "benchmarks" / "published_runs").iterdir())]
    rows = [figures(run, load_data_sheet(run.device)) for one in tables for run in one.runs]
    errors = sorted(abs(row["step_error"]) for row in rows if row["tokens"] <= long)
    most = errors[ceil(0.9 * len(errors)) - 1]
    found = {"mean": fmean(errors), "rows": len(errors), "most": most, "worst": errors[-1], "long": long}
    return {name: text.format(**found).replace("%", " %") for name, text in SENTENCES.items()}


def main() -> int:
    texts = {}
    for language, sentence in sentences().items():
        for page in PAGES[language]:
            text = page.read_text(encoding="utf-8")
            quote = "> " if page.stem.startswith("README") else ""
            texts[page] = PLACE.sub(lambda _, line=f"{quote}{sentence}\n": line, text)
    return write_or_check(texts, "the published runs")


if __name__ == "__main__":
    sys.exit(main())
