"""Memory of a GPU beside the tensors of its allocator, by its driver's count: the increase since the last look.

Profiles tell it under the names of `profiles.reserve.MeasuredReserve`.
"""

from __future__ import annotations

import paddle

from ..runtime import device
from .journal import Journal

PREFIX = "used "  # of keys in the journal


class Used:
    """Counts from its creation. Made before the world starts, it leaves out only the memory of other programs."""

    def __init__(self) -> None:
        self._mib = device.beside_mib()

    def more_mib(self) -> float | None:
        """MiB more than at the last call, the CUDA context included; None on CPU or without the driver's count."""
        if self._mib is None:
            return None
        paddle.zeros([1])  # makes the context, if there is none
        device.synchronize()
        before, self._mib = self._mib, device.beside_mib()
        return None if self._mib is None else self._mib - before


def note_used(journal: Journal, name: str, mib: float | None) -> None:
    """Write an increase to the journal."""
    if mib is not None and mib > 0:
        journal.get(PREFIX + name, lambda: mib)


def used_of(journal: Journal) -> dict[str, float]:
    """The increases in a journal, by name."""
    return {key.removeprefix(PREFIX): mib for key, mib in journal.items(PREFIX)}
