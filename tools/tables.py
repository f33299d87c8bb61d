"""Writes the parts of pages that are made from the code, in both languages.

    python tools/tables.py [NAME ...]            write them; no NAME: all
    python tools/tables.py --check [NAME ...]    exit code 1 where one is not current

`accuracy`: how good predictions from data sheets are, in one sentence. `parallelism`: the table "Which parallelism
when", plans that the search finds. `profile_keys`: the table "Keys of profile files", from their schema.
"""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from math import ceil
from pathlib import Path
from statistics import fmean

from pages import write_or_check

import paddlenlp_galvatron as galvatron
from paddlenlp_galvatron.profiles import computation, hardware, memory
from paddlenlp_galvatron.profiles.data_sheet import load_data_sheet
from paddlenlp_galvatron.report.fit import in_words

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SENTENCES = {
    "en": "Steps derived from a data sheet are off by {mean:.1%} on average over {rows} runs of {publishers} "
    "publishers, at most {long:,} tokens, nine of ten within {most:.1%}, the worst by {worst:.1%}: each publisher's "
    "runs by numbers that were fitted without them, with the software and network that it states.",
    "zh": "由硬件参数文件推算的单步时间，与 {publishers} 家发表的 {rows} 次训练（不超过 {long:,} 个 token）相比，"
    "平均误差 {mean:.1%}，十分之九在 {most:.1%} 以内，最大 {worst:.1%}；每一家的训练都用未经其拟合的数值，"
    "以及它所说明的软件与网络来推算。",
}
SAYING = {
    "en": (ROOT / "README.md", DOCS / "en" / "planner.md"),
    "zh": (ROOT / "README_zh.md", DOCS / "zh" / "planner.md"),
}
PLACE = re.compile(r"(?<=<!-- accuracy -->\n)(?:.*\n)+?(?=(?:> )?<!-- end -->)")
TOKENS = 2**21  # of a step, the same in all rows of `parallelism`
LONG = {"sp_space": "tp+sp", "max_cp_deg": 8}
# Model, sequence length, numbers of GPUs.
ROWS = (
    ("qwen2.5-7b", 4096, (8, 64, 256)),
    ("qwen2.5-32b", 4096, (8, 16, 64)),
    ("llama3-70b", 4096, (32, 64, 256)),
    ("qwen3-30b-a3b", 4096, (8, 64)),
    ("llama3.1-8b", 32768, (8,)),
    ("llama3.1-8b", 131072, (8, 64)),
)
PLANS = re.compile(r"(?<=\|---\|---:\|---:\|---\|---:\|\n)(?:\|.*\n)+")
CONTENTS = {
    "`computation_profiling_…`": computation.CONTENT,
    "`memory_profiling_…`": memory.CONTENT,
    "`allreduce_bandwidth_…`": hardware.ALLREDUCE,
    "`p2p_bandwidth_…`": hardware.P2P,
    "`sp_time_…`": hardware.SP_TIME,
    "`overlap_coefficient.json`": hardware.OVERLAP,
}
KEYS = re.compile(r"(?<=\| file \| key \| meaning \| unit \|\n\|---\|---\|---\|---\|\n)(?:\|.*\n)+")

Pages = Iterator[tuple[Path, str]]


def accuracy() -> Pages:
    """The sentence of all rows up to 8,192 tokens."""
    benchmark = runpy.run_path(str(ROOT / "benchmarks" / "published_runs.py"))
    figures, long = benchmark["figures"], benchmark["LONG"]
    tables = [benchmark["read_runs"](path) for path in sorted((ROOT / "benchmarks" / "published_runs").iterdir())]
    rows = [figures(run, load_data_sheet(run.device)) for table in tables for run in table.runs]
    rows = [row for row in rows if row["tokens"] <= long]
    errors = sorted(abs(row["left_out_error"]) for row in rows)
    most = errors[ceil(0.9 * len(errors)) - 1]
    numbers = {"mean": fmean(errors), "rows": len(errors), "most": most, "worst": errors[-1], "long": long}
    numbers["publishers"] = len({benchmark["publisher_of"](row["source"]) for row in rows})
    for language, pages in SAYING.items():
        sentence = SENTENCES[language].format(**numbers).replace("%", " %")
        for page in pages:
            quote = "> " if page.stem.startswith("README") else ""
            yield page, PLACE.sub(lambda _, line=f"{quote}{sentence}\n": line, page.read_text(encoding="utf-8"))


def parallelism() -> Pages:
    rows = ""
    for model, tokens, numbers in ROWS:
        for gpus in numbers:
            options = {"device": "h100-80gb", "gpus": gpus, "seq": tokens, "batch": TOKENS // tokens}
            best = galvatron.search(model, **options, **(LONG if tokens > 8192 else {})).result.require()
            speed = TOKENS / best.time_s / gpus
            rows += f"| {model} | {tokens:,} | {gpus} | {in_words(best.plan)} | {speed:,.0f} |\n"
    for page in (DOCS / language / "concepts.md" for language in ("en", "zh")):
        yield page, PLANS.sub(rows, page.read_text(encoding="utf-8"))


def key_rows() -> list[tuple[str, str, str, str]]:
    """(file, key, meaning, unit) of the numbers in profile files; choices of parts that are recomputed share a row."""
    rows = []
    for file, content in CONTENTS.items():
        texts = [(table.keys.form, text) for table, text in content.entries.values()]
        texts += [(f"galvatron.{name}", text) for name, (_, text) in content.ours.items()]
        for key, text in texts:
            unit, _, meaning = text.partition(": ")
            rows.append((file, re.sub(r"(spared|again)_.*_mib", r"\1_…_mib", key), meaning, unit))
    return list(dict.fromkeys(rows))


def profile_keys() -> Pages:
    lines, last = "", ""
    for file, key, meaning, unit in key_rows():
        cells = f"{file} |" if file != last else "|"
        lines += f"| {cells} `{key.replace('|', chr(92) + '|')}` | {meaning} | {unit} |\n"
        last = file
    page = DOCS / "en" / "files.md"
    yield page, KEYS.sub(lambda _: lines, page.read_text(encoding="utf-8"))


PARTS = {part.__name__: part for part in (accuracy, parallelism, profile_keys)}

if __name__ == "__main__":
    names = [word for word in sys.argv[1:] if word != "--check"] or PARTS
    sys.exit(write_or_check({page: text for name in names for page, text in PARTS[name]()}, "the code"))
