"""The nodes of a launch: this one's number and the first one's address. The same command is started on every node."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from ..base.errors import UserError
from .clusters import launcher_nodes
from .store import StoreServer

LOOPBACK = "127.0.0.1"
FIELDS = ("num_nodes", "node_rank", "master_addr", "master_port")


@dataclass(frozen=True)
class Nodes:
    """Fields are named like the scripts' launch variables."""

    num_nodes: int = 1
    node_rank: int = 0
    master_addr: str = LOOPBACK  # of node 0, as the other nodes see it
    master_port: int | None = None  # free on node 0; on one node any will do

    def __post_init__(self) -> None:
        if not 0 <= self.node_rank < self.num_nodes:
            raise UserError(
                f"NODE_RANK: is {self.node_rank}, but the {self.num_nodes} nodes count from 0; give 0 to "
                f"{self.num_nodes - 1}"
            )
        if self.num_nodes > 1 and self.master_port is None:
            raise UserError("MASTER_PORT: missing; name a free port of the first node, the same on every node")
        if self.num_nodes > 1 and self.master_addr in (LOOPBACK, "localhost"):
            raise UserError("MASTER_ADDR: missing; name the first node's address as the other nodes reach it")

    @classmethod
    def from_environment(cls, **given: str | int | None) -> Nodes:
        """From NUM_NODES, NODE_RANK, MASTER_ADDR and MASTER_PORT, as a script sets them, or from the variables of a
        cluster's launcher; what is `given` and not None goes first. One node heeds none of them. Raises UserError."""
        if given.get("num_nodes") == 1:
            return cls()
        found = environment_nodes()
        values = {name: given.get(name) or found.get(name) for name in FIELDS}
        numbers = {name: _number(name, values[name]) for name in FIELDS if name != "master_addr"}
        if numbers["num_nodes"] <= 1:
            return cls()
        address = str(values["master_addr"] or LOOPBACK)
        return cls(numbers["num_nodes"], numbers["node_rank"], address, numbers["master_port"] or None)

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
        # Paddle wants an endpoint for each rank, but nothing of what runs here listens on it.
        # NCCL finds its peers by sockets on each interface but the loopback, where it is not told otherwise.
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
        """The server at which all ranks meet, on the first node. Raises UserError."""
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
        """This node's address on the way to the first node."""
        if self.num_nodes == 1:
            return LOOPBACK
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((self.master_addr, self.master_port or 1))  # sends nothing: only chooses a route
                return str(probe.getsockname()[0])
        except OSError as error:
            raise UserError(f"MASTER_ADDR: {self.master_addr} cannot be reached: {error.strerror}") from None


def environment_nodes() -> dict[str, str]:
    """Reads FIELDS from the variables of scripts, or else of a cluster's launcher. Raises UserError."""
    own = {name: os.environ.get(name.upper()) for name in FIELDS}
    return launcher_nodes(os.environ) | {name: value for name, value in own.items() if value}


def _number(name: str, value: str | int | None) -> int:
    try:
        return int(value or 0)
    except ValueError:
        raise UserError(f"{name.upper()}: {value!r} is no whole number; give one") from None


ONE_NODE = Nodes()
