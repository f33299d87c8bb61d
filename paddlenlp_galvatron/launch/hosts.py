"""Lists of hosts: Slurm's, and the hostfiles of MPI, PBS and Grid Engine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from ipaddress import IPv6Address
from itertools import product
from math import prod
from pathlib import Path

from ..base import UserError, shortened
from ..base.reading import LARGEST_OPTIONS, read_text

MOST_HOSTS = 100_000  # of one item of a list
LOOPBACKS = ("127.0.0.1", "127.0.1.1", "0.0.0.0", "localhost", "::1", "::")  # of one host alone, or of any
NO_IPV6 = "IPv6 is not supported; give an IPv4 address, or a name that has one"
_HOST = re.compile(r"[\w.-]+")
_ITEM = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_NUMBERS = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
_SLOTS = re.compile(r":\d+(:\w+)?$")  # MPICH's host:8, MVAPICH's host:8:mlx5_0


def first_host(hosts: str) -> str:
    """First host of a list, as in `listed_hosts`; empty for an empty list. Raises UserError."""
    return next(listed_hosts(hosts), "")


def listed_hosts(hosts: str) -> Iterator[str]:
    """Hosts of a list as Slurm writes it, in its order: `gpu-[07-09,12],rack[1-2]n[1-2]`. Raises UserError."""
    for item in _items(hosts):
        parts = re.split(r"\[(.*?)\]", item)  # every second one was in brackets
        choices = [_numbers(text) if index % 2 else [text] for index, text in enumerate(parts)]
        if not 0 < prod(map(len, choices)) <= MOST_HOSTS:
            raise UserError(
                f"{shortened(item)}: no numbers as in [01-04,07], or too many; write hosts as in gpu[01-04,07]"
            )
        yield from map("".join, product(*choices))


def _items(hosts: str) -> list[str]:
    """The parts between commas, except commas in brackets. Raises UserError."""
    if set(_ITEM.sub("", hosts)) - {","}:
        raise UserError(f"{shortened(hosts)}: a bracket has no partner; write hosts as in gpu[01-04,07]")
    return _ITEM.findall(hosts)


def _numbers(ranges: str) -> list[str]:
    """`07`, `08`, `12` of `07-08,12`; nothing where it is no such list, or too long."""
    numbers: list[str] = []
    for text in ranges.split(","):
        match = _NUMBERS.fullmatch(text)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not match or not 0 <= last - first < MOST_HOSTS - len(numbers):
            return []
        numbers += [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]
    return numbers


def is_ipv6(address: str) -> bool:
    """Whether it is an IPv6 address, in brackets or without."""
    try:
        IPv6Address(address.partition("]")[0].strip("["))
    except ValueError:
        return False
    return True


def read_hostfile(path: Path) -> list[str]:
    """Hosts of a file, each once, in its order: one or several a line, with slots or without. Raises UserError."""
    hosts: list[str] = []
    for number, line in enumerate(read_text(path, LARGEST_OPTIONS).removeprefix("\ufeff").splitlines(), 1):
        try:
            hosts += _hosts_of(line)
        except UserError as error:
            raise UserError(f"{path}: line {number}: {error}") from None
    if not hosts:
        raise UserError(f"{path}: names no node; write one address a line, node 0 first")
    return list(dict.fromkeys(hosts))  # PBS repeats a host for each of its slots


def _hosts_of(line: str) -> Iterator[str]:
    listed, *behind = re.sub(r"\s*([,=])\s*", r"\1", line.partition("#")[0]).split() or [""]
    if not (all("=" in word for word in behind) or _is_grid_engine(behind)):
        raise UserError(f"{' '.join(behind)!r} is unknown behind a host; write one host a line, or a,b")
    for item in _items(listed):
        named = item.rpartition("@")[2]  # behind a user's name
        if is_ipv6(named):
            raise UserError(f"{named}: {NO_IPV6}")
        for host in listed_hosts(_SLOTS.sub("", named)):
            if not _HOST.fullmatch(host):
                raise UserError(f"{host!r} is no host; write its name or address")
            yield host


def _is_grid_engine(behind: list[str]) -> bool:
    """Whether a number of slots follows the host, and then at most a queue@host and its processors. Open MPI and Torque
    name their numbers: slots=8, np=8."""
    return behind[0].isdigit() and all("@" in word for word in behind[1:2])
