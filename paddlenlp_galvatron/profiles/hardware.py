"""Profile of the cluster: four files in, four files out. `profiles.network` prices messages by it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..base.errors import UserError
from ..plan.comm_points import Collective as Collective
from .files import (
    OVERLAP_NAME,
    Faults,
    Meta,
    Note,
    ProfileFile,
    allreduce_name,
    field_of,
    holds_no,
    no_note,
    objects,
    p2p_name,
    place,
    positive,
    read_profile,
    skipped,
    sp_time_name,
    unknown_key,
    whole_number,
    write_profile,
)


class MessageGroup(NamedTuple):
    """A kind of collective on a kind of group."""

    kind: Collective
    size: int  # ranks
    consecutive: bool = True


GroupKey = tuple[int, bool]  # (ranks, consecutive)
MIB_PER_MS, MS = "MiB per ms", "ms"

_ALLREDUCE = re.compile(r"allreduce_size_(\d+)(?:_consec_([01]))?")
_SHAPE = re.compile(r"_([1-9]\d{0,8})nodes_([1-9]\d{0,8})gpus_per_node")
_P2P = re.compile(r"pp_size_(\d+)")
_MESSAGE = re.compile(
    r"(allreduce|allgather|reducescatter|all2all|p2p)_size_(\d+)(?:_consec_([01]))?_(\d+(?:\.\d+)?)MB_time"
)


@dataclass(frozen=True)
class HardwareProfile:
    """Measured speed of a cluster of `num_nodes` x `gpus_per_node` devices."""

    num_nodes: int
    gpus_per_node: int
    allreduce_mib_per_ms: Mapping[GroupKey, float]  # bus bandwidth: message * 2 (n - 1) / n / time (nccl-tests)
    p2p_mib_per_ms: Mapping[int, float] = field(default_factory=dict)  # stages -> message / time, all ranks at once
    messages_ms: Mapping[MessageGroup, Mapping[float, float]] = field(default_factory=dict)  # message MiB -> ms
    overlap_coe: float = 1.0  # how much slower compute and communication run beside one another
    meta: Meta = field(default_factory=Meta)
    files: tuple[ProfileFile, ...] = field(default=(), compare=False)  # the files it was read from
    # The same by kind, where it is known; for SEND: the slowdown of passes while the next receive is posted.
    overlap_by_kind: Mapping[Collective, float] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.gpus_per_node

    def overlap_of(self, kind: Collective) -> float:
        """The overlap coefficient of a kind of collective."""
        return self.overlap_by_kind.get(kind, self.overlap_coe)

    def save(self, folder: str | Path) -> list[Path]:
        """Write the files under their documented names, each whole or not at all; returns their paths.

        A file is left out where there is nothing to put into it.
        """
        folder, shape = Path(folder), (self.num_nodes, self.gpus_per_node)
        allreduce = {f"allreduce_size_{n}_consec_{int(c)}": v for (n, c), v in _down(self.allreduce_mib_per_ms)}
        p2p = {f"pp_size_{stages}": v for stages, v in sorted(self.p2p_mib_per_ms.items())}
        plain: dict[str, float] = {}  # keys that Galvatron knows
        ours: dict[str, float] = {}
        for group, times in self.messages_ms.items():
            for mib, ms in sorted(times.items()):
                known = group.consecutive and group.kind in (Collective.ALL_REDUCE, Collective.ALL_TO_ALL) and mib >= 1
                (plain if known and mib == int(mib) else ours)[message_key(group, mib)] = ms
        written = []
        if allreduce or self.world_size == 1:
            meta = self.meta.about(allreduce).with_extra({"allreduce_size": f"{MIB_PER_MS}, bus bandwidth"})
            written.append(write_profile(folder / allreduce_name(*shape), allreduce, meta))
        if p2p:
            meta = self.meta.about(p2p).with_extra({"pp_size": MIB_PER_MS})
            written.append(write_profile(folder / p2p_name(*shape), p2p, meta))
        if plain or ours:
            meta = self.meta.about([*plain, *ours]).with_extra({"time": MS, "message": "MiB"}, messages_ms=ours)
            written.append(write_profile(folder / sp_time_name(*shape), plain, meta))
        if "overlap_coe" in self.meta.spread or self.overlap_coe != 1 or self.overlap_by_kind:
            keys = ["overlap_coe", *(f"overlap_coe_{kind}" for kind in self.overlap_by_kind)]
            by_kind = {str(kind): value for kind, value in self.overlap_by_kind.items()}
            meta = self.meta.about(keys).with_extra({"overlap_coe": "ratio"}, overlap_by_kind=by_kind)
            written.append(write_profile(folder / OVERLAP_NAME, {"overlap_coe": self.overlap_coe}, meta))
        return written

    @classmethod
    def load(
        cls,
        num_nodes: int,
        gpus_per_node: int,
        *,
        folder: str | Path | None = None,
        allreduce_path: str | Path | None = None,
        p2p_path: str | Path | None = None,
        overlap_path: str | Path | None = None,
        sp_time_path: str | Path | None = None,
        note: Note = no_note,
    ) -> HardwareProfile:
        """Read the files: those named by a path, the rest by their documented names from `folder`.

        The all-reduce file must be there unless there is one device; without the p2p file a cluster has no pipeline,
        without sp_time messages are priced by bandwidth alone, without the overlap file nothing slows down. A file
        named by path may be of a cluster with other nodes: its name says of which. `note` hears what was assumed for
        a file that is not there, and what was left out. Raises UserError with all that is wrong.
        """
        shape = (num_nodes, gpus_per_node)

        def find(path: str | Path | None, name: str, needed: bool = False) -> Path | None:
            found = place(path, folder, name)
            if found is None or found.exists() or (path is not None and found == Path(path)):
                return found
            if needed:
                raise UserError(
                    f"{found}: no such file; measure it with `galvatron profile hardware` or name another file"
                )
            return None

        allreduce_file = find(allreduce_path, allreduce_name(*shape), needed=shape != (1, 1))
        if allreduce_file is None and shape != (1, 1):
            raise UserError("allreduce_bandwidth_config_path: missing; name the all-reduce bandwidth file")
        p2p_file = find(p2p_path, p2p_name(*shape))
        sp_time_file = find(sp_time_path, sp_time_name(*shape))
        overlap_file = find(overlap_path, OVERLAP_NAME)
        if shape != (1, 1):
            if not sp_time_file:
                note(
                    f"{sp_time_name(*shape)}: not there; every message, all-to-all too, is priced by the all-reduce "
                    "bandwidth, without a latency; Galvatron asks for the file with sp_space tp+sp"
                )
            if not overlap_file:
                note(
                    f"{OVERLAP_NAME}: not there; overlap_coe is taken as 1: compute and communication side by side "
                    "do not slow each other down"
                )
        if allreduce_file and (named := _SHAPE.search(allreduce_file.name)):
            shape = (int(named[1]), int(named[2]))
        faults = Faults()
        with faults.gathered():
            world_size = shape[0] * shape[1]
            allreduce, meta = read_allreduce(allreduce_file, world_size, note) if allreduce_file else ({}, Meta())
        with faults.gathered():
            p2p = read_p2p(p2p_file, note) if p2p_file else {}
        with faults.gathered():
            messages = read_messages(sp_time_file, note) if sp_time_file else {}
        with faults.gathered():
            overlap_coe, by_kind = read_overlap(overlap_file, note) if overlap_file else (1.0, {})
        faults.require_none()
        files = tuple(ProfileFile.of(f) for f in (allreduce_file, p2p_file, overlap_file, sp_time_file) if f)
        return cls(*shape, allreduce, p2p, messages, overlap_coe, meta, files, by_kind)


def message_key(group: MessageGroup, mib: float) -> str:
    """Key of the time of a message of `mib` MiB."""
    consecutive = "" if group.consecutive else "_consec_0"
    return f"{group.kind}_size_{group.size}{consecutive}_{mib:.12g}MB_time"


def _down(values: Mapping[GroupKey, float]) -> list[tuple[GroupKey, float]]:
    """Largest group first, consecutive before strided, as Galvatron writes them."""
    return sorted(values.items(), key=lambda item: (-item[0][0], -item[0][1]))


def read_allreduce(
    path: str | Path, world_size: int | None = None, note: Note = no_note
) -> tuple[dict[GroupKey, float], Meta]:
    """Bus bandwidth in MiB/ms by (ranks, consecutive). A key without `_consec_` is a consecutive group's."""
    content, meta = read_profile(path)
    result: dict[GroupKey, float] = {}
    faults = Faults()
    for key, value, match in _measurements(
        path, content, _ALLREDUCE, "allreduce", "allreduce_size_{ranks}_consec_{0|1}", faults, note
    ):
        with faults.gathered():
            size = whole_number(path, key, match[1])
            group = (size, match[2] != "0")
            if group in result:
                raise UserError(
                    f"{path}: {key}: the same group stands there twice, with and without _consec_; keep one"
                )
            if world_size is not None and size > world_size:
                raise UserError(
                    f"{path}: {key}: a group of {size} ranks in a cluster of {world_size}: "
                    "the file is another cluster's; name the right file or set num_nodes and num_gpus_per_node"
                )
            result[group] = positive(path, key, value, f"{MIB_PER_MS}, bus bandwidth")
    faults.require_none()
    if not result and world_size != 1:
        raise holds_no(path, "allreduce_size_… key", content, "galvatron profile hardware")
    return result, meta or Meta()


