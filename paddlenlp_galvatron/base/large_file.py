"""Reads foreign files that are too large for memory by position, and never maps them.

A file that is cut off under a running job is then an error that names it; a mapped one would end the process by SIGBUS.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

from .errors import UserError
from .reading import open_file

BLOCK_BYTES = 1 << 20


class LargeFile:
    """A regular file, open for reading at any place. It stays the same file if its name is taken by another."""

    def __init__(self, path: str | Path):
        """Raises UserError."""
        self.path = Path(path)
        self._file = open_file(path)
        self.size_bytes = self.state().st_size  # when it was opened

    def state(self) -> os.stat_result:
        return os.fstat(self._file.fileno())

    def read(self, first: int, count: int) -> bytes:
        """Bytes from `first` on. Raises UserError: the file ends before, or cannot be read."""
        if first < 0 or count < 0 or first + count > self.size_bytes:
            raise UserError(f"{self.path}: has {self.size_bytes:,} bytes, not {count:,} from byte {first:,} on")
        parts: list[bytes] = []
        while count:
            try:
                part = os.pread(self._file.fileno(), count, first)
            except OSError as error:
                raise UserError(f"{self.path}: cannot be read at byte {first:,}: {error.strerror}") from None
            if not part:
                raise UserError(f"{self.path}: ends before byte {first:,}: it was cut off after it had been opened")
            parts.append(part)
            first, count = first + len(part), count - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def checksum(self, most: int | None = None) -> int:
        """CRC-32 of all blocks of BLOCK_BYTES, or of `most` of them, the first and the last among them. Raises
        UserError."""
        count = -(-self.size_bytes // BLOCK_BYTES)
        few = most is not None and most < count
        checksum = 0
        for block in (n * (count - 1) // (most - 1) for n in range(most)) if few and most else range(count):
            first = block * BLOCK_BYTES
            checksum = zlib.crc32(self.read(first, min(BLOCK_BYTES, self.size_bytes - first)), checksum)
        return checksum
