"""Rendezvous of a launch: a server for Paddle's TCPStore clients, on one address and with a token.

Paddle's server listens on all addresses of a host, accepts every client, and fails if its port was taken after it was
chosen. This server binds a port and keeps it. It serves Paddle's clients (`connect`) and `StoreClient`.

The wire format, of Paddle 3.1 to 3.3 (phi/core/distributed/store/tcp_store.cc): little-endian; a request is an int32
command and a key, followed for ADD by an int64 and for SET by a value; a uint64 length precedes each key and value.
Paddle's clients prefix every key with KEY_PREFIX. The first request sets TOKEN. Setting GROUP switches to that group's
keys, as gloo's rendezvous writes keys without the group's name.
"""

import asyncio
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import defaultdict
from typing import Any

from ..base import MIB, UserError

KEY_PREFIX = "/"
TOKEN, GROUP = "galvatron/token", "galvatron/group"
ADD, GET, CHECK, SET, WAIT = range(5)
STOP_WAIT, READY, NOT_READY = 1, 2, 3
LARGEST_KEY, LARGEST_VALUE = 2**12, MIB  # bytes; gloo's and NCCL's addresses have a few hundred
HELLO_S = 10.0  # time for a client to send its token
MEETING_S = 900.0  # timeout for another process's key, as in Paddle's default store
STORE, TOKEN_VARIABLE = "GALVATRON_STORE", "GALVATRON_TOKEN"  # address:port and token, from a launcher to its ranks
OTHER_FILES = 200  # open files of a launcher besides its clients: logs, pipes, libraries
BIND_S = 10.0  # time for a port of an earlier start to become free


def open_files(clients: int) -> None:
    """Raise the limit of open files of this process and its children to the system's maximum. Raises UserError if that
    is too low for `clients` clients of a store."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = clients + OTHER_FILES
    if hard == resource.RLIM_INFINITY:
        hard = max(soft, needed)
    if hard < needed:
        raise UserError(
            f"open files: the first node serves {clients} ranks and nodes, for which it opens {needed} files; the hard "
            f"limit is {hard}: raise it (nofile in limits.conf, LimitNOFILE of a service, --ulimit of a container)"
        )
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class StoreServer:
    """Serves from a thread of its own until it is closed. Raises OSError where the port is taken."""

    def __init__(self, address: str, port: int, token: str):
        self._socket = socket.create_server((address, port), backlog=1024)
        self.address, self.port, self.token = address, int(self._socket.getsockname()[1]), token
        self._groups: defaultdict[str, _Keys] = defaultdict(_Keys)
        self._loop, self._done = asyncio.new_event_loop(), asyncio.Event()
        self._loop.set_exception_handler(lambda *_: None)  # ignores faults of foreign clients
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)
        self._thread.start()

    def keys(self) -> dict[str, bytes]:
        """Keys set so far outside of groups."""
        return dict(self._groups[""].values)

    def set(self, key: str, value: bytes) -> None:
        """Set a key for later requests."""
        self._groups[""].values[key] = value

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join()
        self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._answer, sock=self._socket)
        await self._done.wait()
        server.close()
        answering = asyncio.all_tasks() - {asyncio.current_task()}
        for task in answering:
            task.cancel()
        await asyncio.gather(*answering, return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one client until it disconnects or makes an error."""
        try:
            async with asyncio.timeout(HELLO_S):
                command, key, value = await _request(reader)
            if (command, key, value) != (SET, TOKEN, self.token.encode()):
                return
            keys = self._groups[""]
            while True:
                # Paddle's clients send a request in small packets; each waits for the acknowledgement of the previous
                # one (Nagle's algorithm), which Linux would delay by 40 ms.
                writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
                command, key, value = await _request(reader)
                if (command, key) == (SET, GROUP):
                    keys = self._groups[value.decode()]
                else:
                    writer.write(await keys.answer(command, key, value))
        except (OSError, EOFError, ValueError, struct.error, TimeoutError, asyncio.CancelledError):
            pass  # the client disconnected or is unknown, or the server closes
        finally:
            writer.close()


