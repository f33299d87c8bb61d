"""Ranks and commands forked from a process that has imported Paddle and PaddleNLP, which else takes 4 s of CPU each.

Nothing else is shared: each is a process of its own, with the environment, words and log that it is given, and imports
this project itself: this file, which it begins in, must not.

Launches of the tests fork their ranks from one server. `python forked_ranks.py` and what would stand behind `python`
runs any program so that it forks the ranks that it launches: they are its children, as a user's are.
"""

from __future__ import annotations

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
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import BaseContext, ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

IMPORTED = [  # others' alone
    *("numpy", "pydantic", "paddle", "paddle.distributed.fleet", "paddlenlp.trainer"),
    *("paddlenlp.transformers.llama.modeling", "paddlenlp.transformers.qwen2.modeling"),
]
READ_ONCE = ("LD_", "MALLOC_", "GLIBC_", "FLAGS_", "OMP_", "PYTHON")  # variables: when a process begins, or by Paddle
PATH = "PYTHONPATH"
PROJECT = "paddlenlp_galvatron"
NO_MAIN = ModuleType("__main__")  # multiprocessing would let each process import the program of the tests
PR_SET_PDEATHSIG = 1  # prctl(2)


class Forked:
    """A rank, as far as a launcher knows `subprocess.Popen`."""

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


def forking(begin: Callable[..., Any], context: BaseContext | None = None) -> Callable[..., Any]:
    """A function that forks a rank, where that makes no difference, in place of the launcher's `begin_process`: from
    the server, or in another `context`."""

    def begin_or_fork(command: Sequence[str], environment: Mapping[str, str], log: Path, descriptor: int) -> Any:
        begun_with = read_once(os.environ) if context else _server()[1]
        if command[0] != sys.executable or read_once(environment) != begun_with:
            return begin(command, environment, log, descriptor)
        return fork(command[1:], environment, log, descriptor, context=context)

    return begin_or_fork


def fork(
    words: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    descriptor: int | None = None,
    leads: bool = False,
    context: BaseContext | None = None,
) -> Forked:
    """Begin `python WORDS`, words being a script, or `-m` and a module, and what is passed on. The environment names
    the descriptor of its status, which it gets. `leads`: a process group of its own."""
    log.write_bytes(b"")
    from paddlenlp_galvatron.launch.processes import STATUS

    opened = {} if descriptor is None else {STATUS: f"/proc/{os.getpid()}/fd/{descriptor}"}
    arguments = (list(words), dict(environment), log.resolve(), Path.cwd(), opened, leads)
    process = (context or _server()[0]).Process(target=_become, args=arguments, daemon=True)
    with mock.patch.dict(sys.modules, {"__main__": NO_MAIN}):
        process.start()
    return Forked(process)


def read_once(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that cannot be changed in a process that has begun."""
    return {name: value for name, value in environment.items() if name.startswith(READ_ONCE) and name != PATH}


def begun_with() -> dict[str, str]:
    """The environment of the forking process: as a launcher gives its ranks, so that nothing read once differs."""
    from paddlenlp_galvatron.launch.processes import COMMON_ENVIRONMENT, KEEP_MEMORY

    return {**KEEP_MEMORY, "OMP_NUM_THREADS": "1", **os.environ, **COMMON_ENVIRONMENT}


def forking_command(*words: str) -> list[str]:
    """Words behind `python` of a `galvatron` command that forks its ranks. Its environment: `begun_with()`."""
    return [__file__, "-m", f"{PROJECT}.cli.main", *words]


@cache
def _server() -> tuple[ForkServerContext, dict[str, str]]:
    """The context that forks, and the variables that it began with."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    environment = begun_with()
    with mock.patch.dict(os.environ, environment):
        forkserver.ensure_running()
    return context, read_once(environment)


def _become(
    words: list[str], environment: dict[str, str], log: Path, folder: Path, opened: dict[str, str], leads: bool
) -> None:
    """Never returns. `opened`: files, by the variables with their descriptors."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if leads:
        os.setpgid(0, 0)
    _leave_behind()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment | {name: str(os.open(path, os.O_RDWR)) for name, path in opened.items()})
    sys.modules["numpy"].random.seed()  # not as the other ranks
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


def _leave_behind() -> None:
    """Drop state of a forking command that a started process would not have."""
    begins_with = dict.fromkeys((signal.SIGTERM, signal.SIGHUP), signal.SIG_DFL)
    for number, handler in (begins_with | {signal.SIGINT: signal.default_int_handler}).items():
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)
    for name in [name for name in sys.modules if name.partition(".")[0] == PROJECT]:
        del sys.modules[name]
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
    beside = [] if is_safe else [str(folder if is_module else Path(words[0]).parent)]
    sys.path[:0] = [*beside, *filter(None, os.environ.get(PATH, "").split(os.pathsep))]
    if is_module:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    from paddlenlp_galvatron.launch import processes

    for name in IMPORTED:
        importlib.import_module(name)
    processes.begin_process = forking(processes.begin_process, multiprocessing.get_context("fork"))
    _run(sys.argv[1:], Path.cwd())
