"""Starts the processes of a launch on this node, watches them, and ends them all when one fails."""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from operator import methodcaller
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from ..base import GIB, GalvatronError, UserError, processor, reported
from ..base.process import heeded
from .faults import WAIT_S, WAIT_VARIABLE, Fault, FaultKind, LocalRanks, Rank
from .nodes import ONE_NODE, Nodes
from .status import VARIABLE as STATUS
from .status import RankStatusMemory
from .store import STORE, open_files
from .store import TOKEN_VARIABLE as TOKEN
from .watch import watch

Device = Literal["cpu", "gpu"]

POLL_S = 0.1
GRACE_S = 5.0  # between SIGTERM and SIGKILL
# glibc's allocator keeps freed memory for reuse. If it returned the memory, touching the pages again would cost more
# than most messages of CPU processes. 32 MiB is the highest threshold that every glibc accepts.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(GIB)}
# Variables of each rank that the user has not set. Paddle prints many warnings per rank.
DEFAULTS = KEEP_MEMORY | {"PYTHONWARNINGS": "ignore"}
RANK_MIB = 150  # least unshared memory of a CPU process with Paddle
RANKS_PER_CORE = 64  # with more, gloo's timeouts expire before every rank has run


class LaunchError(GalvatronError):
    """A rank or node of a launch failed; the first line names it. `waited`: none failed, but ranks waited for others
    for too long."""

    waited = False


class OutOfMemory(LaunchError):
    """A rank ran out of memory. `peak_mib`: peak of its tensors in the failed step, if known."""

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
    device: Device | None = None,
    wait_s: float | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Run a `Launch` to its end."""
    with Launch(module, arguments, World(nproc, nodes, device, wait_s, variables), log_folder, timeout_s) as running:
        for _ in running.wait():
            pass


@dataclass(frozen=True)
class World:
    """The processes of a launch."""

    nproc: int  # ranks of each node
    nodes: Nodes = ONE_NODE
    device: Device | None = None  # None: GPUs where Paddle finds some
    wait_s: float | None = None  # timeout of a rank in a collective; None: WAIT_S
    variables: Mapping[str, str] = field(default_factory=dict)  # environment variables, unless the user has set them


class Launch:
    """Runs `python -P -m module arguments…` as `nproc` processes per node of one world, while the context is open. -P:
    imports no code from the current folder, which may be untrusted. The module may be a script's path.

    Each process has its own GPU if Paddle finds GPUs. Rank r writes to `workerlog.r` in the log folder. No process
    outlives the context.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        world: World,
        log_folder: str | Path,
        timeout_s: float,
        forward_term: bool = False,
    ):
        """`forward_term`: on SIGTERM, or SIGHUP, signal the processes and wait for them, instead of ending at once."""
        how = [] if module.endswith(".py") else ["-P", "-m"]
        self._command = [sys.executable, *how, module, *arguments]
        self._world, self._timeout_s, self._forward_term = world, timeout_s, forward_term
        self._wait_s = world.wait_s or WAIT_S
        self._folder = Path(log_folder)
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Launch:
        """Raises UserError."""
        world, nodes = self._world, self._world.nodes
        devices = devices_of(world.nproc, world.device)
        open_files(0 if nodes.node_rank else nodes.num_nodes * (world.nproc + 1))
        with reported(f"{self._folder}: cannot be made"):
            self._folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            token = os.environ.get(TOKEN) or ("" if nodes.num_nodes > 1 else secrets.token_hex(16))
            server = nodes.store(token)
            if server:
                stack.callback(server.close)
            self._watch = watch(nodes, server, token)
            stack.callback(self._watch.close)
            ranks: list[Rank] = []
            self._ranks = LocalRanks(ranks)
            stack.callback(_end, ranks)
            address = f"{server.address}:{server.port}" if server else f"{nodes.master_addr}:{nodes.master_port}"
            met_at = {STORE: address, TOKEN: token}
            for local, environment in enumerate(nodes.environment(world.nproc)):
                number = nodes.node_rank * world.nproc + local
                ranks.append(self._start(number, environment | devices[local] | met_at))
            if self._forward_term:
                for each in heeded(signal.SIGTERM, signal.SIGHUP):
                    stack.callback(signal.signal, each, signal.getsignal(each))
                    signal.signal(each, lambda *_: self._terminate())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind and not issubclass(kind, LaunchError):
            self._watch.report_end("its command was ended")
        self._stack.close()

    def wait(self) -> Iterator[None]:
        """Wait for all ranks, yielding to the caller periodically. On one node, ranks that lose each other while they
        connect are restarted once: another program may have connected to a port of gloo first.

        Raises LaunchError that names the rank that failed, or those that are late. Its exit code is 2 where the
        rank's was: bad input.
        """
        deadline, again = time.monotonic() + self._timeout_s, self._world.nodes.num_nodes == 1
        while True:
            faults = self._ranks.faults()
            stalled = self._ranks.stalled()
            if not faults and time.monotonic() > deadline:
                faults = self._ranks.overdue(self._timeout_s)
            faults = faults or self._ranks.timed_out(self._wait_s, self._world.nodes.num_nodes == 1)
            if fault := self._watch.verdict(faults, stalled, self._ranks.waits()):
                if not again or fault.kind is not FaultKind.CONSEQUENCE or not self._ranks.lost_while_connecting:
                    raise self._error(fault)
                again = False
                sys.stderr.write(f"warning: {fault.message}; the ranks are started once more\n")
                self._stack.close()
                self.__enter__()
                continue
            yield
            if self._ranks.done and not faults:
                return
            time.sleep(POLL_S)

    def _terminate(self) -> None:
        for rank in self._ranks.ranks:
            if rank.alive:
                rank.process.terminate()

    def _start(self, number: int, environment: dict[str, str]) -> Rank:
        memory, path = RankStatusMemory(), self._folder / f"workerlog.{number}"
        variables = {**environment, "PYTHONUNBUFFERED": "1"}
        variables |= {STATUS: str(memory.descriptor), WAIT_VARIABLE: str(self._wait_s)}
        path.unlink(missing_ok=True)  # it may be a foreign link to elsewhere, or a pipe that blocks
        process = begin_process(
            self._command, {**DEFAULTS, **self._world.variables, **os.environ, **variables}, path, memory.descriptor
        )
        nodes = self._world.nodes
        return Rank(number, process, memory, path, nodes.node_rank if nodes.num_nodes > 1 else None)

    def _error(self, fault: Fault) -> LaunchError:
        fault = self._ranks.explain(fault)
        if fault.out_of_memory and fault.rank is not None:
            return OutOfMemory(fault.rank, fault.peak_mib, fault.message)
        error = LaunchError(fault.message)
        error.exit_code, error.waited = fault.exit_code, fault.kind in (FaultKind.STALL, FaultKind.CONSEQUENCE)
        return error


