"""The ceiling of lines: which lines count, and that `make lint` fails above it."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from size import above, code_lines, sizes

PYTHON = '''"""A docstring
of two lines."""

import os  # with a comment

# a comment
def one():
    """Its docstring."""
    text = """not a docstring
    of two lines"""
    return text
'''


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("a.py", PYTHON, 5),
        ("a.py", "", 0),
        ("a.hpp", "#include <map>\n// a comment\n/* two\n lines */\nint a = 1;  // one\n\n", 2),
        ("a.cpp", 'auto url = "http://a/*b";\nint c; /* d */\n', 2),
        ("a.sh", "#!/bin/sh\n# a comment\n\necho '# no comment'\n", 1),
    ],
)
def test_lines_of_code(name, text, lines):
    assert code_lines(name, text) == lines


def test_ten_lines_above_a_ceiling_fail():
    files = {f"paddlenlp_galvatron/{place}/a.py": "x = 1\n" * 10 for place in ("plan", "cli")}
    counted = sizes({**files, "tests/test_a.py": "x = 1\n" * 30, "docs/hooks.py": "x = 1\n"})
    assert counted == {"paddlenlp_galvatron/plan": 10, "paddlenlp_galvatron/cli": 10, "tests": 30}
    assert above(counted, {"code": 20, "tests": 30}) == []
    (fault,) = above(counted, {"code": 10, "tests": 30})
    assert fault.startswith("code: 20 lines, 10 above the ceiling")
    (fault,) = above(counted, {"code": 20, "tests": 29})
    assert fault.startswith("tests: 30 lines, 1 above the ceiling")
