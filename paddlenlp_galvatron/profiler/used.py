"""Memory of a GPU beside the tensors of its allocator, by its driver's count: the increase since the last look.

Profiles tell it under the names of `profiles.reserve.MeasuredReserve`.
"""

from __future__ import annotations

import paddle

from ..runtime import device
from .journal import Journal

PREFIX = "used "  # of these names in a journal


class Used:
    """From now on. Before the world starts this process has nothing on its GPU; what others have there is left out."""

    def __init__(self) -> None:
        self._mib = device.beside_mib()

    def more_mib(self) -> float | None:
        """MiB since the last time, a context among them; None on CPU, and where the driver does not tell."""
        if self._mib is None:
            return None
        paddle.zeros([1])  # makes the context, if there is none
        device.synchronize()
        before, self._mib = self._mib, device.beside_mib()
        return None if self._mib is None else self._mib - before


def note_used(journal: Journal, name: str, mib: float | None) -> None:
    """In the journal, unless nothing new was made."""
    if mib is not None and mib > 0:
        journal.get(PREFIX + name, lambda: mib)


def used_of(journal: Journal) -> dict[str, float]:
    """All of it that a journal knows."""
    return {key.removeprefix(PREFIX): mib for key, mib in journal.items(PREFIX)}
