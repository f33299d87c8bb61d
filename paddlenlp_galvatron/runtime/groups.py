"""Communicators: one per distinct rank tuple, made once, in one order on every rank. Starts the default group."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NoReturn

import paddle
import paddle.distributed as dist

from ..base.errors import GalvatronError, UserError
from ..base.writing import FULL, reason_of
from ..launch import gpus, status
from ..launch.faults import named, wait_limit_s
from ..launch.out_of_memory import EXIT_CODE as OUT_OF_MEMORY
from ..launch.out_of_memory import is_out_of_memory, report_out_of_memory
from ..launch.status import RankOutcome
from ..launch.store import connect
from ..plan import Plan
from ..plan.communicators import BACK, DIRECTIONS, DOWN, REDISTRIBUTE, Group, Ranks, in_rounds
from . import collectives, cpu_backend, device, paddle_private

SUMMARY = "Error Message Summary:"  # Paddle's, above the text of an error
TRACEBACK = "Traceback (most recent call last):"  # in the text of an error in a PyLayer's backward
LONGEST = 500  # characters of an error's message that are shown


def world_from_environment() -> tuple[int, int]:
    """Returns (rank, world size) that the launcher gave to this process."""
    return int(os.environ.get("PADDLE_TRAINER_ID", "0")), int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))


def prepare_world() -> None:
    """Make the ranks of this launch, if any, connect through our store, even if a library starts Paddle's world; set
    this rank's GPU variables."""
    gpus.set_defaults()
    rank, world_size = world_from_environment()
    if world_size > 1:
        cpu_backend.install()
        paddle_private.meet_at(lambda: connect(rank))


def start_world() -> tuple[int, int]:
    """Join the other processes of this launch; returns (rank, world size). One process alone is a world of 1."""
    rank, world_size = world_from_environment()
    if not dist.is_initialized():
        prepare_world()
    if world_size > 1 and not dist.is_initialized():
        with status.waiting(status.CONNECTING[0]):
            dist.init_parallel_env()
    if world_size > 1:
        _after_start()
    return rank, world_size


@cache
def _after_start() -> None:
    """Runs once, after the world has started."""
    device.pin_rank()
    collectives.watch(wait_limit_s())


def run_as_rank(work: Callable[[], int | None]) -> NoReturn:
    """Do the work of one rank and end the process, with the exit code that it returns.

    A fault is reported to the launcher and written to the log, without a traceback if the user can fix it. A finished
    rank waits for the others. Python's shutdown is always skipped: threads of Paddle's stores and groups still run
    while their resources are destroyed, and sometimes abort the process or wait for other ranks, as do NCCL's
    communicators with work in flight.
    """
    status.begin()
    try:
        code = work() or 0
        if dist.is_initialized():
            with status.waiting("the barrier at the end"):
                dist.barrier()
        status.done(code)
    except GalvatronError as error:
        status.failed(RankOutcome.REFUSED, str(error), error.exit_code)
        for line in str(error).splitlines():
            sys.stderr.write(f"error: {line}\n")
        code = error.exit_code
    except Exception as error:
        if is_out_of_memory(error):
            end_out_of_memory(error)
        code = 1
        lost = status.lost_a_peer(str(error))
        status.failed(RankOutcome.LOST_A_PEER if lost else RankOutcome.FAILED, sentence(error), code)
        traceback.print_exc()
    except SystemExit as error:  # raised by a callback or PaddleNLP
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    _end(code)


def end_out_of_memory(error: Exception) -> NoReturn:
    """Report the failed allocation and end this rank without a call to its device, whose queued work may wait for
    messages that never come."""
    status.failed(RankOutcome.FAILED, sentence(error), OUT_OF_MEMORY)
    report_out_of_memory(error, device.peak_mib())
    _end(OUT_OF_MEMORY)


