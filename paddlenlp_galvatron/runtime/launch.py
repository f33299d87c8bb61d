"""Starts the processes of a launch on this host, watches them, and ends them all when one ends badly."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..plan import GalvatronError
from .ports import free_ports

POLL_S = 0.1
GRACE_S = 5.0  # between asking a process to end and ending it
LOG_TAIL_LINES = 40  # a Paddle exception puts its message this far above its end


class LaunchError(GalvatronError):
    """A rank of a launch ended badly."""


def launch(module: str, arguments: Sequence[str], nproc: int, log_folder: str | Path, timeout_s: float) -> None:
    """Run a `Launch` to its end."""
    with Launch(module, arguments, nproc, log_folder, timeout_s) as running:
        for _ in running.wait():
            pass


class Launch:
    """`python -m module arguments…` as `nproc` CPU processes of one world, while the context is open.

    Rank r writes to `workerlog.r` in the log folder. No process outlives the context.
    """

    def __init__(self, module: str, arguments: Sequence[str], nproc: int, log_folder: str | Path, timeout_s: float):
        self._command = [sys.executable, "-m", module, *arguments]
        self._nproc, self._timeout_s = nproc, timeout_s
        self._folder = Path(log_folder)
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Launch:
        self._folder.mkdir(parents=True, exist_ok=True)
        endpoints = [f"127.0.0.1:{port}" for port in free_ports(self._nproc)]
        try:
            for rank in range(self._nproc):
                self._processes.append(self._start(rank, endpoints))
        except BaseException:
            _end(self._processes)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        _end(self._processes)

    def wait(self) -> Iterator[None]:
        """Wait for all ranks, giving the caller a turn now and then.

        Raises LaunchError that names the rank that failed, or those that are late. Its exit code is 2 where the
        rank's was: bad input.
        """
        deadline = time.monotonic() + self._timeout_s
        while True:
            codes = [process.poll() for process in self._processes]
            if any(codes):
                raise self._failure(codes)
            yield
            if all(code == 0 for code in codes):
                return
            if time.monotonic() > deadline:
                late = ", ".join(str(rank) for rank, code in enumerate(codes) if code is None)
                raise LaunchError(f"rank {late} did not end within {self._timeout_s:.0f} s; logs: {self._folder}")
            time.sleep(POLL_S)

    def _start(self, rank: int, endpoints: list[str]) -> subprocess.Popen[bytes]:
        with (self._folder / f"workerlog.{rank}").open("wb") as log:
            return subprocess.Popen(
                self._command,
                env={**os.environ, **_environment(rank, endpoints)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=_die_with_parent,
            )

    def _failure(self, codes: list[int | None]) -> LaunchError:
        # A rank that was killed or that found bad input is the cause; others then fail for want of their peer.
        rank = min((r for r, code in enumerate(codes) if code), key=lambda r: (_blame(codes[r] or 0), r))
        code = codes[rank] or 1
        log = self._folder / f"workerlog.{rank}"
        tail = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        error = LaunchError("\n".join([f"rank {rank} {how}; the end of {log}:", *(f"  {line}" for line in tail)]))
        error.exit_code = 2 if code == 2 else error.exit_code
        return error


def _blame(code: int) -> int:
    return 0 if code < 0 else 1 if code == 2 else 2


def _environment(rank: int, endpoints: list[str]) -> dict[str, str]:
    world = len(endpoints)
    return {
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(world),
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_MASTER": endpoints[0],
        "PADDLE_DISTRI_BACKEND": "gloo",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", "ignore"),  # Paddle's own, many a rank
    }


def _die_with_parent() -> None:
    pr_set_pdeathsig = 1  # prctl(2)
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        try:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
