"""Communicators that say nothing: a rank's share of a split layer runs, and is measured, without its peers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...runtime.groups import Groups
from ...runtime.weights import WHOLE, Slice

_DONE = SimpleNamespace(wait=lambda: True, is_completed=lambda: True)


class _SilentProcessGroup:
    """Collectives that leave zeros where the peers' part would be: numbers as quick to compute with as any other."""

    def all_reduce(self, tensor: Any, *_: Any) -> Any:
        return _DONE

    def fill(self, out: Any, *_: Any) -> Any:
        out.zero_()
        return _DONE

    all_gather_into_tensor = reduce_scatter_tensor = all_to_all_single = fill
    all_reduce_on_calc_stream = all_reduce
    all_gather_into_tensor_on_calc_stream = reduce_scatter_tensor_on_calc_stream = fill
    all_to_all_single_on_calc_stream = fill


class _SilentGroup:
    """As `paddle.distributed`'s Group, seen from its first rank."""

    def __init__(self, ranks: tuple[int, ...]):
        self.nranks, self.rank, self.id, self.ranks = len(ranks), 0, -1, list(ranks)
        self.process_group = _SilentProcessGroup()

    def is_member(self) -> bool:
        return True


class SilentGroups(Groups):
    """Gives a silent communicator for any ranks."""

    def __init__(self) -> None:
        super().__init__(rank=0)

    def get(self, ranks: tuple[int, ...], use: str = "") -> Any:
        return _SilentGroup(ranks) if len(ranks) > 1 else None


class PatternWeights:
    """Weights of ordinary size without the time that drawing each would take: one short random row, repeated."""

    def __init__(self, deviation: float):
        self._row = deviation * np.random.default_rng(0).standard_normal(4099, np.float32)  # a prime: no two rows alike

    def __call__(self, name: str, shape: tuple[int, ...], part: Slice = WHOLE) -> NDArray[np.float32]:
        lengths = (part.interval(axis, length) for axis, length in enumerate(shape))
        return np.resize(self._row, tuple(stop - start for start, stop in lengths))
