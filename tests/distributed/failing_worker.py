"""One rank of a launch that goes wrong in the way, at the place and on the given rank."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import paddle
import paddle.distributed as dist

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.launch import status
from paddlenlp_galvatron.runtime.collectives import all_reduce
from paddlenlp_galvatron.runtime.groups import run_as_rank, start_world

STEPS = 3
PAUSE_S, LONG_S = 2, 600
UNTIL = "until "  # before the name of a file that is waited for


def fail(how: str) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "segfault":
        ctypes.string_at(0)
    elif how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "sleeps":
        time.sleep(LONG_S)
    elif how == "pauses":
        time.sleep(PAUSE_S)
    elif how.startswith(UNTIL):
        while not Path(how.removeprefix(UNTIL)).exists():
            time.sleep(0.05)
    elif how == "raises":
        raise ValueError("the reason\nand more of it")
    elif how == "refuses":
        raise UserError("field: the reason")
    elif how == "leaves":
        sys.exit(0)
    elif how == "vanishes":
        os._exit(0)


def main() -> None:
    how, place, who = sys.argv[1], sys.argv[2], int(sys.argv[3])
    mine = os.environ["PADDLE_TRAINER_ID"] == str(who)
    if mine and place == "start":
        fail(how)
    start_world()
    for step in range(STEPS):
        status.enter(step)
        sys.stderr.write(f"step {step}\n")
        if mine and place == "step" and step == 1:
            time.sleep(PAUSE_S)  # the others wait by now
            sys.stderr.write(f"goes wrong at {time.time()}\n")
            fail(how)
        all_reduce(paddle.ones([4]), dist.get_group(0))


if __name__ == "__main__":
    run_as_rank(main)
