"""The two nodes that other tests run on are separate."""

import subprocess
import sys
from contextlib import ExitStack

import pytest
from two_nodes import ALIAS, LINK, hide_behind_router, two_nodes_or_skip

MIB = 2**20
SERVER = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 9000))
print("ready", flush=True)
peer, _ = server.accept()
begin, got = time.monotonic(), 0
peer.sendall(b"go")  # nothing comes before the clock runs, however late this process has its turns
while block := peer.recv(1 << 16):
    got += len(block)
print(got / (time.monotonic() - begin))
"""
CLIENT = """
import socket, sys
server = socket.create_connection((sys.argv[1], 9000))
server.recv(2)
server.sendall(bytes(int(sys.argv[2])))
"""


@pytest.mark.parametrize("mbit_per_s", [200, 1000])
def test_the_link_carries_no_more_than_its_rate(mbit_per_s):
    with ExitStack() as stack:
        nodes = two_nodes_or_skip(stack, mbit_per_s)
        for here, there in (nodes, nodes[::-1]):
            output = {"stdout": subprocess.PIPE}
            server = stack.enter_context(here.start([sys.executable, "-c", SERVER, here.address], **output))
            assert server.stdout.readline() == b"ready\n"
            there.run([sys.executable, "-c", CLIENT, here.address, str(mbit_per_s * MIB // 20)])
            reached = float(server.stdout.readline())
            assert reached * 8 / 1e6 / mbit_per_s <= 1.01  # less is the machine's business


def test_nothing_else_is_reached_and_nothing_is_left():
    with ExitStack() as stack:
        first, second = two_nodes_or_skip(stack, 200)
        assert LINK in first.run(["ip", "-brief", "link"]).stdout
        refused = first.run([sys.executable, "-c", CLIENT, "192.0.2.1", "1"], check=False)
        assert "unreachable" in refused.stderr
    for node in (first, second):
        assert node.run(["true"], check=False).returncode


def test_what_goes_to_a_node_can_be_lost_and_a_router_can_stand_before_one():
    with ExitStack() as stack:
        first, second = nodes = two_nodes_or_skip(stack, 200)
        hide_behind_router(stack, nodes, 9000, alone=True)
        server = stack.enter_context(first.start([sys.executable, "-c", SERVER, first.address], stdout=subprocess.PIPE))
        assert server.stdout.readline() == b"ready\n"
        assert first.listens() == {(ALIAS, 9000), (first.address, 9000)} and not second.listens()
        lost = second.start([sys.executable, "-c", CLIENT, first.address, "1"])
        stack.callback(lost.wait)
        stack.callback(lost.kill)
        second.run([sys.executable, "-c", CLIENT, ALIAS, str(MIB)])
        assert float(server.stdout.readline()) > 0
        assert lost.poll() is None  # it still tries
