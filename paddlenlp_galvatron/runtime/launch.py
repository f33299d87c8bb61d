"""Starts the processes of a launch on this node, watches them, and ends them all when one ends badly."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..plan import GalvatronError, UserError
from .nodes import ONE_NODE, Nodes
from .out_of_memory import EXIT_CODE as OUT_OF_MEMORY
from .out_of_memory import ended_out_of_memory, kernel_kills, told_peak_mib

POLL_S = 0.1
GRACE_S = 5.0  # between asking a process to end and ending it
COMMON_ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", "ignore"),  # Paddle's own, many a rank
}
# glibc's allocator: what was freed is kept and used again. Given back, its pages cost more than most messages of CPU
# processes when they are touched anew. 32 MiB is the highest threshold that every glibc takes.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**30)}
ERROR = "error: "  # how a rank begins each line of what the user can mend (groups.run_as_rank)
LOG_TAIL_LINES = 40  # a Paddle exception puts its message this far above its end


class LaunchError(GalvatronError):
    """A rank of a launch ended badly."""


class OutOfMemory(LaunchError):
    """A rank ran out of memory. `peak_mib`: the most that its tensors held in the step that failed, if it could say."""

    def __init__(self, rank: int, peak_mib: float | None, message: str):
        super().__init__(message)
        self.rank, self.peak_mib = rank, peak_mib


def launch(
    module: str,
    arguments: Sequence[str],
    nproc: int,
    log_folder: str | Path,
    timeout_s: float,
    nodes: Nodes = ONE_NODE,
) -> None:
    """Run a `Launch` to its end."""
    with Launch(module, arguments, nproc, log_folder, timeout_s, nodes) as running:
        for _ in running.wait():
            pass


class Launch:
    """`python -m module arguments…` as `nproc` processes a node of one world, while the context is open. The module may
    be a script's path.

    Each process has a GPU of its own where Paddle finds some. Rank r writes to `workerlog.r` in the log folder.
    No process outlives the context.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        nproc: int,
        log_folder: str | Path,
        timeout_s: float,
        nodes: Nodes = ONE_NODE,
        forward_term: bool = False,
    ):
        """`forward_term`: on SIGTERM tell the processes and wait for them, instead of ending at once."""
        how = [] if module.endswith(".py") else ["-m"]
        self._command = [sys.executable, *how, module, *arguments]
        self._nproc, self._timeout_s, self._nodes = nproc, timeout_s, nodes
        self._first = nodes.node_rank * nproc  # rank of this node's first process
        self._folder = Path(log_folder)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._forward_term = forward_term

    def __enter__(self) -> Launch:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._kills_before = kernel_kills()
        devices = _devices(self._nproc)
        world = self._nodes.environment(self._nproc)
        try:
            for rank in range(self._nproc):
                self._processes.append(self._start(rank, world[rank] | devices[rank]))
        except BaseException:
            _end(self._processes)
            raise
        if self._forward_term:
            self._before = signal.signal(signal.SIGTERM, lambda *_: self._terminate())
        return self

    def __exit__(self, *_: object) -> None:
        if self._forward_term:
            signal.signal(signal.SIGTERM, self._before)
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
                late = ", ".join(str(rank) for rank, code in enumerate(codes, self._first) if code is None)
                raise LaunchError(f"rank {late} did not end within {self._timeout_s:.0f} s; logs: {self._folder}")
            time.sleep(POLL_S)

    def _terminate(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.terminate()

    def _start(self, rank: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        with self._log(rank).open("wb") as log:
            return subprocess.Popen(
                self._command,
                env={**KEEP_MEMORY, **os.environ, **COMMON_ENVIRONMENT, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=_die_with_parent,
            )

    def _log(self, rank: int) -> Path:
        return self._folder / f"workerlog.{self._first + rank}"

    def _failure(self, codes: list[int | None]) -> LaunchError:
        # A rank that was killed, ran out of memory or found bad input is the cause; others fail for want of their peer.
        local = min((r for r, code in enumerate(codes) if code), key=lambda r: (_blame(codes[r] or 0), r))
        code, rank = codes[local] or 1, self._first + local
        path = self._log(local)
        log = path.read_text(errors="replace")
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        starved = ended_out_of_memory(code, log, killed=kernel_kills() > self._kills_before)
        lines = [f"rank {rank} {'ran out of memory' if starved else how}; the end of {path}:"]
        message = "\n".join([*lines, *(f"  {line}" for line in log.splitlines()[-LOG_TAIL_LINES:])])
        if starved:
            return OutOfMemory(rank, told_peak_mib(log), message)
        told = [line.removeprefix(ERROR) for line in log.splitlines() if line.startswith(ERROR)]
        error = LaunchError("\n".join(told) if code == 2 and told else message)
        error.exit_code = 2 if code == 2 else error.exit_code
        return error


def _blame(code: int) -> int:
    return 0 if code < 0 or code == OUT_OF_MEMORY else 1 if code == 2 else 2


def _devices(nproc: int) -> list[dict[str, str]]:
    """What makes each local rank compute on its own GPU, or all on CPU where Paddle finds none. Raises UserError."""
    from .device import gpu_count

    gpus = gpu_count()
    if gpus == 0:
        threads = os.environ.get("OMP_NUM_THREADS", "1")  # processes share the cores already
        return [{"PADDLE_DISTRI_BACKEND": "gloo", "OMP_NUM_THREADS": threads}] * nproc
    if nproc > gpus:
        raise UserError(f"nproc: {nproc} processes on a node with {gpus} GPUs; start {gpus} or fewer")
    return [{"FLAGS_selected_gpus": str(gpu)} for gpu in range(nproc)]


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