def read_p2p(path: str | Path, note: Note = no_note) -> dict[int, float]:
    """Bandwidth in MiB/ms by number of pipeline stages."""
    content, _ = read_profile(path)
    result: dict[int, float] = {}
    faults = Faults()
    for key, value, match in _measurements(path, content, _P2P, "pp_size", "pp_size_{stages}", faults, note):
        with faults.gathered():
            result[whole_number(path, key, match[1])] = positive(path, key, value, MIB_PER_MS)
    faults.require_none()
    if not result and content:
        raise holds_no(path, "pp_size_… key", content, "galvatron profile hardware")
    return result


def read_overlap(path: str | Path, note: Note = no_note) -> tuple[float, dict[Collective, float]]:
    """The overlap coefficient, and those of kinds of collectives that have their own, all at least 1."""
    content, meta = read_profile(path)
    overlap_coe = _ratio(path, "overlap_coe", field_of(path, OVERLAP_NAME, content, "overlap_coe"))
    ours, name = meta.extra.get("overlap_by_kind") if meta else None, "galvatron.overlap_by_kind"
    by_kind: dict[Collective, float] = {}
    for kind, value in objects(path, name, ours) if ours is not None else ():
        if kind not in tuple(Collective):
            raise unknown_key(path, f"{name}.{kind}", ", ".join(Collective))
        by_kind[Collective(kind)] = _ratio(path, f"{name}.{kind}", value)
    skipped(path, [key for key in content if key != "overlap_coe"], note)
    return overlap_coe, by_kind