class _Keys:
    """Keys and values of one group."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._waiting: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def answer(self, command: int, key: str, value: bytes) -> bytes:
        """Answer a request. Raises ValueError, and TimeoutError if no client set the key."""
        if command == GET:
            return _sized(self.values[key]) if key in self.values else _sized(b"")
        if command == CHECK:
            return struct.pack("<i", READY if key in self.values else NOT_READY)
        if command == WAIT:
            if key not in self.values:
                async with asyncio.timeout(MEETING_S):
                    await self._waiting[key].wait()
            return struct.pack("<i", STOP_WAIT)
        if command not in (ADD, SET):
            raise ValueError(f"command {command}")
        reply = b""
        if command == ADD:
            total = int(self.values.get(key, b"0")) + struct.unpack("<q", value)[0]
            value, reply = str(total).encode(), struct.pack("<q", total)
        self.values[key] = value
        self._waiting.pop(key, asyncio.Event()).set()
        return reply


async def _request(reader: asyncio.StreamReader) -> tuple[int, str, bytes]:
    """Command, key and the bytes after it. Raises ValueError and EOFError."""

    async def sized(limit: int) -> bytes:
        [length] = struct.unpack("<Q", await reader.readexactly(8))
        if length > limit:
            raise ValueError(f"{length} bytes")
        return await reader.readexactly(length)

    [command] = struct.unpack("<i", await reader.readexactly(4))
    key = (await sized(LARGEST_KEY)).decode().removeprefix(KEY_PREFIX)
    value = await reader.readexactly(8) if command == ADD else await sized(LARGEST_VALUE) if command == SET else b""
    return command, key, value


def _sized(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


class StoreClient:
    """A launcher's client of another node's store. Raises OSError if the store is gone."""

    def __init__(self, address: str, port: int, token: str, timeout_s: float):
        self._socket = socket.create_connection((address, port), timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.set(TOKEN, token.encode())

    def set(self, key: str, value: bytes) -> None:
        self._socket.sendall(struct.pack("<i", SET) + _sized(key.encode()) + _sized(value))

    def get(self, key: str) -> bytes:
        """Value of a key; empty if not set."""
        self._socket.sendall(struct.pack("<i", GET) + _sized(key.encode()))
        return self._read(struct.unpack("<Q", self._read(8))[0])

    def close(self) -> None:
        self._socket.close()

    def _read(self, length: int) -> bytes:
        content = b""
        while len(content) < length:
            if not (received := self._socket.recv(length - len(content))):
                raise ConnectionError("the store was closed")
            content += received
        return content


def connect(rank: int) -> Any:
    """Paddle's client of the store of this launch. Under another launcher rank 0 starts the server if that launcher
    expects it."""
    from paddle.base import core

    endpoint, token = (os.environ.get(name, "") for name in (STORE, TOKEN_VARIABLE))
    if not endpoint:
        endpoint = _wanted_place()
        if rank == 0:
            _start_server(endpoint, token)
    address, port = endpoint.rsplit(":", 1)
    store = core.TCPStore(address, int(port), False, 0, int(MEETING_S))  # 0: it waits for no other process
    store.set(TOKEN, token)
    return store


def _wanted_place() -> str:
    """The address at which Paddle's rank 0 would serve, by its launcher's variables."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    endpoints = os.environ.get("PADDLE_MASTER") or os.environ["PADDLE_TRAINER_ENDPOINTS"].split(",")[0]
    return f"{address}:{port}" if address and port else endpoints


def _start_server(endpoint: str, token: str) -> None:
    """Serve from a child process, as a thread would wait for code that holds the GIL. Raises UserError."""
    open_files(int(os.environ.get("PADDLE_TRAINERS_NUM", "1")))
    command = [sys.executable, "-P", "-m", __name__, *endpoint.rsplit(":", 1)]
    environment = os.environ | {TOKEN_VARIABLE: token}
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert child.stdout is not None
    if failure := child.stdout.readline().strip():
        raise UserError(f"{endpoint}: {failure}")
    _kept.append(child)


_kept: list[Any] = []  # the server's process: its pipes must not be garbage-collected


def main() -> None:
    """`python -m paddlenlp_galvatron.launch.store ADDRESS PORT`, until the input ends, as its parent does."""
    deadline = time.monotonic() + BIND_S
    while True:
        try:
            StoreServer(sys.argv[1], int(sys.argv[2]), os.environ[TOKEN_VARIABLE])
            break
        except OSError as error:
            if time.monotonic() > deadline:
                sys.stdout.write(f"cannot be listened on: {error.strerror}; start again, or name another port\n")
                return
            time.sleep(0.2)
    sys.stdout.write("\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
