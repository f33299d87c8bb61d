"""Profile of the cluster: reads and writes its four files. `profiles.network` prices messages with it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Unpack

from ..base import Faults, Note, UserError, no_note
from ..plan.comm_points import Collective as Collective
from . import dialects as foreign
from .dialects import Entries
from .files import (
    OVERLAP_NAME,
    Meta,
    ProfileFile,
    ProfileSource,
    allreduce_name,
    p2p_name,
    profile_path,
    read_profile,
    sp_time_name,
    write_profile,
)
from .schema import META_KEY, WHOLE, Content, FilePlace, Keys, NumberField, Part, TableField, one_of
from .schema import entries as objects


class MessageGroup(NamedTuple):
    """A kind of collective on a kind of group."""

    kind: Collective
    size: int  # ranks
    consecutive: bool = True


class MessageSize(NamedTuple):
    """A message of a collective."""

    kind: Collective
    size: int  # ranks
    consecutive: bool
    mib: float

    @property
    def is_plain(self) -> bool:
        """Whether Galvatron knows such messages."""
        kinds = (Collective.ALL_REDUCE, Collective.ALL_TO_ALL)
        return self.consecutive and self.kind in kinds and self.mib >= 1 and self.mib == int(self.mib)


GroupKey = tuple[int, bool]  # (ranks, consecutive)
MESSAGE_MIB, MESSAGE_MS = NumberField("MiB", above_zero=True), NumberField("ms", above_zero=True)
KINDS = one_of({kind.value: kind for kind in Collective})
GROUP = Keys("allreduce_size_{ranks}_consec_{0|1}", lambda *key: key, WHOLE, one_of({"0": False, "1": True}))
MESSAGES = Keys(
    "{allreduce|all2all}_size_{ranks}[_consec_0]_{MiB}MB_time",
    MessageSize,
    KINDS,
    WHOLE,
    one_of({"": True, "_consec_0": False}),
    Part(r"\d+(?:\.\d+)?", lambda place, text: MESSAGE_MIB.read(place, float(text)), lambda mib: f"{mib:.12g}"),
)
_SHAPE = re.compile(r"_([1-9]\d{0,8})nodes_([1-9]\d{0,8})gpus_per_node")


class Slowdown(NumberField):
    """A ratio of times that is 1 or more."""

    def read(self, at: FilePlace, value: object) -> float:
        ratio = super().read(at, value)
        if ratio < 1:
            raise UserError(f"{at}: {ratio} is below 1, as if work ran faster side by side; measure it again")
        return ratio


OVERLAP_COE = Slowdown("ratio, 1 or more", above_zero=True)
ALLREDUCE = Content(
    "hardware",
    {
        "allreduce_size": (
            TableField(GROUP, NumberField("MiB per ms, bus bandwidth", above_zero=True)),
            "MiB per ms: bus bandwidth (nccl-tests), message × 2 (n − 1) / n / time",
        )
    },
    begins=("allreduce",),
)
P2P = Content(
    "hardware",
    {
        "pp_size": (
            TableField(Keys("pp_size_{stages}", int, WHOLE), NumberField("MiB per ms", above_zero=True)),
            "MiB per ms: message / time, all ranks of a stage sending",
        )
    },
    begins=("pp_size",),
)
SP_TIME = Content(
    "hardware",
    {"time": (TableField(MESSAGES, MESSAGE_MS), "ms: time of a message by its MiB")},
    {
        "messages_ms": (
            TableField(MESSAGES, MESSAGE_MS),
            "ms: other sizes and kinds (`allgather`, `reducescatter`, `p2p`, strided groups)",
        )
    },
    begins=("all",),
)
OVERLAP = Content(
    "hardware",
    {
        "overlap_coe": (
            TableField(Keys("overlap_coe", tuple), OVERLAP_COE),
            "ratio: how many times slower computation and communication run while both run",
        )
    },
    {
        "overlap_by_kind": (
            TableField(Keys(f"{{{'|'.join(Collective)}}}", Collective, KINDS), OVERLAP_COE),
            "ratio: the same by kind of collective",
        ),
        "tensor_in_pipeline": (
            TableField(Keys("tensor_in_pipeline", tuple), OVERLAP_COE),
            "ratio: how many times as long collectives of tensor parallelism take in a pipeline",
        ),
        "tensor_shown": (
            TableField(Keys("tensor_shown", tuple), NumberField("ratio", above_zero=True)),
            "ratio: how much of the time of tensor parallelism's collectives is not behind products",
        ),
    },
)


@dataclass(frozen=True)
class HardwareProfile:
    """Measured speed of a cluster of `num_nodes` x `gpus_per_node` devices."""

    num_nodes: int
    gpus_per_node: int
    allreduce_mib_per_ms: Mapping[GroupKey, float]  # bus bandwidth: message * 2 (n - 1) / n / time (nccl-tests)
    p2p_mib_per_ms: Mapping[int, float] = field(default_factory=dict)  # stages -> message / time, all ranks at once
    messages_ms: Mapping[MessageGroup, Mapping[float, float]] = field(default_factory=dict)  # message MiB -> ms
    overlap_coe: float = 1.0  # how much slower compute and communication run at the same time
    meta: Meta = field(default_factory=Meta)
    files: tuple[ProfileFile, ...] = field(default=(), compare=False)  # the files it was read from
    # The same by kind, if known; for SEND: the slowdown of passes while the next receive is posted.
    overlap_by_kind: Mapping[Collective, float] = field(default_factory=dict)
    tensor_in_pipeline: float = 1.0  # how many times as long tensor parallelism's collectives take in a pipeline
    tensor_shown: float = 1.0  # exposed share of their time

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.gpus_per_node

    def overlap_of(self, kind: Collective) -> float:
        """The overlap coefficient of a kind of collective."""
        return self.overlap_by_kind.get(kind, self.overlap_coe)

    def save(self, folder: str | Path) -> list[Path]:
        """Write the files atomically under their documented names; returns their paths.

        Files without content are not written.
        """
        shape = (self.num_nodes, self.gpus_per_node)
        groups = self.messages_ms.items()
        messages = {MessageSize(*group, mib): ms for group, times in groups for mib, ms in sorted(times.items())}
        plain = {message: ms for message, ms in messages.items() if message.is_plain}
        ours = {message: ms for message, ms in messages.items() if not message.is_plain}
        # Largest group first, consecutive before strided, as Galvatron writes them.
        allreduce = dict(sorted(self.allreduce_mib_per_ms.items(), reverse=True))
        p2p = dict(sorted(self.p2p_mib_per_ms.items()))
        overlap = {"overlap_coe": {(): self.overlap_coe}, "overlap_by_kind": self.overlap_by_kind}
        for name in ("tensor_in_pipeline", "tensor_shown"):
            overlap[name] = {(): share} if (share := getattr(self, name)) != 1 else {}
        slowed = self.overlap_coe != 1 or any(bool(overlap_tables) for overlap_tables in list(overlap.values())[1:])
        slowed = slowed or "overlap_coe" in self.meta.spread
        files: list[tuple[str, Content, dict[str, Any], Any]] = [
            (allreduce_name(*shape), ALLREDUCE, {"allreduce_size": allreduce}, allreduce or self.world_size == 1),
            (p2p_name(*shape), P2P, {"pp_size": p2p}, p2p),
            (sp_time_name(*shape), SP_TIME, {"time": plain, "messages_ms": ours}, messages),
            (OVERLAP_NAME, OVERLAP, overlap, slowed),
        ]
        written = []
        for name, content, values, wanted in files:
            if wanted:
                own_entries, overlap_tables = content.write(values)
                kinds = [f"overlap_coe_{kind}" for kind in overlap_tables.get("overlap_by_kind", ())]
                meta = self.meta.about([*own_entries, *overlap_tables.get("messages_ms", ()), *kinds])
                written.append(write_profile(Path(folder) / name, content, values, meta))
        return written

    @classmethod
    def load(
        cls, num_nodes: int, gpus_per_node: int, *, note: Note = no_note, **source: Unpack[ProfileSource]
    ) -> HardwareProfile:
        """Read the files.

        The all-reduce file is required unless there is one device; without the p2p file a cluster has no pipeline,
        without sp_time messages are priced only by bandwidth, without the overlap file nothing slows down. A file named
        by path may be of a cluster with other nodes, given by its name. `note` receives the assumptions for missing
        files, and omissions. Raises UserError with all faults.
        """
        shape = (num_nodes, gpus_per_node)
        places = [
            profile_path(path, source.get("folder"), name)
            for path, name in (
                (source.get("allreduce_bandwidth_config_path"), allreduce_name(*shape)),
                (source.get("p2p_bandwidth_config_path"), p2p_name(*shape)),
                (source.get("sp_time_path"), sp_time_name(*shape)),
                (source.get("overlap_coe_path"), OVERLAP_NAME),
            )
        ]
        allreduce_file, p2p_file, sp_time_file, overlap_file = (path if exists else None for path, exists in places)
        if shape != (1, 1):
            if allreduce_file is None:
                missing = places[0][0]
                raise UserError(
                    f"{missing}: no such file; measure it with `galvatron profile hardware` or name another file"
                    if missing
                    else "allreduce_bandwidth_config_path: missing; name the all-reduce bandwidth file"
                )
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
            allreduce, meta = read_allreduce(allreduce_file, world_size, note) if allreduce_file else ({}, None)
        with faults.gathered():
            p2p = read_p2p(p2p_file, note) if p2p_file else {}
        with faults.gathered():
            messages = read_messages(sp_time_file, note) if sp_time_file else {}
        with faults.gathered():
            overlap_coe, by_kind, *tensor = read_overlap(overlap_file, note) if overlap_file else (1.0, {})
        faults.require_none()
        files = tuple(ProfileFile.of(f) for f in (allreduce_file, p2p_file, overlap_file, sp_time_file) if f)
        return cls(*shape, allreduce, p2p, messages, overlap_coe, meta or Meta(), files, by_kind, *tensor)


def message_key(group: MessageGroup, mib: float) -> str:
    """Key of the time of a message of `mib` MiB."""
    return MESSAGES.write(MessageSize(*group, mib))


def read_allreduce(
    path: str | Path, world_size: int | None = None, note: Note = no_note
) -> tuple[dict[GroupKey, float], Meta | None]:
    """Bus bandwidth in MiB/ms by (ranks, consecutive)."""
    content, meta = read_profile(path)
    entries = foreign.allreduce(str(path), content)
    result: dict[GroupKey, float] = ALLREDUCE.read(str(path), entries, {}, note)["allreduce_size"]
    if not result and world_size != 1:
        raise ALLREDUCE.lacking(str(path), entries, "allreduce_size_… key")
    at = FilePlace(str(path), origins=entries.origins)
    larger = [group for group in result if world_size is not None and group[0] > world_size]
    if larger:
        raise UserError(
            f"{at.at(GROUP.write(group))}: a group of {group[0]} ranks in a cluster of {world_size}: "
            "the file is another cluster's; name the right file or set num_nodes and num_gpus_per_node"
            for group in larger
        )
    return result, meta


def read_p2p(path: str | Path, note: Note = no_note) -> dict[int, float]:
    """Bandwidth in MiB/ms by number of pipeline stages."""
    content, _ = read_profile(path)
    entries = Entries(content, tuple(content))
    result: dict[int, float] = P2P.read(str(path), entries, {}, note)["pp_size"]
    if not result and content:
        raise P2P.lacking(str(path), entries, "pp_size_… key")
    return result


def read_overlap(path: str | Path, note: Note = no_note) -> tuple[float, dict[Collective, float], float, float]:
    """The overlap coefficient, those of kinds of collectives that have their own, and of tensor parallelism's
    collectives the slowdown in a pipeline and the share that is not hidden. All but the last are at least 1."""
    content, meta = read_profile(path)
    read = OVERLAP.read(str(path), Entries(content, tuple(content)), meta.extra if meta else {}, note)
    if not read["overlap_coe"]:
        raise UserError(f"{path}: overlap_coe is missing; add it or profile again")
    slower, shown = (read.get(name, {}).get((), 1.0) for name in ("tensor_in_pipeline", "tensor_shown"))
    return read["overlap_coe"][()], read.get("overlap_by_kind", {}), slower, shown


def read_messages(path: str | Path, note: Note = no_note) -> dict[MessageGroup, dict[float, float]]:
    """Time in ms by group and message size in MiB."""
    content, meta = read_profile(path)
    ours = meta.extra.get("messages_ms") if meta else None
    if ours is not None:  # other keys are skipped
        content |= objects(FilePlace(str(path), META_KEY).at("messages_ms"), ours)
    entries = foreign.messages(content)
    read = SP_TIME.read(str(path), entries, {}, note)
    result: dict[MessageGroup, dict[float, float]] = {}
    for (*group, mib), ms in read["time"].items():
        result.setdefault(MessageGroup(*group), {})[mib] = ms
    if not result and content:
        raise SP_TIME.lacking(str(path), entries, f"{MESSAGES.form} key")
    return result
