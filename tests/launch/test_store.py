"""The place where ranks meet serves those that have the token, in groups that do not see each other."""

import contextlib
import socket
import struct
import subprocess
import sys
import threading

import pytest

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.launch import store
from paddlenlp_galvatron.launch.store import StoreClient, StoreServer

core = pytest.importorskip("paddle.base").core

TOKEN = "of this launch"


@pytest.fixture
def server():
    server = StoreServer("127.0.0.1", 0, TOKEN)
    yield server
    server.close()


def client(server: StoreServer, token: str = TOKEN):
    made = core.TCPStore("127.0.0.1", server.port, False, 0, 60)
    made.set(store.TOKEN, token)
    return made


def test_paddle_reads_what_it_wrote(server):
    one, other = client(server), client(server)
    one.set("key", b"\x00 of any bytes")
    assert bytes(other.get("key")) == b"\x00 of any bytes"
    assert [one.add("count", 2), other.add("count", 3)] == [2, 5]


def test_a_key_is_waited_for(server):
    one, other = client(server), client(server)
    timer = threading.Timer(0.3, lambda: one.set("late", b"1"))
    timer.start()
    assert bytes(other.get("late")) == b"1"


def test_groups_do_not_see_each_other(server):
    one, other = client(server), client(server)
    one.set(store.GROUP, b"1")
    other.set(store.GROUP, b"2")
    assert [one.add("count", 1), other.add("count", 1)] == [1, 1]
    assert server.keys() == {}


def test_who_lacks_the_token_learns_and_changes_nothing(server):
    stranger = client(server, "another")
    with pytest.raises(Exception, match="TCP"):
        stranger.add("count", 1)
    own = StoreClient("127.0.0.1", server.port, TOKEN, 10)
    own.set("mine", b"1")
    assert own.get("mine") == b"1" and own.get("count") == b""


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 10,
        struct.pack("<iQ", store.SET, 2**62) + b"x",
        struct.pack("<iQ", 77, 1) + b"x",
        struct.pack("<iQ", store.SET, 2) + b"\xff\xfe" + struct.pack("<Q", 0),
    ],
)
def test_strangers_are_put_out(server, sent):
    with socket.create_connection(("127.0.0.1", server.port), 10) as stranger:
        stranger.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    assert client(server).add("count", 1) == 1


def test_who_says_nothing_is_put_out(server, monkeypatch):
    monkeypatch.setattr(store, "HELLO_S", 0.2)
    with socket.create_connection(("127.0.0.1", server.port), 10) as silent:
        assert silent.recv(1) == b""


def test_strangers_and_sums_beyond_64_bits_fill_no_log():
    """In a process of its own: 40 files at most, and silent clients that take them all."""
    code = """
import resource, socket, struct, time
from paddlenlp_galvatron.launch.store import ADD, StoreClient, StoreServer
server = StoreServer("127.0.0.1", 0, "t")
client = StoreClient("127.0.0.1", server.port, "t", 30)
for number in range(2):
    client._socket.sendall(struct.pack("<iQ1sq", ADD, 1, b"k", 2**63 - 1))
try:
    answer = client._read(8) and client._read(8)
except OSError as error:
    answer = str(error)
assert answer == "the store was closed", answer
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
silent = []
try:
    while True:
        silent.append(socket.create_connection(("127.0.0.1", server.port), 5))
except OSError:
    time.sleep(0.5)
del silent
StoreClient("127.0.0.1", server.port, "t", 30).set("key", b"1")
server.close()
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_port_is_held_by_one(server):
    with pytest.raises(OSError):
        StoreServer("127.0.0.1", server.port, TOKEN)


def test_a_launch_of_more_ranks_than_the_usual_limit_raises_it_and_serves_all():
    """In a process of its own, whose limit this changes: 64 files at first, as many clients and more."""
    code = """
import resource
from paddlenlp_galvatron.launch.store import StoreClient, StoreServer, open_files
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
open_files(150)
server = StoreServer("127.0.0.1", 0, "t")
clients = [StoreClient("127.0.0.1", server.port, "t", 30) for _ in range(150)]
for number, client in enumerate(clients):
    client.set(f"{number}", b"here")
assert all(client.get(f"{number}") == b"here" for number, client in enumerate(clients))
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_a_launch_that_may_not_open_enough_files_is_refused(monkeypatch):
    monkeypatch.setattr(store.resource, "getrlimit", lambda _: (1024, 4096))
    limits = []
    monkeypatch.setattr(store.resource, "setrlimit", lambda _, limit: limits.append(limit))
    store.open_files(1152)
    assert limits == [(4096, 4096)]
    with pytest.raises(UserError, match=r"serves 4608 ranks and nodes, .* opens 4808 files; the hard limit is 4096"):
        store.open_files(4096 + 512)
    monkeypatch.setattr(store.resource, "getrlimit", lambda _: (1024, store.resource.RLIM_INFINITY))
    store.open_files(4096 + 512)
    assert limits[1:] == [(4808, 4808)]
