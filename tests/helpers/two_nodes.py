"""Two network namespaces as two nodes of a cluster, joined by one link of a known rate.

    with two_nodes(mbit_per_s=200) as nodes:
        nodes[0].run(["galvatron", ...])

Each node has a loopback and one interface, LINK, with its address; nothing else can be reached from it. Files and
processors are this machine's. The link is shaped in both directions. Nothing is left behind, however the test ends: a
namespace lives as long as the process that holds it, and that process reads a pipe whose other end is ours.
"""

import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

LINK = "link0"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
ALIAS = "192.0.2.1"  # of the first node, as from behind a router: no interface has it
LISTENS = "0A"  # state of a socket in /proc/net/tcp
NOBODY = "02:00:00:00:00:77"
# At the beginning of a launcher's program: it needs no Paddle to learn that there are no GPUs, which takes 5 s.
NO_GPUS = """
import sys, types
none = {"defaults": dict, "gpu_count": lambda: 0, "unused_gpus": list, "visible_gpus": list}
sys.modules["paddlenlp_galvatron.launch.gpus"] = types.SimpleNamespace(**none)
"""
BURST_BYTES = 70_000  # the least that holds the largest packet of a virtual link (64 KiB): no free start to speak of
QUEUE_MS = 200  # longest wait in the shaper's queue before packets are dropped
# Root of the machine needs no user namespace; anybody else is root in one, where the kernel allows that.
IS_ROOT = os.geteuid() == 0
OWN_USER, SAME_USER = ([], []) if IS_ROOT else (["--user", "--map-root-user"], ["--user", "--preserve-credentials"])


class Unavailable(Exception):
    """This machine lacks a feature that two nodes need; names it."""


@dataclass(frozen=True)
class Node:
    """One of the two."""

    address: str
    pid: int  # of the process that holds the namespace

    def command(self, words: Sequence[str]) -> list[str]:
        """The words as to be started on this node, by `subprocess` or a shell."""
        return ["nsenter", f"--target={self.pid}", *SAME_USER, "--net", "--", *map(str, words)]

    def run(self, words: Sequence[str], **settings: Any) -> subprocess.CompletedProcess[str]:
        """Run to the end and check the exit code."""
        settings = {"check": True, "capture_output": True, "text": True, "timeout": 60} | settings
        return subprocess.run(self.command(words), **settings)

    def start(self, words: Sequence[str], **settings: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self.command(words), **settings)

    def listens(self) -> set[tuple[str, int]]:
        """Addresses and ports where something of this node does, by IPv4."""
        rows = [line.split() for line in Path(f"/proc/{self.pid}/net/tcp").read_text().splitlines()[1:]]
        places = [row[1].split(":") for row in rows if row[3] == LISTENS]
        return {(socket.inet_ntoa(struct.pack("<I", int(address, 16))), int(port, 16)) for address, port in places}

    def lose_what_goes_to(self, address: str) -> None:
        """From now on nothing of this node arrives at an address, and no sender gets an error: it goes to no host."""
        self.run(["ip", "neigh", "replace", address, "lladdr", NOBODY, "dev", LINK, "nud", "permanent"])

    def shape(self, mbit_per_s: float) -> None:
        """Let the link carry this much in the direction away from this node (Mbit/s, link headers included)."""
        limits = ["rate", f"{mbit_per_s}mbit", "burst", str(BURST_BYTES), "latency", f"{QUEUE_MS}ms"]
        self.run(["tc", "qdisc", "replace", "dev", LINK, "root", "tbf", *limits])


@contextmanager
def two_nodes(mbit_per_s: float) -> Iterator[tuple[Node, Node]]:
    """Two joined nodes. Raises Unavailable."""
    missing = [tool for tool in ("ip", "tc", "unshare", "nsenter") if not shutil.which(tool)]
    if missing:
        raise Unavailable(f"not installed: {', '.join(missing)}")
    with ExitStack() as stack:
        try:
            first = Node(ADDRESSES[0], _hold(stack, ["unshare", *OWN_USER, "--net"]))
            within = ["nsenter", f"--target={first.pid}", *SAME_USER, "--"] if SAME_USER else []
            second = Node(ADDRESSES[1], _hold(stack, [*within, "unshare", "--net"]))
            peer = ["type", "veth", "peer", "name", LINK, "netns", str(second.pid)]
            first.run(["ip", "link", "add", LINK, *peer])
            for node in (first, second):
                node.run(["ip", "address", "add", f"{node.address}/24", "dev", LINK])
                for device in ("lo", LINK):
                    node.run(["ip", "link", "set", device, "up"])
                node.shape(mbit_per_s)
        except subprocess.CalledProcessError as error:
            raise Unavailable(f"no network namespaces here: {error.stderr.strip()}") from None
        yield first, second


RELAY = """
import asyncio, sys
alias, address, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
async def pump(reader, writer):
    try:
        while block := await reader.read(1 << 16):
            writer.write(block)
            await writer.drain()
    except OSError:
        pass
    writer.close()
async def relay(reader, writer):
    try:
        there = await asyncio.open_connection(address, port)
    except OSError:
        writer.close()
        return
    await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))
async def main():
    server = await asyncio.start_server(relay, alias, port)
    print("ready", flush=True)
    await server.serve_forever()
asyncio.run(main())
"""


def hide_behind_router(stack: ExitStack, nodes: tuple[Node, Node], port: int, alone: bool) -> None:
    """Let the second node reach a port of the first at ALIAS, which no interface of the first one has; `alone`: and
    nothing else of it. Until the stack closes."""
    first, second = nodes
    first.run(["ip", "route", "add", "local", ALIAS, "dev", "lo", "src", first.address])
    second.run(["ip", "route", "add", ALIAS, "dev", LINK])
    relay = first.start([sys.executable, "-c", RELAY, ALIAS, first.address, str(port)], stdout=subprocess.PIPE)
    stack.callback(relay.wait)
    stack.callback(relay.kill)
    assert relay.stdout and relay.stdout.readline() == b"ready\n"
    if alone:
        second.lose_what_goes_to(first.address)


def two_nodes_or_skip(stack: ExitStack, mbit_per_s: float) -> tuple[Node, Node]:
    """The same, open until the stack closes; skips the test where the machine does not allow it."""
    try:
        return stack.enter_context(two_nodes(mbit_per_s))
    except Unavailable as reason:
        pytest.skip(f"two nodes need network namespaces: {reason}")


def _hold(stack: ExitStack, command: list[str]) -> int:
    """Process id of a `cat` in a namespace of its own. It ends when our end of its input closes, at the latest with
    this process."""
    settings: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = stack.enter_context(subprocess.Popen([*command, "cat"], **settings))
    assert process.stdin and process.stdout and process.stderr
    stack.callback(process.stdin.close)
    try:
        process.stdin.write(b"\n")
        process.stdin.flush()
        echoed = process.stdout.read(1)  # by now it is in its namespace
    except BrokenPipeError:
        echoed = b""
    if not echoed:
        raise subprocess.CalledProcessError(1, command, stderr=process.stderr.read().decode())
    return process.pid
