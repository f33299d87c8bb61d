"""Starts the processes of a launch on this host, watches them, and ends them all when one ends badly."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ..plan import GalvatronError

POLL_S = 0.1
GRACE_S = 5.0  # between asking a process to end and ending it
LOG_TAIL_LINES = 12


class LaunchError(GalvatronError):
    """A rank of a launch ended badly."""


def launch(module: str, arguments: Sequence[str], nproc: int, log_folder: str | Path, timeout_s: float) -> None:
    """Run `python -m module arguments…` as `nproc` CPU processes of one world and wait for them.

    Rank r writes to `workerlog.r` in the log folder. Raises LaunchError that names the first rank that failed, or
    the time-out; no process of the launch is left behind. Exit code 2 of a rank is passed on as that of bad input.
    """
    folder = Path(log_folder)
    folder.mkdir(parents=True, exist_ok=True)
    ports = _free_ports(nproc)
    endpoints = [f"127.0.0.1:{port}" for port in ports]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(nproc):
            with (folder / f"workerlog.{rank}").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", module, *arguments],
                        env={**os.environ, **_environment(rank, endpoints)},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        preexec_fn=_die_with_parent,
                    )
                )
        _wait(processes, folder, time.monotonic() + timeout_s, timeout_s)
    finally:
        _end(processes)


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
    }


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


def _die_with_parent() -> None:
    pr_set_pdeathsig = 1  # prctl(2)
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, deadline: float, timeout_s: float) -> None:
    while True:
        codes = [process.poll() for process in processes]
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        if failed is not None:
            raise _failure(failed, codes[failed] or 1, folder)
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            late = ", ".join(str(rank) for rank, code in enumerate(codes) if code is None)
            raise LaunchError(f"rank {late} did not end within {timeout_s:.0f} s; logs are in {folder}")
        time.sleep(POLL_S)


def _failure(rank: int, code: int, folder: Path) -> LaunchError:
    log = folder / f"workerlog.{rank}"
    tail = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    error = LaunchError("\n".join([f"rank {rank} {how}; the end of {log}:", *(f"  {line}" for line in tail)]))
    if code == 2:
        error.exit_code = 2
    return error


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
