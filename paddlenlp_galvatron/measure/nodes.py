"""The nodes of a profile: a hostfile or the command line of Paddle's launcher, read as our options."""

import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..base.errors import UserError
from ..launch.clusters import NO_IPV6, is_ipv6, read_hostfile
from .options import ProfileRunOptions

LOOKUP_S = 10.0  # limit for all look-ups of names; a resolver may delay each by as much
LOOKUPS = 8  # simultaneous look-ups
# Option of a launcher -> ours.
LAUNCHER_OPTIONS = {
    "nnodes": "num_nodes",
    "nproc_per_node": "num_gpus_per_node",
    "rank": "node_rank",
    "node_rank": "node_rank",
    "master_addr": "master_addr",
    "master_port": "master_port",
}
DEVICES = ("gpus", "devices")
IDLE = ("log_dir", "log_level", "job_id")  # without effect: ranks' output is shown, and logs are deleted after success
LAUNCHERS = ("paddle.distributed.launch", "torch.distributed.launch", "torchrun")


def with_nodes(values: dict[str, Any]) -> dict[str, Any]:
    """The options completed from `hostfile` or `launch`. Raises UserError."""
    if values.get("hostfile"):
        values = options_of_hostfile(Path(values["hostfile"]), values)
    return options_of_launch(values["launch"], values) if values.get("launch") else values


def options_of_hostfile(hostfile: Path, options: dict[str, Any]) -> dict[str, Any]:
    """The options with missing num_nodes, master_addr and node_rank from the file, whose first host is node 0. Raises
    UserError."""
    try:
        hosts = read_hostfile(hostfile)
    except UserError as error:
        raise UserError(f"hostfile: {error}") from None
    wanted = ProfileRunOptions.from_values(options).num_nodes if "num_nodes" in options else len(hosts)
    if len(hosts) < wanted:
        raise UserError(f"hostfile: {hostfile} names {len(hosts)} nodes, but num_nodes is {wanted}")
    completed = {"num_nodes": len(hosts), "master_addr": hosts[0]} | options
    if "node_rank" not in options and completed["num_nodes"] != 1:
        completed["node_rank"] = own_rank(hosts, f"hostfile: {hostfile}")
    return completed


def options_of_launch(line: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with missing values from a launcher's command line; its `--gpus` become visible to ranks. Raises
    UserError if it starts another program or has an option without a counterpart."""
    words = line.split()
    start = next((number for number, word in enumerate(words) if word.endswith(LAUNCHERS)), None)
    if start is None:
        raise UserError(f"launch: {line!r} starts none of {', '.join(LAUNCHERS)}; leave it out")
    launched: dict[str, Any] = {}
    rest = iter(words[start + 1 :])
    for word in rest:
        name, equals, behind = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        value = behind if equals else next(rest, None)
        if value is None:
            raise UserError(f"launch: --{name}: a value is missing")
        if name == "ips":
            hosts = value.split(",")
            if ipv6 := next(filter(is_ipv6, hosts), None):
                raise UserError(f"launch: --ips: {ipv6}: {NO_IPV6}")
            launched |= {"num_nodes": str(len(hosts)), "master_addr": hosts[0]}
            if len(hosts) > 1 and "node_rank" not in options:
                launched["node_rank"] = str(own_rank(hosts, "launch: --ips"))
        elif name == "master":
            address, _, port = value.removeprefix("etcd://").rpartition(":")
            launched |= {"master_addr": address, "master_port": port}
        elif name in DEVICES:
            os.environ["CUDA_VISIBLE_DEVICES"] = value
            launched["num_gpus_per_node"] = str(len(value.split(",")))
        elif name in LAUNCHER_OPTIONS:
            launched[LAUNCHER_OPTIONS[name]] = value
        elif name not in IDLE:
            raise UserError(f"launch: --{name} has no counterpart here; leave it out")
    return launched | dict(options)


def own_rank(hosts: Sequence[str], where: str) -> int:
    """The index of this node. Raises UserError: none of the hosts is this node, or several are."""
    numbers: list[int] = []
    left = iter(enumerate(hosts))

    def look() -> None:
        for number, host in left:
            if _is_own(host):
                numbers.append(number)

    threads = [threading.Thread(target=look, daemon=True) for _ in range(min(LOOKUPS, len(hosts)))]
    end = time.monotonic() + LOOKUP_S
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if len(numbers) != 1:
        raise UserError(f"{where}: {len(numbers)} of its addresses are this node's; say which one: --node_rank N")
    return numbers[0]


def _is_own(host: str) -> bool:
    """Whether an address is this node's: only then can a socket bind to it."""
    try:
        with socket.socket() as probe:
            probe.bind((host, 0))
    except (OSError, TypeError, ValueError):  # the latter two for an invalid host name
        return False
    return True