def begin_process(
    command: Sequence[str], environment: dict[str, str], log: Path, descriptor: int
) -> subprocess.Popen[bytes]:
    """Start a process with a new log; it inherits the descriptor and ends with this one."""
    with log.open("xb") as output:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[descriptor],
            preexec_fn=_die_with_parent,
        )


def devices_of(nproc: int, device: Device | None = None) -> list[dict[str, str]]:
    """Variables that give each local rank its own GPU, or all of them the CPU where Paddle finds no GPU.

    Raises UserError for more processes than the node's GPUs, or its cores and memory, allow, and for GPUs that this
    build of Paddle cannot use: training on the CPUs next to them is never intended.
    """
    from .gpus import defaults, gpu_count, unused_gpus, visible_gpus

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))  # undoes the handler of Paddle's import
    gpus = gpu_count()
    if device == "gpu" and gpus == 0:
        raise UserError("device: gpu, but Paddle finds no GPU here; leave --device out, or install Paddle's GPU build")
    if gpus == 0 and device is None and (unused := unused_gpus()):
        raise UserError(
            f"paddle: this build computes on CPUs alone, but the node has GPUs ({unused[0]}); install paddlepaddle-gpu "
            "in place of paddlepaddle, or hide the GPUs: CUDA_VISIBLE_DEVICES="
        )
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}  # processes share the cores already
    if gpus == 0 or device == "cpu":
        _require_room(nproc)
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if gpus else {}
        return [{"PADDLE_DISTRI_BACKEND": "gloo"} | threads | hidden] * nproc
    if nproc > gpus:
        raise UserError(f"nproc: {nproc} processes on a node with {gpus} GPUs; start {gpus} or fewer")
    visible = visible_gpus() or [str(gpu) for gpu in range(gpus)]
    # One visible GPU each: every recomputed layer makes Paddle read the random state of all visible GPUs.
    common = {"FLAGS_selected_gpus": "0"} | defaults() | threads
    return [{"CUDA_VISIBLE_DEVICES": gpu} | common for gpu in visible[:nproc]]


def _require_room(nproc: int) -> None:
    """Raise UserError for more CPU processes than cores and memory allow."""
    free, cores = free_mib(), processor.cores()
    if nproc > (most := RANKS_PER_CORE * cores):
        raise UserError(
            f"nproc: {nproc} processes on a node without a GPU and with {cores} cores; start at most {most}"
        )
    if nproc > (most := free // RANK_MIB):
        raise UserError(f"nproc: {nproc} processes on a node with {free} MiB of free memory; start at most {most}")


def free_mib() -> int:
    """MiB of this node's memory that processes can still allocate."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) // 2**10 for line in lines if line.startswith("MemAvailable"))


def _die_with_parent() -> None:
    pr_set_pdeathsig = 1  # prctl(2)
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _end(ranks: Sequence[Rank]) -> None:
    """Kill the ranks. A rank blocked on a hung disk may survive until that wait ends."""
    for end in (methodcaller("terminate"), methodcaller("kill")):
        for rank in ranks:
            if rank.alive:
                end(rank.process)
        deadline = time.monotonic() + GRACE_S
        for rank in ranks:
            with suppress(subprocess.TimeoutExpired):
                rank.process.wait(timeout=max(0.0, deadline - time.monotonic()))
    for rank in ranks:
        rank.memory.close()
