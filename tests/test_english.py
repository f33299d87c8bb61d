"""`tools/english.py` finds sentences without a subject and the house's own words, and lets plain ones pass."""

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[1] / "tools" / "english.py"
BAD = {
    "a.py": '"""Times of a step.\n\n    What counts is\n    the median."""\n',
    "b.py": "x = 1  # ms. Of a lap, the first\ny = 2  # that is shown\n",
    "c.py": 'raise ValueError(f"{x} is wrong. That is known")\n',
    "d.md": "# Plans\n\nIt runs.\nWho reads\nthis knows.\n\n- Of these, two.\n",
    "e.hpp": "// Costs. What they\n// are is known.\nint f();\n",
}
GOOD = {
    "a.py": '"""Times of a step. What is a step?"""\nWhat = 1  # of each step\n',
    "b.md": "# What fits\n\nIs that it? `Of. What` is code.\n\n```sh\nWhat\n```\n",
}


def found(folder, files):
    for name, text in files.items():
        (folder / name).write_text(text)
    ran = subprocess.run([sys.executable, TOOL, *(folder / name for name in files)], capture_output=True, text=True)
    return ran.returncode, [Path(line.partition(":")[0]).name for line in ran.stderr.splitlines()]


def test_bad_sentences_are_found_and_good_ones_pass(tmp_path):
    assert found(tmp_path, BAD) == (1, ["a.py", "b.py", "b.py", "b.py", "c.py", "d.md", "d.md", "e.hpp"])
    assert found(tmp_path, GOOD) == (0, [])
