"""Ranks and commands forked from a process that has imported Paddle, PaddleNLP and this project: 0.1 s of processor
time in place of 5.

Nothing else is shared: each is a process of its own, with the environment, words and log that it is given. Tests of
what importing does to a process start one instead: `@pytest.mark.started("why")`.

Launches of the tests fork their ranks from one server. `python forked_ranks.py` and words as behind `python` runs a
program that forks the ranks that it launches: they are its children, as a user's are.
"""

import contextlib
import ctypes
import gc
import importlib
import multiprocessing
import os
import runpy
import signal
import stat
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import BaseContext, ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

PROJECT = "paddlenlp_galvatron"
SOURCES = Path(__file__).parents[2] / PROJECT
IMPORTED = [
    *("numpy", "pydantic", "paddle", "paddle.distributed.fleet", "paddlenlp.trainer"),
    *("paddlenlp.transformers.llama.modeling", "paddlenlp.transformers.qwen2.modeling"),
]
# Variables that are read when a process begins, or by Paddle when it is imported.
READ_ONCE = ("LD_", "MALLOC_", "GLIBC_", "FLAGS_", "OMP_", "PYTHON", "CUSTOM_DEVICE_")
PATH = "PYTHONPATH"
NO_MAIN = ModuleType("__main__")  # multiprocessing would let each process import the program of the tests
PR_SET_PDEATHSIG = 1  # prctl(2)


class Forked:
    """A forked process with the methods of `subprocess.Popen` that launchers and tests use."""

    def __init__(self, process: BaseProcess):
        self._process, self.pid = process, process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("rank", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended between the two, as Popen knows, too
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def begin_forked(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    descriptor: int,
    context: BaseContext | None = None,
) -> Forked:
    """In place of the launcher's `begin_process`: fork a rank from the server, or in another `context`. Raises
    ValueError where a forked process would differ from one that is started."""
    forking = read_once(os.environ) if context else _server()[1]
    wanted = read_once(environment)
    if command[0] != sys.executable or wanted != forking:
        differing = sorted(name for name, _ in set(wanted.items()) ^ set(forking.items()))
        raise ValueError(f"{command[0]} with {differing} cannot be forked: mark the test `started`, and say why")
    return fork(command[1:], environment, log, descriptor, context=context)


def fork(
    words: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    descriptor: int | None = None,
    leads: bool = False,
    folder: Path | None = None,
    context: BaseContext | None = None,
) -> Forked:
    """Begin `python WORDS`, words being a script, or `-m` and a module, and what is passed on. The environment names
    the descriptor of its status, which it gets. `leads`: a process group of its own."""
    log.write_bytes(b"")
    from paddlenlp_galvatron.launch.processes import STATUS

    opened = {} if descriptor is None else {STATUS: f"/proc/{os.getpid()}/fd/{descriptor}"}
    arguments = (list(words), dict(environment), log.resolve(), folder or Path.cwd(), opened, leads, bool(context))
    process = (context or _server()[0]).Process(target=_become, args=arguments, daemon=True)
    with mock.patch.dict(sys.modules, {"__main__": NO_MAIN}):
        process.start()
    return Forked(process)


def fork_command(words: Sequence[str], log: Path, folder: Path | None = None, **environment: str) -> Forked:
    """A `galvatron` command in a process group of its own, whose ranks are its children; `log` has its output."""
    return fork(forking_command(*words), begun_with() | environment, log, leads=True, folder=folder)


def forking_command(*words: str) -> list[str]:
    """Words behind `python` of a `galvatron` command that forks its ranks. Its environment: `begun_with()`."""
    return [__file__, "-m", f"{PROJECT}.cli.main", *words]


def read_once(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that cannot be changed in a process that has begun."""
    return {name: value for name, value in environment.items() if name.startswith(READ_ONCE) and name != PATH}


def begun_with() -> dict[str, str]:
    """The environment of the forking process: as a launcher gives its ranks, so that nothing read once differs."""
    from paddlenlp_galvatron.launch.processes import DEFAULTS

    return {**DEFAULTS, "OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1"}


@cache
def _server() -> tuple[ForkServerContext, dict[str, str]]:
    """The context that forks, and the variables that it began with."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED, *imported_modules()])
    environment = begun_with()
    with mock.patch.dict(os.environ, environment):
        forkserver.ensure_running()
    return context, read_once(environment)


def imported_modules() -> list[str]:
    """The project's modules but its programs, which a rank runs as `__main__`, and `register`, whose import acts."""
    names = {
        ".".join(path.relative_to(SOURCES.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in SOURCES.rglob("*.py")
        if path.stem not in ("__main__", "register") and '__name__ == "__main__"' not in path.read_text()
    }
    return sorted(names)


def _become(
    words: list[str],
    environment: dict[str, str],
    log: Path,
    folder: Path,
    opened: dict[str, str],
    leads: bool,
    from_command: bool,
) -> None:
    """Never returns. `opened`: files, by the variables with their descriptors."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if leads:
        os.setpgid(0, 0)
    _reset_signals(from_command)
    if from_command:  # its state would be passed on
        for name in [name for name in sys.modules if name.partition(".")[0] == PROJECT]:
            del sys.modules[name]
    _close_files()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment | {name: str(os.open(path, os.O_RDWR)) for name, path in opened.items()})
    sys.modules["numpy"].random.seed()  # differs from the other ranks
    sys.modules["paddle"].seed(int.from_bytes(os.urandom(4)))
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    gc.freeze()  # imports stay: collections take 0.2 s else
    code: Any = 0
    try:
        _run(words, folder)
    except SystemExit as ended:
        code = ended.code
        if code is not None and not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _reset_signals(keep_ignored: bool) -> None:
    """As a started process has them: it inherits those that a command ignores."""
    handlers = dict.fromkeys((signal.SIGTERM, signal.SIGHUP), signal.SIG_DFL)
    for number, handler in (handlers | {signal.SIGINT: signal.default_int_handler}).items():
        if not (keep_ignored and signal.getsignal(number) is signal.SIG_IGN):
            signal.signal(number, handler)


def _close_files() -> None:
    for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError):  # the descriptor of this listing
            if number > 2 and not stat.S_ISFIFO(os.fstat(number).st_mode):  # pipes are multiprocessing's
                os.close(number)


def _run(words: list[str], folder: Path) -> None:
    """As `python WORDS` in the folder does."""
    is_safe = words[0] == "-P"
    words = words[is_safe:]
    is_module = words[0] == "-m"
    sys.argv = words[is_module:]
    first = [] if is_safe else [str(folder if is_module else Path(words[0]).parent)]
    sys.path[:0] = [*first, *filter(None, os.environ.get(PATH, "").split(os.pathsep))]
    if is_module:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")


def _main() -> None:
    from paddlenlp_galvatron.launch import processes

    for name in IMPORTED:
        importlib.import_module(name)
    context = multiprocessing.get_context("fork")
    processes.begin_process = lambda *words: begin_forked(*words, context=context)
    _run(sys.argv[1:], Path.cwd())


if __name__ == "__main__":
    _main()
