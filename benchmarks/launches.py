"""Launches in a row while another program holds half of this host's ports, others every few seconds.

    python benchmarks/launches.py --launches 200

Each launch starts two processes, makes a group beside the world's, and sums a tensor in both.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack

from paddlenlp_galvatron.plan import GalvatronError

LOWEST, HIGHEST = 10_000, 61_000  # Linux's own choice is from 32768 on (net.ipv4.ip_local_port_range)
SHARE = 0.5
CHANGED = 0.2  # of the held ports, at a time
CHANGE_S = 3.0
RANKS, TIMEOUT_S = 2, 120
BY_ONE = 17_000  # ports of which one process holds half: it may have some 10,000 files open


def rank() -> None:
    """What each process of a launch does."""
    import paddle
    import paddle.distributed as dist

    from paddlenlp_galvatron.runtime.groups import Groups, start_world

    number, world_size = start_world()
    everybody = tuple(range(world_size))
    groups = Groups(number)
    groups.create([(everybody, "another")])
    for group in (None, groups.get(everybody, "another")):
        total = paddle.ones([4])
        dist.all_reduce(total, group=group)
        assert total.tolist() == [world_size] * 4


def hold(first: int, last: int) -> None:
    """Listen on half of the ports from first to last, changing some of them now and then, until this is ended."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    ports = list(range(first, last))
    held: dict[int, socket.socket] = {}
    while True:
        for port in random.sample(sorted(held), int(CHANGED * len(held))):
            held.pop(port).close()
        random.shuffle(ports)
        for port in ports:
            if len(held) < SHARE * len(ports) and port not in held:
                listener = socket.socket()
                try:
                    listener.bind(("0.0.0.0", port))
                    listener.listen(1)
                    held[port] = listener
                except OSError:
                    listener.close()
        print(len(held), flush=True)
        time.sleep(CHANGE_S)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--launches", type=int, default=200)
    launches = options.parse_args().launches
    from paddlenlp_galvatron.launch.processes import launch

    failures: list[str] = []
    started = time.monotonic()
    with ExitStack() as stack, tempfile.TemporaryDirectory() as logs:
        held = sum(start_holder(stack, first) for first in range(LOWEST, HIGHEST, BY_ONE))
        for number in range(launches):
            try:
                launch(__file__, [], RANKS, logs, TIMEOUT_S)
            except GalvatronError as error:
                failures.append(str(error))
                print(f"launch {number}: {error}", flush=True)
            if (number + 1) % 10 == 0:
                print(f"{number + 1} launches, {len(failures)} failed", flush=True)
    result = {"launches": launches, "failed": len(failures), "ports_held": held, "ports": HIGHEST - LOWEST}
    print(json.dumps(result | {"seconds": round(time.monotonic() - started, 1)}))


def start_holder(stack: ExitStack, first: int) -> int:
    """How many ports it holds."""
    command = [sys.executable, __file__, "--hold", str(first), str(min(first + BY_ONE, HIGHEST))]
    with tempfile.NamedTemporaryFile() as said:
        holder = subprocess.Popen(command, stdout=said)
        stack.callback(holder.kill)
        while not (lines := os.pread(said.fileno(), 100, 0).split()):
            if holder.poll() is not None:
                raise SystemExit("the ports cannot be held")
            time.sleep(0.1)
        return int(lines[0])


if __name__ == "__main__":
    if "PADDLE_TRAINER_ID" in os.environ:
        from paddlenlp_galvatron.runtime.groups import run_as_rank

        run_as_rank(rank)
    if sys.argv[1:2] == ["--hold"]:
        hold(int(sys.argv[2]), int(sys.argv[3]))
    main()
