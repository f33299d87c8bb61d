"""Runs hostile cases, in processes of their own under limits of time and memory, and says what it should not do."""

import json
import os
import resource
import shutil
import signal
import subprocess
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from paddlenlp_galvatron.cli.main import main as galvatron
from paddlenlp_galvatron.launch import processes

from . import options
from .case import Case

ENDS = (0, 2, 3)
CPU_S = 15  # of a case beyond the start of Python; 2 are promised, and busy machines count several times as much
HANGS_S = 600  # by the clock: nothing waits for so long, even where others work
MIB = 2**20
MEMORY_MIB = 500  # beyond the process's own when the case begins
BEGINNINGS = ("error: ", "note: ", "warning: ")
SURPRISE = "error: unexpected "  # an unforeseen case
LONGEST = 2100  # characters of a line
BATCH = 50  # cases of a process
KILLED = {-signal.SIGPROF: f"takes more than {CPU_S} s", -signal.SIGALRM: f"does not end in {HANGS_S} s"}


def troubles_of(cases: Sequence[Case]) -> dict[int, list[str]]:
    """Faults in how cases end, by their place in the sequence; empty: none.

    A process takes BATCH of them, one after the other; one that kills it is reported, and the next process continues.
    """
    found: dict[int, list[str]] = {}
    next_case = 0
    while next_case < len(cases):
        with tempfile.TemporaryDirectory(prefix="hostile-") as name:
            folder = Path(name)
            child = os.fork()
            if child == 0:
                _work(folder, cases, range(next_case, min(next_case + BATCH, len(cases))))
            _, status = os.waitpid(child, 0)
            lines = (folder / "done").read_text().splitlines() if (folder / "done").exists() else []
        for line in lines:
            number, troubles = json.loads(line)
            if troubles:
                found[number] = troubles
        next_case += len(lines)
        if code := os.waitstatus_to_exitcode(status):
            found[next_case] = [KILLED.get(code, f"kills its process: {code}")]
            next_case += 1
    return found


def _work(folder: Path, cases: Sequence[Case], numbers: range) -> NoReturn:
    """The life of a process: a line of JSON for each case that it has brought to an end."""
    code = 99
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ["HOME"] = str(folder)
        subprocess.Popen = processes.begin_process = _nothing_is_started  # type: ignore[assignment,misc]
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for number in numbers:
            troubles = _troubles_here(cases[number], folder / str(number))
            with (folder / "done").open("a") as done:
                done.write(json.dumps([number, troubles]) + "\n")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _troubles_here(case: Case, folder: Path) -> list[str]:
    place = folder / "place"
    place.mkdir(parents=True)
    for name, content in case.files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)
    os.chdir(place)
    out, err = ((folder / name).open("w", encoding="utf-8") for name in ("out", "err"))
    _limit()
    with redirect_stdout(out), redirect_stderr(err):
        for number, stream in ((1, out), (2, err)):  # output of other code than Python, too
            os.dup2(stream.fileno(), number)
        code = galvatron(case.words)
    out.close()
    err.close()
    signal.setitimer(signal.ITIMER_PROF, 0)
    reported = [(folder / name).read_bytes().decode(errors="surrogateescape") for name in ("out", "err")]
    troubles = [*_wrong_end(code), *_wrong_words(case, code, *reported), *_left_behind(case, place, code)]
    shutil.rmtree(folder)
    return troubles


def _limit() -> None:
    """Set the limits of time and memory of the next case; beyond them, it ends the process, or finds no memory."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(HANGS_S)
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    most = _data_bytes() + MEMORY_MIB * MIB
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))


def _nothing_is_started(*_: object, **__: object) -> NoReturn:
    raise AssertionError("a hostile case starts a process")


def _data_bytes() -> int:
    """The memory of this process that RLIMIT_DATA counts."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmData:"))


def _wrong_end(code: int) -> Iterator[str]:
    if code not in ENDS:
        yield f"ends with {code}"


def _wrong_words(case: Case, code: int, out: str, err: str) -> Iterator[str]:
    lines = err.splitlines()
    for line in lines:
        if not line.startswith(BEGINNINGS) or line.startswith(SURPRISE) or "Error:" in line or len(line) > LONGEST:
            yield f"says {line[:300]!r}"
    errors = [line for line in lines if line.startswith("error: ")]
    if bool(errors) != (code != 0):
        yield f"ends with {code} and {len(errors)} lines of error"
    if len(set(errors)) != len(errors):
        yield "says one fault twice"
    if case.says not in "\n".join(errors):
        yield f"says nothing of {case.says!r}"
    for stream in (out, err):
        if shown := [char for char in stream if not char.isprintable() and char != "\n"]:
            yield f"prints {shown[0]!r}"


def _left_behind(case: Case, place: Path, code: int) -> Iterator[str]:
    there = {str(path.relative_to(place)): path for path in place.rglob("*") if path.is_symlink() or not path.is_dir()}
    for name, path in there.items():
        if name not in case.files:
            if not name.startswith(case.writes or "\0") or (code and not name.startswith("logs/")):
                yield f"leaves {name[:200]!r}"
        elif path.read_bytes() != case.files[name] and name not in case.writes:
            yield f"changes {name}"
    yield from (f"removes {name}" for name in case.files if name not in there)


def warm_up() -> None:
    """Import the modules of cases once, before the processes are made: Paddle takes seconds, and starts processes
    itself."""
    with suppress(ImportError):
        for name in ("paddle", "paddlenlp.trainer", "paddlenlp_galvatron.training.inputs"):
            import_module(name)
    for command in options.BASES:
        options.options_of(command)
