"""Writes the table "Which parallelism when" of docs/*/concepts.md: plans that the search finds.

python tools/parallelism_table.py           write it into both pages
python tools/parallelism_table.py --check   exit code 1 where it is not current
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from pages import write_or_check

import paddlenlp_galvatron as galvatron
from paddlenlp_galvatron.report.fit import in_words

DOCS = Path(__file__).parents[1] / "docs"
TOKENS = 2**21  # of a step, the same in all rows
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
TABLE = re.compile(r"(?<=\|---\|---:\|---:\|---\|---:\|\n)(?:\|.*\n)+")


def main() -> int:
    rows = "".join(cells())
    pages = [DOCS / language / "concepts.md" for language in ("en", "zh")]
    return write_or_check({page: TABLE.sub(rows, page.read_text(encoding="utf-8")) for page in pages}, "the search")


def cells() -> Iterator[str]:
    for model, tokens, numbers in ROWS:
        for gpus in numbers:
            options = {"device": "h100-80gb", "gpus": gpus, "seq": tokens, "batch": TOKENS // tokens}
            found = galvatron.search(model, **options, **(LONG if tokens > 8192 else {})).result.require()
            speed = TOKENS / found.time_s / gpus
            yield f"| {model} | {tokens:,} | {gpus} | {in_words(found.plan)} | {speed:,.0f} |\n"


if __name__ == "__main__":
    sys.exit(main())