def _end(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def sentence(error: Exception) -> str:
    """An error in one line: its class and message, without the stacks that Paddle and PyLayers add."""
    if getattr(error, "errno", None) in FULL:  # any written file, such as a log or a callback's file
        return f"{getattr(error, 'filename', None) or 'a file of the run'}: cannot be written: {reason_of(error)}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" -")]
    if SUMMARY in lines[:-1]:
        lines = lines[lines.index(SUMMARY) + 1 :]
    elif TRACEBACK in lines:
        lines = lines[-1:]
    return f"{type(error).__name__}: {lines[0][:LONGEST] if lines else 'without a message'}"


def _use_once(group: Any, rank: int, use: str = "", exchanges: bool = False) -> None:
    """Make a group's ranks exchange a few numbers, by each operation that they will use."""
    numbers = paddle.zeros([len(group.ranks)])
    with status.waiting(f"{status.FIRST_USE} {named(tuple(group.ranks))}"):
        if use in DIRECTIONS:
            source, target = group.ranks if use in (DOWN, BACK) else reversed(group.ranks)
            message = dist.isend(numbers, target, group) if rank == source else dist.irecv(numbers, source, group)
            message.wait()
        else:
            dist.stream.all_reduce(numbers, group=group)
            if exchanges:
                dist.stream.alltoall_single(paddle.empty_like(numbers), numbers, group=group)
        device.synchronize()


def _use_in_kernel(group: Any) -> None:
    """Connect a group's ranks for Paddle's fused loss."""
    with status.waiting(f"the first fused loss of {named(tuple(group.ranks))}"):
        paddle_private.make_context(group, device.gpu_number())
        if device.on_gpu():  # the CPU has no such kernel
            paddle_private.fused_loss(paddle.zeros([1, 8]), paddle.zeros([1], "int64"), group, -1)
        device.synchronize()


@dataclass
class Groups:
    """All communicators of this process, by their global ranks and their use.

    Groups of one rank have no communicator: `get` gives None, and callers skip the collective. Communicators of
    `fallback` are reused.
    """

    rank: int
    fallback: Groups | None = None
    _made: dict[Group, Any] = field(default_factory=dict)
    _exchanging: set[Group] = field(default_factory=set)  # groups that have been used for an all-to-all
    _in_kernels: set[Group] = field(default_factory=set)  # groups that kernels use by themselves

    def create(
        self,
        wanted: Iterable[Group],
        exchanging: Collection[Ranks] = (),
        in_kernels: Collection[Ranks] = (),
        used: bool = True,
    ) -> None:
        """Make the missing groups. Every rank of the world calls this with the same groups. Groups in `exchanging`, and
        those for use "redistribute", will run all-to-alls; on groups in `in_kernels`, kernels communicate by
        themselves.

        Each group is used once, in the same order on all ranks, unless no step will use it (`used`). NCCL creates
        communicators and connections at first use. It then allocates memory, which waits for all work of the device: in
        a step, for a message that another rank may send only after its own new connection.
        """
        existing = set(self.fallback._made) if self.fallback else set()
        for ranks, use in in_rounds(set(wanted) - existing):
            made = len(ranks) == 1 or (ranks, use) in self._made
            exchanges = use == REDISTRIBUTE or ranks in exchanging
            if not made:
                with status.waiting(f"{status.CONNECTING[1]} {named(ranks)}"):
                    group = dist.new_group(list(ranks))
                self._made[ranks, use] = group if self.rank in ranks else None
            group, new_way = self._made.get((ranks, use)), exchanges and (ranks, use) not in self._exchanging
            if group is not None and used and (new_way or not made):
                _use_once(group, self.rank, use, exchanges)
            self._exchanging |= {(ranks, use)} if exchanges else set()
            if ranks in in_kernels and not use and (ranks, use) not in self._in_kernels:
                self._in_kernels.add((ranks, use))
                if group is not None:
                    _use_in_kernel(group)
        if used and dist.is_initialized():
            _use_once(dist.get_group(0), self.rank)

    def get(self, ranks: Ranks, use: str = "") -> Any:
        """This process's communicator over global ranks; None for one rank. `use` keeps apart the directions of
        point-to-point traffic, which must not share a communicator."""
        if len(ranks) == 1:
            return None
        if self.fallback and (ranks, use) in self.fallback._made:
            return self.fallback.get(ranks, use)
        try:
            group = self._made[ranks, use]
        except KeyError:
            raise AssertionError(f"group {ranks} ({use}) was not created with the others") from None
        assert group is not None, f"rank {self.rank} is not in group {ranks}"
        return group

    @property
    def members(self) -> list[Ranks]:
        """Rank tuples of this process's communicators."""
        return [ranks for (ranks, _), group in self._made.items() if group is not None]


def require_world(plan_world: int, world_size: int) -> None:
    """Raise UserError if the plan is for another number of ranks."""
    if plan_world != world_size:
        raise UserError(
            f"world_size: the plan is for {plan_world} ranks but {world_size} were started; "
            f"start {plan_world} or search a plan for {world_size}"
        )


@dataclass(frozen=True)
class RankGroups:
    """This rank's place in a plan's stages, and its communicators."""

    plan: Plan
    rank: int
    groups: Groups

    @property
    def stage(self) -> int:
        return self.rank // self.plan.stage_size

    @property
    def first(self) -> int:
        """The first rank of the stage."""
        return self.rank - self.local

    @property
    def local(self) -> int:
        """This rank's number in its stage."""
        return self.rank % self.plan.stage_size

    def of_stage(self, ranks: Iterable[int], use: str = "") -> Any:
        """The communicator over ranks that are numbered within the stage; None for one rank."""
        return self.groups.get(tuple(self.first + rank for rank in ranks), use)
