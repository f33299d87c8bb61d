"""Runs hostile cases, each in a process of its own under limits of time and memory, and says what it should not do.

PYTHONPATH=tests python -m hostile.run --cases 20000 --seed 1
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import NoReturn

from paddlenlp_galvatron.cli.main import main as galvatron

from . import configs, hostfiles, options, plans, profiles, safetensors
from .case import Case, Generator

# How often each is drawn.
GENERATORS: dict[Generator, int] = {
    plans.plan: 5,
    configs.model: 2,
    configs.options_json: 2,
    configs.options_yaml: 2,
    profiles.profile: 2,
    profiles.data_sheet: 1,
    profiles.nccl_log: 1,
    hostfiles.hostfile: 1,
    safetensors.huggingface: 1,
    options.one_option: 4,
    options.words: 4,
}
ENDS = (0, 2, 3)
CPU_S = 3  # of a case beyond the start of Python: the promise is 2, and the machine may be slow
HANGS_S = 60  # by the clock: nothing waits for so long, even where others work
MIB = 2**20
MEMORY_MIB = 500  # beyond what the process has when the case begins
BEGINNINGS = ("error: ", "note: ", "warning: ")
SURPRISE = "error: unexpected "  # what nobody thought of
LONGEST = 2100  # characters of a line
SHOWN = 100  # troubles


def case_of(seed: int, number: int) -> Case:
    """The case of a number: the same on every machine."""
    random = Random(f"{seed} {number}")
    make = random.choices(list(GENERATORS), list(GENERATORS.values()))[0]
    return make(random)


def troubles_of(case: Case) -> list[str]:
    """What is wrong with how a case ends; empty: nothing."""
    folder = Path(tempfile.mkdtemp(prefix="hostile-"))
    place = folder / "place"
    try:
        for name, content in case.files.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(content)
        place.mkdir(exist_ok=True)
        child = os.fork()
        if child == 0:
            _be_the_command(case, place, folder)
        _, status, used = os.wait4(child, 0)
        out, err = ((folder / name).read_bytes().decode(errors="surrogateescape") for name in ("out", "err"))
        code = os.waitstatus_to_exitcode(status)
        return [
            *_wrong_end(code, used.ru_utime + used.ru_stime),
            *_wrong_words(code, out, err),
            *_left_behind(case, place, code),
        ]
    finally:
        shutil.rmtree(folder)


def _be_the_command(case: Case, place: Path, folder: Path) -> NoReturn:
    code = 99
    try:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / name, os.O_CREAT | os.O_WRONLY), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))  # noqa: SIM115
        os.environ["HOME"] = str(place)
        os.chdir(place)
        subprocess.Popen = _nothing_is_started  # type: ignore[assignment,misc]
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(HANGS_S)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 5))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        most = _data_bytes() + MEMORY_MIB * MIB
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        code = galvatron(case.words)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _nothing_is_started(*_: object, **__: object) -> NoReturn:
    raise AssertionError("a hostile case starts a process")


def _data_bytes() -> int:
    """What RLIMIT_DATA counts of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmData:"))


def _wrong_end(code: int, cpu_s: float) -> Iterator[str]:
    if code == -signal.SIGXCPU:
        yield f"takes more than {CPU_S} s"
    elif code == -signal.SIGALRM:
        yield f"does not end in {HANGS_S} s"
    elif code not in ENDS:
        yield f"ends with {code} after {cpu_s:.1f} s"


def _wrong_words(code: int, out: str, err: str) -> Iterator[str]:
    lines = err.splitlines()
    for line in lines:
        if (
            not line.startswith(BEGINNINGS)
            or line.startswith("error: unexpected ")
            or "Error:" in line
            or len(line) > 2100
        ):
            yield f"says {line[:300]!r}"
    errors = [line for line in lines if line.startswith("error: ")]
    if bool(errors) != (code != 0):
        yield f"ends with {code} and {len(errors)} lines of error"
    if len(set(errors)) != len(errors):
        yield "says one fault twice"
    for stream in (out, err):
        if shown := [char for char in stream if not char.isprintable() and char != "\n"]:
            yield f"prints {shown[0]!r}"


def _left_behind(case: Case, place: Path, code: int) -> Iterator[str]:
    there = {str(path.relative_to(place)): path for path in place.rglob("*") if not path.is_dir()}
    for name, path in there.items():
        if name not in case.files:
            if not name.startswith(case.writes or "\0") or (code and not name.startswith("logs/")):
                yield f"leaves {name[:200]!r}"
        elif path.read_bytes() != case.files[name] and name not in case.writes:
            yield f"changes {name}"
    yield from (f"removes {name}" for name in case.files if name not in there)


def warm_up() -> None:
    """Import what cases need once, before the processes are made."""
    import paddlenlp_galvatron.cost_model.model
    import paddlenlp_galvatron.training.convert
    import paddlenlp_galvatron.training.parity
    import paddlenlp_galvatron.training.pretrained  # noqa: F401

    for command in options.BASES:
        options.options_of(command)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="write the files of a single case here instead of running it")
    given = parser.parse_args()
    if given.keep:
        case = case_of(given.seed, given.first)
        for name, content in case.files.items():
            (given.keep / name).parent.mkdir(parents=True, exist_ok=True)
            (given.keep / name).write_bytes(content)
        print(case.words)
        return 0
    warm_up()
    begin, found = time.monotonic(), Counter[str]()
    for number in range(given.first, given.first + given.cases):
        case = case_of(given.seed, number)
        if troubles := troubles_of(case):
            found["cases"] += 1
            print(f"case {number}: {' '.join(case.words)[:200]!r}: {'; '.join(troubles)[:600]}", flush=True)
            if found["cases"] >= SHOWN:
                break
    print(f"{number - given.first + 1} cases, {found['cases']} with trouble, in {time.monotonic() - begin:.0f} s")
    return int(found["cases"] > 0)


if __name__ == "__main__":
    sys.exit(main())
