"""Communicators: one per distinct rank tuple, made once, in one order on every rank. Owns the start of the world."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import paddle.distributed as dist

from ..plan import GalvatronError, UserError
from . import cpu_backend, device
from .out_of_memory import EXIT_CODE as OUT_OF_MEMORY
from .out_of_memory import is_out_of_memory, tell_out_of_memory

Ranks = tuple[int, ...]


def world_from_environment() -> tuple[int, int]:
    """Rank and number of ranks that the launcher gave to this process."""
    return int(os.environ.get("PADDLE_TRAINER_ID", "0")), int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))


def start_world() -> tuple[int, int]:
    """Join the other processes of this launch; returns (rank, world size). One process alone is a world of 1."""
    rank, world_size = world_from_environment()
    if world_size > 1 and not dist.is_initialized():
        cpu_backend.install()
        dist.init_parallel_env()
    return rank, world_size


def run_as_rank(work: Callable[[], None]) -> int:
    """Do the work of one rank and end the process, or return its exit code where the work failed.

    What the user can mend, lack of memory too, is said in the rank's log without a traceback. A rank that is done waits
    for the others and skips Python's shutdown: there, threads of Paddle's stores and groups still run while what they
    use goes, and abort the process now and then.
    """
    try:
        work()
    except GalvatronError as error:
        for line in str(error).splitlines():
            sys.stderr.write(f"error: {line}\n")
        return error.exit_code
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        tell_out_of_memory(error, device.peak_mib())
        os._exit(OUT_OF_MEMORY)  # at once: the shutdown would wait for the others, and they for this rank
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@dataclass
class Groups:
    """All communicators of this process, by their global ranks and their use.

    Groups of one rank have no communicator: `get` gives None, and callers skip the collective. What `fallback` has is
    taken from there.
    """

    rank: int
    fallback: Groups | None = None
    _made: dict[tuple[Ranks, str], Any] = field(default_factory=dict)

    def create(self, wanted: Iterable[tuple[Ranks, str]]) -> None:
        """Make the groups that do not exist yet. Every rank of the world calls this with the same groups."""
        there = set(self.fallback._made) if self.fallback else set()
        for ranks, use in sorted(set(wanted) - set(self._made) - there):
            if len(ranks) > 1:
                group = dist.new_group(list(ranks))
                self._made[ranks, use] = group if self.rank in ranks else None

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
        """Rank tuples of the communicators that this process takes part in."""
        return [ranks for (ranks, _), group in self._made.items() if group is not None]


def require_world(plan_world: int, world_size: int) -> None:
    """Raise UserError when a plan for another number of ranks was started."""
    if plan_world != world_size:
        raise UserError(
            f"world_size: the plan is for {plan_world} ranks but {world_size} were started; "
            f"start {plan_world} or search a plan for {world_size}"
        )
