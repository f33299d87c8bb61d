"""Nodes by a hostfile: one address a line, node 0 first, as for MPI; what follows an address is left alone."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...base.reading import LARGEST_OPTIONS, read_text
from ...plan import UserError
from ..options import ProfileRunOptions

LOOKUP_S = 10.0  # in which names are looked up; a resolver may let each of them wait for as long
LOOKUPS = 8  # at once


def nodes_of(hostfile: Path, given: dict[str, Any]) -> dict[str, Any]:
    """num_nodes, master_addr and node_rank by a hostfile, where they are not given. Raises UserError."""
    try:
        lines = read_text(hostfile, LARGEST_OPTIONS).splitlines()
    except UserError as error:
        raise UserError(f"hostfile: {error}") from None
    hosts = [line.split()[0] for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not hosts:
        raise UserError(f"hostfile: {hostfile} names no node; write one address a line")
    wanted = ProfileRunOptions.among(given).num_nodes if "num_nodes" in given else len(hosts)
    if len(hosts) < wanted:
        raise UserError(f"hostfile: {hostfile} names {len(hosts)} nodes, but num_nodes is {wanted}")
    found = {"num_nodes": len(hosts), "master_addr": hosts[0]} | given
    if "node_rank" not in given and found["num_nodes"] != 1:
        found["node_rank"] = own_rank(hosts, f"hostfile: {hostfile}")
    return found


def own_rank(hosts: Sequence[str], where: str) -> int:
    """Which of the nodes this is. Raises UserError: none, or several."""
    own: list[int] = []
    left = iter(enumerate(hosts))

    def look() -> None:
        for number, host in left:
            if _is_own(host):
                own.append(number)

    threads = [threading.Thread(target=look, daemon=True) for _ in range(min(LOOKUPS, len(hosts)))]
    end = time.monotonic() + LOOKUP_S
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if len(own) != 1:
        raise UserError(f"{where}: {len(own)} of its addresses are this node's; say which one: --node_rank N")
    return own[0]


def _is_own(host: str) -> bool:
    """Whether an address is this node's: only such a one can be listened on."""
    try:
        with socket.socket() as probe:
            probe.bind((host, 0))
    except (OSError, TypeError, ValueError):  # the latter two: of what can be no name of a host
        return False
    return True
