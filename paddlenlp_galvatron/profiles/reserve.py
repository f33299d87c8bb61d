"""Memory of a GPU outside tensors, in parts: the difference between the estimate (tensors) and the upper bound.

The only definition of `context_mib`'s default, for search, fit and profiles' `reserved`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isclose
from typing import NamedTuple, Self

from .data_sheet import Device
from .files import Meta


class ReservePart(NamedTuple):
    """Memory on a device outside the model's tensors."""

    name: str
    mib: float
    source: str

    def measured(self, mib: float | None) -> ReservePart:
        """The part with a profile's measured `mib`, if any."""
        return self if mib is None else self._replace(mib=mib, source="measured: profiles")

    def times(self, count: int) -> ReservePart:
        """`count` times this part."""
        return self._replace(mib=count * self.mib, source=f"{count}, {self.source}")


class MeasuredReserve(NamedTuple):
    """The parts that profiles measured, under the keys of their "galvatron" object; None: they did not."""

    reserved: float | None = None  # the allocator's peak / the tensors' peak
    context_mib: float | None = None
    communicator_mib: float | None = None  # memory of one communicator
    workspaces_mib: float | None = None

    @classmethod
    def of(cls, *metas: Meta) -> Self:
        figures = {name: value for meta in metas for name, value in meta.extra.items() if name in cls._fields}
        return cls(**{name: value for name, value in figures.items() if isinstance(value, int | float)})


CONTEXT = ReservePart(
    "CUDA context", 600.0, "nvidia-smi with one empty tensor on A100 and H100: 420 to 560 MiB, by driver"
)
WORKSPACES = ReservePart("workspaces", 128.0, "cuBLAS documents 32 MiB a handle and stream on Hopper; four of them")
# NCCL allocates the receive buffers of a channel for LL (512 KiB), LL128 (4.7 MiB) and Simple (4 MiB): init.cc's
# buffer sizes. A ring inside a node has 16 channels.
COMMUNICATOR_MIB = 16 * (0.5 + 4.7 + 4.0)
COMMUNICATOR = ReservePart("communicators", COMMUNICATOR_MIB, "each with NCCL's default buffers of 16 channels")
# Communicators that a search reserves before a plan is known. A rank's distinct groups: tensor, sharding and whole
# stage, those of the vocabulary layers, and both neighbours in the pipeline. Most plans have fewer; four strategies in
# a pipeline have 12, of which those for messages between stages take less.
COMMUNICATORS = 9
# The allocator's overhead, if not measured: a share of all tensors, and of working memory, whose freed blocks fit no
# other tensor. These two are the smallest that cover PaddleFleet's 24 runs of Qwen3-8B on H800 that left a tenth of the
# GPU free (a linear program over predicted and reserved memory). It reserved 3 % more than the tensors at the median,
# 7.2 % at most; in the run that filled its GPU 15 %, as an allocator takes more where there is more.
ALLOCATOR, WORKING = 0.0263, 0.806
MEAN_ALLOCATOR, MOST_ALLOCATOR, FULL_ALLOCATOR = 0.03, 0.072, 0.15
FULL = 0.75  # share of a GPU's memory in tensors from which it counts as filled


@dataclass(frozen=True, slots=True)
class Reserve:
    """Memory of a device outside tensors."""

    parts: tuple[ReservePart, ...] = ()  # independent of tensors
    allocator: float = 0.0  # reserved by the allocator and used by no tensor, as a share of the tensors' memory
    working: float = 0.0  # freed working memory that no other tensor can use, as a share of it
    allocator_source: str = ""
    measured: bool = False  # whether the allocator's share was measured
    communicator: ReservePart = COMMUNICATOR  # a communicator, of which `parts` has several

    @property
    def fixed_mib(self) -> float:
        return sum(amount.mib for amount in self.parts)

    @property
    def freed(self) -> float | None:
        """Share of freed working memory that the allocator keeps; None: no allocator overhead."""
        return self.working if self.allocator else None

    def having(self, communicators: int) -> Reserve:
        """The reserve with as many communicators as a plan has."""
        counted = self.communicator.times(communicators)
        return replace(self, parts=tuple(counted if amount.name == counted.name else amount for amount in self.parts))

    def allocator_mib(self, tensors_mib: float, working_mib: float) -> float:
        """Upper bound of the allocator's memory for this peak of tensors, `working_mib` of it working memory, while the
        device is not full."""
        return (tensors_mib + self.working * working_mib) * (1 + self.allocator)

    def bound_mib(self, tensors_mib: float, working_mib: float) -> float:
        """Upper bound of the device's memory: the allocator's, and the fixed parts."""
        return self.allocator_mib(tensors_mib, working_mib) + self.fixed_mib

    def reserved_mib(self, tensors_mib: float, device_mib: float) -> float:
        """Estimate of the allocator's peak, from published runs."""
        usual = FULL_ALLOCATOR if tensors_mib > FULL * device_mib else MEAN_ALLOCATOR
        return tensors_mib * (1 + (self.allocator if self.measured else usual))

    def context_mib(self, device_mib: float) -> float:
        """Memory to subtract from a device so that tensors and freed working memory fit in the rest."""
        return device_mib - max(device_mib - self.fixed_mib, 0.0) / (1 + self.allocator)

    def sets(self, context_mib: float, device_mib: float) -> bool:
        """Whether this reserve, and not the user, sets that much free memory on a device of this size."""
        return bool(self.parts) and isclose(context_mib, self.context_mib(device_mib))

    def parts_on(self, device_mib: float) -> list[ReservePart]:
        """All parts on a filled device."""
        share = self.context_mib(device_mib) - self.fixed_mib
        return [*self.parts, *([ReservePart("allocator", share, self.allocator_source)] if self.allocator else ())]


def reserve_of(device: Device, ranks: int, measured: MeasuredReserve = MeasuredReserve()) -> Reserve:
    """The reserve of a GPU; empty for a CPU or an unnamed device."""
    if not device.is_gpu:
        return Reserve()
    communicator = COMMUNICATOR.measured(measured.communicator_mib)
    parts = [CONTEXT.measured(measured.context_mib), WORKSPACES.measured(measured.workspaces_mib)]
    parts += [communicator.times(COMMUNICATORS)] if ranks > 1 else []
    allocator, working = ALLOCATOR, WORKING
    source = "not measured: of tensors, and 81 % of working memory, by published runs with room left"
    if is_measured := measured.reserved is not None and measured.reserved >= 1:
        allocator, working, source = measured.reserved - 1, 0.0, "measured: reserved of the memory profile"
    return Reserve(tuple(parts), allocator, working, source, is_measured, communicator)
