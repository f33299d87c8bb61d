"""Writes the table "Keys of profile files" of docs/en/files.md from the schema of profiles.

python tools/profile_keys.py           write it
python tools/profile_keys.py --check   exit code 1 where it is not current
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from pages import write_or_check

from paddlenlp_galvatron.profiles import computation, hardware, memory

PAGE = Path(__file__).parents[1] / "docs" / "en" / "files.md"
CONTENTS = {
    "`computation_profiling_…`": computation.CONTENT,
    "`memory_profiling_…`": memory.CONTENT,
    "`allreduce_bandwidth_…`": hardware.ALLREDUCE,
    "`p2p_bandwidth_…`": hardware.P2P,
    "`sp_time_…`": hardware.SP_TIME,
    "`overlap_coefficient.json`": hardware.OVERLAP,
}
TABLE = re.compile(r"(?<=\| file \| key \| meaning \| unit \|\n\|---\|---\|---\|---\|\n)(?:\|.*\n)+")


def rows() -> list[tuple[str, str, str, str]]:
    """(file, key, meaning, unit) of the numbers in profile files; choices of parts that are recomputed share a row."""
    found = []
    for file, content in CONTENTS.items():
        texts = [(table.keys.form, text) for table, text in content.entries.values()]
        texts += [(f"galvatron.{name}", text) for name, (_, text) in content.ours.items()]
        for key, text in texts:
            unit, _, meaning = text.partition(": ")
            found.append((file, re.sub(r"(spared|again)_.*_mib", r"\1_…_mib", key), meaning, unit))
    return list(dict.fromkeys(found))


def main() -> int:
    lines, last = [], ""
    for file, key, meaning, unit in rows():
        cells = f"{file} |" if file != last else "|"
        lines.append(f"| {cells} `{key.replace('|', chr(92) + '|')}` | {meaning} | {unit} |\n")
        last = file
    return write_or_check({PAGE: TABLE.sub(lambda _: "".join(lines), PAGE.read_text(encoding="utf-8"))}, "the code")


if __name__ == "__main__":
    sys.exit(main())
