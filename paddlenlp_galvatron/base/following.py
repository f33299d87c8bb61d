"""Files that others write while this process reads them."""

from __future__ import annotations

from pathlib import Path


class NewLines:
    """Lines of a file that grows, each told once; one that is being written waits."""

    def __init__(self, path: Path):
        self._path, self._position = path, 0

    def read(self) -> list[bytes]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._position)
            lines = [line for line in file.readlines() if line.endswith(b"\n")]
        self._position += sum(map(len, lines))
        return lines
