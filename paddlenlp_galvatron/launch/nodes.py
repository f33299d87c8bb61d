"""The nodes of a launch: this node's rank and the first node's address. Every node starts the same command."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ..base import UserError, shortened
from .clusters import LOOPBACKS, NO_IPV6, is_ipv6, launcher_nodes
from .store import STORE, StoreServer

LOOPBACK = "127.0.0.1"
IPV6_ALONE = (socket.EAI_ADDRFAMILY, socket.EAI_NODATA)  # errors of looking up an IPv4 address
FIELDS = ("num_nodes", "node_rank", "master_addr", "master_port")


@dataclass(frozen=True)
class Nodes:
    """Fields are named like the scripts' launch variables."""

    num_nodes: int = 1
    node_rank: int = 0
    master_addr: str = ""  # address of node 0 for the other nodes
    master_port: int | None = None  # a free port of node 0; None on one node: any

    def __post_init__(self) -> None:
        if not 0 <= self.node_rank < self.num_nodes:
            raise UserError(
                f"NODE_RANK: is {self.node_rank}, but the {self.num_nodes} nodes count from 0; give 0 to "
                f"{self.num_nodes - 1}"
            )
        if self.num_nodes > 1 and self.master_port is None:
            raise UserError("MASTER_PORT: missing; name a free port of the first node, the same on every node")
        if self.num_nodes > 1:
            _require_reachable(self.master_addr)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ, /, **options: str | int | None) -> Nodes:
        """The nodes that `environment_nodes` finds. Raises UserError."""
        values = environment_nodes(environment, options)
        if values.get("num_nodes", 1) == 1:
            return cls()
        if "node_rank" not in values:
            raise UserError("NODE_RANK: missing; number the nodes from 0, each by its own number")
        return cls(**values)  # type: ignore[arg-type]

    def ranks_each(self, world_size: int) -> int:
        """Ranks of one node. Raises UserError."""
        ranks, rest = divmod(world_size, self.num_nodes)
        if rest:
            raise UserError(
                f"world_size: {world_size} ranks do not split evenly over {self.num_nodes} nodes; start as many on each"
            )
        return ranks

    def environment(self, ranks_per_node: int) -> list[dict[str, str]]:
        """Variables that Paddle reads in each process of this node, by local rank."""
        world_size, first = self.num_nodes * ranks_per_node, self.node_rank * ranks_per_node
        # Paddle requires an endpoint for each rank, but nothing listens on it.
        # By default NCCL finds its peers through sockets on all interfaces but the loopback.
        inside = {"NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo")} if self.num_nodes == 1 else {}
        endpoints = [f"{self.own_address()}:{first + local + 1}" for local in range(ranks_per_node)]
        return [
            {
                "PADDLE_TRAINER_ID": str(first + local),
                "PADDLE_TRAINERS_NUM": str(world_size),
                "PADDLE_RANK_IN_NODE": str(local),
                "PADDLE_LOCAL_SIZE": str(ranks_per_node),
                "PADDLE_CURRENT_ENDPOINT": endpoint,
                "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
                **inside,
            }
            for local, endpoint in enumerate(endpoints)
        ]

    def store(self, token: str) -> StoreServer | None:
        """The store through which all ranks connect, on the first node. Raises UserError."""
        if self.num_nodes == 1:
            return StoreServer(LOOPBACK, 0, token)
        if self.node_rank:
            return None
        address = self.own_address()
        if address.startswith("127."):
            raise UserError(
                f"MASTER_ADDR: {self.master_addr} is {address} here, where no other node reaches it; give the "
                "address of node 0 on their network"
            )
        try:
            return StoreServer(address, self.master_port or 0, token)
        except OSError as error:
            where = f"{address}:{self.master_port}"
            raise UserError(f"MASTER_PORT: {where} cannot be listened on: {error.strerror}; name another one") from None

    def own_address(self) -> str:
        """This node's address on the route to the first node."""
        if self.num_nodes == 1:
            return LOOPBACK
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((self.master_addr, self.master_port or 1))  # sends nothing, only chooses a route
                return str(probe.getsockname()[0])
        except OSError as error:
            if error.errno in IPV6_ALONE:
                raise UserError(f"MASTER_ADDR: {self.master_addr}: {NO_IPV6}") from None
            raise UserError(f"MASTER_ADDR: {self.master_addr} cannot be reached: {error.strerror}") from None


def environment_nodes(
    environment: Mapping[str, str] = os.environ,
    options: Mapping[str, str | int | None] = MappingProxyType({}),
    needed: Sequence[str] = FIELDS,
) -> dict[str, str | int]:
    """The known values of FIELDS: from `options`, else from NUM_NODES, NODE_RANK, MASTER_ADDR and MASTER_PORT, else
    from the variables of a cluster's launcher. One node ignores them all, and our ranks ignore a launcher's, as
    Paddle's are set for them. `needed`: see `launcher_nodes`. Raises UserError."""
    values: dict[str, str | int | None] = {name: environment.get(name.upper()) for name in FIELDS}
    values |= {name: value for name, value in options.items() if value is not None}
    if str(values["num_nodes"]) == "1":
        return {"num_nodes": 1}
    checked = _checked(values)
    return checked if STORE in environment else _checked(launcher_nodes(environment, checked, needed)) | checked


def _checked(values: Mapping[str, str | int | None]) -> dict[str, str | int]:
    texts = {name: value for name, value in values.items() if value not in (None, "")}
    return {name: str(value) if name == "master_addr" else _number(name, value) for name, value in texts.items()}


def _require_reachable(address: str) -> None:
    """Raise UserError unless other nodes may reach this address."""
    if not address:
        raise UserError("MASTER_ADDR: missing; name the first node's address as the other nodes reach it")
    if address.lower() in LOOPBACKS:
        raise UserError(
            f"MASTER_ADDR: {address} reaches no other node; name node 0's address on their network, or give NUM_NODES=1"
        )
    if is_ipv6(address):
        raise UserError(f"MASTER_ADDR: {address}: {NO_IPV6}")


def _number(name: str, value: str | int | None) -> int:
    least = 1 if name in ("num_nodes", "master_port") else 0
    try:
        number = int(value or 0)
        if number < least:
            raise ValueError
    except ValueError:
        raise UserError(
            f"{name.upper()}: {shortened(str(value))} is no whole number from {least} on; give one"
        ) from None
    return number


ONE_NODE = Nodes()
