"""Paddle's allocator on GPUs, on paper: best fit in chunks that grow by themselves (auto_growth_best_fit_allocator.cc).

A tensor that fits no free block gets a chunk of its own size from the device; a block's rest is a free block, and free
neighbours of a chunk are joined. `empty_cache` gives back chunks of which nothing is in use.
"""

from __future__ import annotations

ALIGNED = 256  # bytes


class OutOfMemory(Exception):
    """The device has not as much."""


class AutoGrowth:
    """The allocator of a device of `limit` bytes. Blocks are [start, stop, free] of a chunk, in order."""

    def __init__(self, limit: int):
        self._limit = limit
        self._chunks: list[list[list[int]]] = []

    @property
    def taken(self) -> int:
        """Bytes of all chunks."""
        return sum(chunk[-1][1] for chunk in self._chunks)

    def allocate(self, size: int) -> tuple[int, int]:
        """The place of a new tensor. Raises OutOfMemory."""
        size = -(-size // ALIGNED) * ALIGNED
        free = [
            (stop - start, number, start)
            for number, chunk in enumerate(self._chunks)
            for start, stop, unused in chunk
            if unused and stop - start >= size
        ]
        if not free:
            if self.taken + size > self._limit:
                self.empty_cache()  # as Paddle does before it gives up
            if self.taken + size > self._limit:
                raise OutOfMemory(f"{size} bytes on top of {self.taken} of {self._limit}")
            self._chunks.append([[0, size, 0]])
            return id(self._chunks[-1]), 0
        _, number, start = min(free)
        chunk = self._chunks[number]
        place = next(place for place, block in enumerate(chunk) if block[0] == start)
        _, stop, _ = chunk[place]
        chunk[place : place + 1] = [
            [start, start + size, 0],
            *([[start + size, stop, 1]] if start + size < stop else []),
        ]
        return id(chunk), start

    def free(self, tensor: tuple[int, int]) -> None:
        """Give a tensor's block back to the allocator."""
        [chunk] = [chunk for chunk in self._chunks if id(chunk) == tensor[0]]
        for block in chunk:
            block[2] |= block[0] == tensor[1]
        joined = [chunk[0]]
        for block in chunk[1:]:
            if block[2] and joined[-1][2]:
                joined[-1][1] = block[1]
            else:
                joined.append(block)
        chunk[:] = joined

    def empty_cache(self) -> None:
        """Give chunks without a tensor back to the device."""
        self._chunks = [chunk for chunk in self._chunks if len(chunk) > 1 or not chunk[0][2]]
