"""The core on random and hostile problems against enumeration, watched by sanitizers; see fuzz/fuzz.cpp."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("c++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


def fuzz(folder: Path, flags: str, first_seed: int, cases: int, *threads: str) -> None:
    program = folder / "fuzz"
    source = Path(__file__).parent / "fuzz" / "fuzz.cpp"
    options = ["-O1", "-g", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{ROOT / 'search_engine'}"]
    subprocess.run([str(COMPILER), *options, *flags.split(), str(source), "-o", str(program)], check=True, timeout=900)
    command = [str(program), str(first_seed), str(cases), *threads]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert (ran.returncode, ran.stdout) == (0, f"{cases} cases are right\n"), ran.stdout + ran.stderr[-4000:]


@pytest.mark.slow
def test_no_case_is_wrong_or_touches_what_it_must_not(tmp_path: Path) -> None:
    fuzz(tmp_path, "-fsanitize=address,undefined -fno-sanitize-recover=all", 0, 10_000)


@pytest.mark.slow
def test_threads_may_share_a_pipeline(tmp_path: Path) -> None:
    fuzz(tmp_path, "-fsanitize=thread", 0, 4_000, "threads")
