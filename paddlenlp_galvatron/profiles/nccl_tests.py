"""Output of nccl-tests (all_reduce_perf and its kin) as a hardware profile.

Sizes have the same meaning: the whole buffer that a collective reduces, gathers, scatters or exchanges, and the bytes
that one rank sends. Uses out-of-place times. A prefix that a launcher puts before each line, such as a rank or the
time, is skipped.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from ..base import MIB, UserError, shortened
from ..base.reading import read_bytes
from .files import Fingerprint, Meta
from .hardware import Collective, HardwareProfile, MessageGroup
from .network import bandwidth_of

KINDS = {
    "all_reduce": Collective.ALL_REDUCE,
    "all_gather": Collective.ALL_GATHER,
    "reduce_scatter": Collective.REDUCE_SCATTER,
    "alltoall": Collective.ALL_TO_ALL,
    "sendrecv": Collective.SEND,
}
_PROGRAM = re.compile(f"({'|'.join(KINDS)})_perf")
# "#  Rank  0 Group  0 Pid   2748 on host device  0 [0x01] NVIDIA H100"; older ones have neither group nor pid.
_RANK = re.compile(
    r"Rank +\d+(?: +Group +(?P<group>\d+))?(?: +Pid +\d+)? +on +(?P<host>\S+) +device +\d+ +\[\S+\] *(?P<device>.*)"
)
_VERSION = re.compile(r"nccl-library=(\d+)|NCCL version (\S+)")
_ROW = re.compile(r"\d{1,19} {1,30}\d{1,19} {1,30}[a-z]\w+ .*")  # size in bytes, number of elements, their type
_RUN = re.compile(r"# *nThread \d")  # appears once in each run's first lines
_FAILURE = re.compile(r"Out of bounds values *: *\d+ FAILED|Test (\w+ )?failure.*")
LARGEST_LOG = 4 * MIB  # bytes; one has 10 kB
UNCHECKED = "N/A"  # entry if wrong elements were not counted
COLUMNS = 4  # time in us, algorithm bandwidth and bus bandwidth in GB/s, errors; out of place, then in place
ROUNDING = 0.01  # of times and bandwidths, relative, besides the last digit printed


@dataclass(frozen=True)
class NcclLog:
    """One run of one program."""

    group: MessageGroup
    times_ms: dict[float, float]  # message in MiB -> ms
    device: str
    library: str


def import_nccl_tests(paths: Iterable[Path], num_nodes: int, gpus_per_node: int) -> HardwareProfile:
    """The profile of a cluster from logs of its groups, one group a log. Raises UserError."""
    logs: dict[MessageGroup, NcclLog] = {}
    for path in paths:
        log = read_log(path, num_nodes, gpus_per_node)
        if log.group in logs:
            raise UserError(f"{path}: {_words(log.group)} stand in an earlier log, too; give one of them")
        logs[log.group] = log
    devices = {log.device for log in logs.values()}
    if len(devices) != 1:
        raise UserError(f"logs of different devices: {', '.join(sorted(devices))}; import those of one cluster")
    bandwidth = {group: bandwidth_of(group, log.times_ms) for group, log in logs.items()}
    library = ", ".join(sorted({log.library for log in logs.values()}))
    origin = Fingerprint(device=devices.pop() or None, device_count=num_nodes * gpus_per_node, driver=library or None)
    return HardwareProfile(
        num_nodes,
        gpus_per_node,
        {(g.size, g.consecutive): value for g, value in bandwidth.items() if g.kind is Collective.ALL_REDUCE},
        {g.size: value for g, value in bandwidth.items() if g.kind is Collective.SEND},
        {group: log.times_ms for group, log in logs.items()},
        meta=Meta(fingerprint=origin),
    )


def read_log(path: Path, num_nodes: int, gpus_per_node: int) -> NcclLog:
    """One log. Raises UserError if it is no such log, or of a group that the cluster does not have."""
    text = read_bytes(path, LARGEST_LOG).decode(errors="replace")
    if text.lstrip("\ufeff\n ").startswith("{"):
        raise UserError(f"{path}: is JSON; give the output of nccl-tests")
    if len(_RUN.findall(text)) > 1:
        raise UserError(f"{path}: holds {len(_RUN.findall(text))} runs of nccl-tests; give a file for each")
    if failure := _FAILURE.search(text):
        raise UserError(
            f"{path}: says {shortened(failure[0])!r}; find out what is wrong with the devices, and measure again"
        )
    program = _PROGRAM.search(text) or _PROGRAM.search(path.name)
    if not program:
        raise UserError(
            f"{path}: does not say which program wrote it; put its name into the file's: all_reduce_perf.log"
        )
    ranks = [match for line in text.splitlines() if (match := _RANK.search(line))]
    if not ranks:
        raise UserError(
            f"{path}: has no line '# Rank …', so its ranks are unknown; give the whole output of nccl-tests"
        )
    first = [match for match in ranks if match["group"] == ranks[0]["group"]]
    rows = [match[0].split() for line in text.splitlines() if (match := _ROW.search(line))]
    times: dict[float, float] = {}
    for row in rows:
        if float(row[0]) / MIB in times:
            raise UserError(
                f"{path}: {row[0]} bytes stand in several rows; measure one type and operation, in one cycle"
            )
        if float(row[0]):
            times[float(row[0]) / MIB] = _time_ms(path, row)
    if not times:
        raise UserError(f"{path}: has no row of results; give the whole output of nccl-tests")
    size, hosts = len(first), len({match["host"] for match in first})
    kind = KINDS[program[1]]
    group = MessageGroup(kind, size, _is_consecutive(path, kind, size, hosts, num_nodes, gpus_per_node))
    version = _VERSION.search(text)
    library = f"NCCL {version[1] or version[2]}" if version else ""
    return NcclLog(group, times, ranks[0]["device"].strip(), library)


def _time_ms(path: Path, row: list[str]) -> float:
    """Out-of-place time of a row, checked against the bandwidth next to it and the number of wrong elements."""
    try:
        wrong = [float(count) for count in row[-COLUMNS - 1 :: COLUMNS] if count != UNCHECKED]
        size_bytes, time_us, gb_per_s = int(row[0]), *map(float, row[-2 * COLUMNS : -2 * COLUMNS + 2])
        digit = 10.0 ** -len(row[-2 * COLUMNS + 1].partition(".")[2])
        agrees = abs(size_bytes / time_us / 1e3 - gb_per_s) <= digit + ROUNDING * gb_per_s
    except (ValueError, ArithmeticError):
        agrees = False
    if not agrees:
        raise UserError(
            f"{path}: {' '.join(row)}: not the columns that are expected (… time in us, algbw, busbw, #wrong, twice); "
            "use nccl-tests 2.5 or newer"
        )
    if not all(count < 1 for count in wrong):  # older versions print the largest error there, a small fraction
        raise UserError(
            f"{path}: {' '.join(row)}: #wrong is not 0: messages arrived damaged; repair that, and measure again"
        )
    return time_us / 1e3


def _is_consecutive(path: Path, kind: Collective, size: int, hosts: int, num_nodes: int, gpus_per_node: int) -> bool:
    """Whether a group of `size` ranks on `hosts` nodes is ranks 0, 1, …; else it must be 0, W/n, 2 W/n, … of W."""
    world = num_nodes * gpus_per_node
    strided_hosts = len({rank * world // size // gpus_per_node for rank in range(size)})
    if world % size == 0 and hosts == ceil(size / gpus_per_node):
        return True
    if world % size == 0 and hosts == strided_hosts:
        return kind is Collective.SEND  # peers of neighbouring stages
    raise UserError(
        f"{path}: {size} ranks on {hosts} nodes are no group of {num_nodes} x {gpus_per_node} devices; "
        "correct num_nodes and num_gpus_per_node"
    )


def _words(group: MessageGroup) -> str:
    return f"{group.kind} among {group.size} {'neighbouring' if group.consecutive else 'strided'} ranks"
