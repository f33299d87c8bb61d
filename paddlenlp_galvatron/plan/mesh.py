"""The ranks of a stage as a grid of named axes, with its degrees and groups.

A stage owns consecutive ranks. A layer arranges its *local ranks* 0..n-1 as a grid with an axis for each kind of
parallelism. Ranks that differ only along some axes form a group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from math import gcd, isqrt, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ranks = NDArray[np.int64]


class Axis(StrEnum):
    """An axis of the rank grid, along which ranks divide work. In files its degrees are `cp_sizes_enc`, of layers, and
    `vcp`, of the vocabulary; Ulysses' degrees are in tensor parallelism's fields."""

    DATA = "dp"  # samples: over the ranks of a stage that the other axes leave
    CONTEXT = "cp"  # tokens of their samples, also in attention, where each rank has all keys and values
    ULYSSES = "sp"  # the tokens of their samples; in attention the heads
    TENSOR = "tp"  # weights; with Megatron-SP also tokens between layers
    COPIES = "copies"  # nothing: the neighbours in a tensor-parallel group that have the same kv head
    SHARDS = "shards"  # model states: the ranks with the same weights over which ZeRO shards
    REPLICAS = "replicas"  # nothing: the ranks with the same shard
    PIPELINE = "pp"  # layers: the one axis between stages
    EXPERT_DATA = "edp"  # tokens of the same experts: the ranks left by the next two axes
    EXPERT = "ep"  # experts
    EXPERT_TENSOR = "etp"  # the weights of each expert

    @property
    def words(self) -> str:
        """Name for people: plain `sp` would mean Megatron-SP."""
        return "Ulysses" if self is Axis.ULYSSES else self.value


STAGE = (Axis.DATA, Axis.CONTEXT, Axis.ULYSSES, Axis.TENSOR)  # axes within a stage, the coarsest cut of tokens first
SHARDING = tuple(axis for axis in STAGE if axis is not Axis.TENSOR)  # axes that do not split weights
EXCHANGE = (Axis.EXPERT, Axis.EXPERT_TENSOR)  # tokens are dispatched among the ranks that together hold all experts
SAMPLE_AXES = tuple(axis for axis in STAGE if axis is not Axis.DATA)  # their ranks together hold whole samples
OF_A_SAMPLE = tuple(axis for axis in SHARDING if axis is not Axis.DATA)  # split a sample, with whole weights


@dataclass(frozen=True, slots=True)
class Mesh:
    """The axes longer than 1 that number the local ranks of a stage; neighbours differ along the last."""

    axes: tuple[tuple[Axis, int], ...] = ()  # axes with their degrees

    @staticmethod
    @lru_cache(maxsize=10_000)
    def of(size: int, *degrees: tuple[Axis, int], consecutive: bool = True, rest: Axis = Axis.DATA) -> Mesh:
        """`size` ranks by these degrees, data parallelism (`rest`) over the ranks left: as the first axis where groups
        of the others are `consecutive` ranks, else as the last."""
        split = tuple((axis, degree) for axis, degree in degrees if degree > 1)
        dp = size // prod(degree for _, degree in split)
        data = ((rest, dp),) if dp > 1 else ()
        return Mesh(data + split if consecutive else split + data)

    @property
    def size(self) -> int:
        """Ranks of the stage."""
        return prod(degree for _, degree in self.axes)

    def degree(self, *axes: Axis) -> int:
        """Ranks of a group along these axes."""
        ranks = 1  # hot: read with every price
        for axis, degree in self.axes:
            if axis in axes:
                ranks *= degree
        return ranks

    def stride(self, axis: Axis) -> int:
        """Distance of neighbours along an axis, in ranks."""
        names = [name for name, _ in self.axes]
        return prod(degree for _, degree in self.axes[names.index(axis) + 1 :]) if axis in names else 1

    def sharing(self, copies: int) -> Mesh:
        """The same ranks, with groups of `copies` neighbours in a tensor-parallel group along a separate axis."""
        split = ((Axis.TENSOR, self.degree(Axis.TENSOR) // copies), (Axis.COPIES, copies))
        return Mesh(tuple(new for old in self.axes for new in (split if old[0] is Axis.TENSOR else (old,))))

    def parted(self, shards: int) -> Mesh:
        """The same ranks, with ranks of equal weights along two axes: `shards` ranks, as near as the axes allow, over
        which ZeRO shards, and the ranks with the same shard."""
        axes: list[tuple[Axis, int]] = []
        for axis, degree in reversed(self.axes):
            if axis in (*SHARDING, Axis.EXPERT_DATA):
                inside = gcd(shards, degree)
                shards //= inside
                axes += [(Axis.SHARDS, inside), (Axis.REPLICAS, degree // inside)]
            else:
                axes.append((axis, degree))
        return Mesh(tuple(reversed(axes)))

    def groups(self, *axes: Axis) -> Ranks:
        """[groups, ranks]: all groups along these axes, the ranks of each in rising order."""
        along = [number for number, (axis, _) in enumerate(self.axes) if axis in axes]
        across = [number for number, (axis, _) in enumerate(self.axes) if axis not in axes]
        grid = np.arange(self.size).reshape([degree for _, degree in self.axes])
        return grid.transpose(across + along).reshape(-1, self.degree(*axes))

    def group(self, rank: int, *axes: Axis) -> tuple[int, ...]:
        """The group of a local rank along these axes."""
        groups = self.groups(*axes)
        return tuple(groups[(groups == rank).any(axis=1)][0].tolist())

    def index(self, rank: int, axis: Axis) -> int:
        """Position of a local rank along an axis."""
        return rank // self.stride(axis) % self.degree(axis)


@dataclass(frozen=True, slots=True)
class Degrees:
    """A layer's degrees besides data parallelism, in the terms of plan files."""

    degree: int = 1
    ulysses: bool = False  # the degree splits the sequence (heads in attention) instead of the weights
    context: int = field(default=1, kw_only=True)  # degree of context parallelism, in addition to the other

    @property
    def named(self) -> dict[str, Any]:
        """Degrees by the names that they have in every strategy."""
        return {"degree": self.degree, "ulysses": self.ulysses, "context": self.context}

    @property
    def extra(self) -> tuple[tuple[Axis, int], ...]:
        """The axes that a layer may have besides `degree`'s, with their degrees."""
        return ((Axis.CONTEXT, self.context),)

    @property
    def axes(self) -> tuple[tuple[Axis, int], ...]:
        """All axes; the last is over neighbouring ranks."""
        return (*self.extra, (Axis.ULYSSES if self.ulysses else Axis.TENSOR, self.degree))

    @property
    def ranks(self) -> int:
        """Ranks that work on the same samples."""
        return prod(degree for _, degree in self.axes)

    @property
    def tp(self) -> int:
        """Degree by which weights are split, also the vocabulary's."""
        return 1 if self.ulysses else self.degree

    def mesh(self, stage_size: int) -> Mesh:
        """The mesh of a stage's ranks."""
        return Mesh.of(stage_size, *self.axes)


@lru_cache(maxsize=100)
def every_degrees(size: int) -> tuple[Degrees, ...]:
    """All degrees that a layer may have on a stage of `size` ranks."""
    return tuple(
        Degrees(degree, ulysses, context=context)
        for degree in divisors(size)
        for context in divisors(size // degree)
        for ulysses in ((False, True) if degree > 1 else (False,))
    )


def divisors(number: int) -> list[int]:
    """Divisors, rising."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
