"""`tools/english.py` finds sentences without a subject, riddles and private names, and second Chinese terms; plain text
passes."""

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "english.py"
BAD = {
    "a.py": '"""Times of a step.\n\n    What counts is\n    the median."""\n',
    "b.py": "x = 1  # ms. Of a lap, the first\ny = 2  # that is shown\n",
    "c.py": 'raise ValueError(f"{x} is wrong. That is known")\n',
    "d.md": "# Plans\n\nIt runs.\nWho reads\nthis knows.\n\n- Of these, two.\n",
    "e.hpp": "// Costs. What they\n// are is known.\nint f();\n",
    "f.py": "def tell_ranks(seen): ...\ntold = 1  # the run goes on\nfor heard_of in (): ...\n",
    "g.md": "Whatever is\nasked for at hand lies beside the\nfullest.\n",
    "en/h.md": "Eight cards are enough.\n",
    "zh/i.md": "全局批量与续训，用 8 张 GPU，\n按数据手册计价。\n",
}
GOOD = {
    "a.py": '"""Times of a step. What is a step?"""\nWhat = 1  # of each step\nuntold = retell = What\n',
    "b.md": "# What fits\n\nIs that it? `Of. What told` is code, besides.\n\n```sh\nWhat\n```\n",
    "en/c.md": "One network card a GPU.\n",
    "zh/d.md": "全局批大小与断点续训，`批量` 是代码。\n\n```text\n批量\n```\n",
}


def found(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    ran = subprocess.run([sys.executable, TOOL, *(folder / name for name in files)], capture_output=True, text=True)
    return ran.returncode, [Path(line.partition(":")[0]).name for line in ran.stderr.splitlines()]


def test_bad_sentences_are_found_and_good_ones_pass(tmp_path):
    one_each = ["a.py", *["b.py"] * 3, "c.py", "d.md", "d.md", "e.hpp"]
    assert found(tmp_path, BAD) == (1, [*one_each, *["f.py"] * 4, *["g.md"] * 5, "h.md", *["i.md"] * 5])
    assert found(tmp_path, GOOD) == (0, [])
