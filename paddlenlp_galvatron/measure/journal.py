"""Keeps measured numbers on disk as they are made: an interrupted profile continues where it stopped."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import paddle
import paddle.distributed as dist

from ..base.errors import GalvatronError, UserError
from ..base.reading import parse_json, read_bytes
from ..base.writing import write_text
from ..runtime import device

FOLDER = ".journal"  # subfolder of the profile files' folder
USED = "used "  # prefix of keys of a GPU's memory outside tensors, named as in `profiles.reserve.MeasuredReserve`
METHOD = 10  # version of measurements and format; raising it drops older numbers


class Journal:
    """Measured numbers: key -> JSON value. Rank 0 reads and writes the file; all ranks have the same numbers.

    The file has one line a number, written through to the disk before the next number is measured.
    """

    def __init__(self, entries: Mapping[str, Any] | None = None, file: TextIO | None = None):
        self._known, self._file = dict(entries or {}), file
        kept = f"{len(self._known)} numbers were measured before and are kept; --fresh 1 measures them again"
        self.kept_note = [kept] if self._known else []  # note about an earlier run

    @classmethod
    def open(
        cls, output: str | Path, what: str, identity: Mapping[str, Any], rank: int, world_size: int, fresh: bool
    ) -> Journal:
        """The journal of a kind of profile in its output folder. Each combination of METHOD and `identity` (JSON values
        that change the numbers) has its own journal. `fresh`: discard an earlier run's measurements."""
        entries: list[dict[str, Any]] = [{}]
        file = None
        if rank == 0:
            text = json.dumps({"method": METHOD, **identity}, sort_keys=True)
            path = Path(output) / FOLDER / f"{what}_{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
            file = _locked(path)
            entries = [{} if fresh else _read(path)]
            write_text(path, text + "\n" + "".join(_line(key, value) for key, value in entries[0].items()))
            file.close()
            file = _locked(path)  # lock of the new file
        if world_size > 1:
            dist.broadcast_object_list(entries, src=0)
        return cls(entries[0], file)

    def get(self, key: str, measure: Callable[[], Any]) -> Any:
        """The number under a key, measured now unless known. All ranks call it with the same keys in the same order."""
        if key not in self._known:
            self._known[key] = measure()
            if self._file:
                self._file.write(_line(key, self._known[key]))
                self._file.flush()
                os.fsync(self._file.fileno())
        return self._known[key]

    def rounds(self, kind: str) -> dict[tuple[str, ...], list[Any]]:
        """Everything measured under keys `kind WORD... ROUND`: words -> values of the rounds."""
        rounds: dict[tuple[str, ...], list[Any]] = {}
        for key, value in self.items(f"{kind} "):
            rounds.setdefault(tuple(key.split()[1:-1]), []).append(value)
        return rounds

    def items(self, prefix: str = "") -> list[tuple[str, Any]]:
        """All values whose keys have this prefix."""
        return [(key, value) for key, value in self._known.items() if key.startswith(prefix)]


def _line(key: str, value: Any) -> str:
    return json.dumps([key, value]) + "\n"


def _read(path: Path) -> dict[str, Any]:
    """Every whole line after the first, up to a damaged line: after a power failure a file may end in NULs."""
    entries: dict[str, Any] = {}
    for line in read_bytes(path).split(b"\n")[1:-1]:
        try:
            key, value = parse_json(line.decode(), str(path))
        except (UserError, ValueError, TypeError):
            return entries
        if not isinstance(key, str):
            return entries
        entries[key] = value
    return entries


def _locked(path: Path) -> TextIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise GalvatronError(f"{path}: another profiler is writing it; wait until it ends, or end it") from None
    return file


class Used:
    """A GPU's memory outside its allocator, by its driver, since the object's creation. Created before the world
    starts, it excludes only other programs."""

    def __init__(self) -> None:
        self._mib = device.beside_mib()

    def more_mib(self) -> float | None:
        """Increase in MiB since the last call, including the CUDA context; None on CPU or if the driver reports
        nothing."""
        if self._mib is None:
            return None
        paddle.zeros([1])  # creates the CUDA context
        device.synchronize()
        previous, self._mib = self._mib, device.beside_mib()
        return None if self._mib is None else self._mib - previous


def note_used(journal: Journal, name: str, mib: float | None) -> None:
    """Write an increase to the journal."""
    if mib is not None and mib > 0:
        journal.get(USED + name, lambda: mib)


def used_of(journal: Journal) -> dict[str, float]:
    """The increases in a journal, by name."""
    return {key.removeprefix(USED): mib for key, mib in journal.items(USED)}