def _ratio(path: str | Path, key: str, value: object) -> float:
    ratio = positive(path, key, value, "ratio, 1 or more")
    if ratio < 1:
        raise UserError(f"{path}: {key}: {ratio} is below 1, as if work ran faster side by side; measure it again")
    return ratio


def read_messages(path: str | Path, note: Note = no_note) -> dict[MessageGroup, dict[float, float]]:
    """Time in ms by group and message size in MiB."""
    content, meta = read_profile(path)
    result: dict[MessageGroup, dict[float, float]] = {}
    ours = meta.extra.get("messages_ms") if meta else None
    extra = dict(objects(path, "galvatron.messages_ms", ours)) if ours is not None else {}
    faults, expected = Faults(), "{allreduce|all2all}_size_{ranks}_{MiB}MB_time"
    for key, value, match in _measurements(path, {**content, **extra}, _MESSAGE, "all", expected, faults, note):
        with faults.gathered():
            group = MessageGroup(Collective(match[1]), whole_number(path, key, match[2]), match[3] != "0")
            mib = positive(path, key, float(match[4]), "MiB")
            result.setdefault(group, {})[mib] = positive(path, key, value, MS)
    faults.require_none()
    if not result and content:
        raise holds_no(path, expected, content, "galvatron profile hardware")
    return result


def _measurements(
    path: str | Path,
    content: Mapping[str, Any],
    pattern: re.Pattern[str],
    begins: str,
    expected: str,
    faults: Faults,
    note: Note,
) -> Iterator[tuple[str, Any, re.Match[str]]]:
    """Measurements of a file. Other keys that begin like one are faults, the rest is skipped with a note."""
    strange = []
    for key, value in content.items():
        if match := pattern.fullmatch(key):
            yield key, value, match
        elif key.startswith(begins):
            with faults.gathered():
                raise unknown_key(path, key, expected)
        else:
            strange.append(key)
    skipped(path, strange, note)
