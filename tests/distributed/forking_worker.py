"""Starts worlds of training workers by forking: Paddle is imported once, so that a launch costs little.

Each line of the input is {"settings": path, "log": folder, "ranks": [environment of each rank]}; the answer is a line
with the process ids. Processes that end leave no trace. The end of the input ends all of them.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from pathlib import Path

from paddlenlp_galvatron.runtime.groups import run_as_rank
from paddlenlp_galvatron.training import train_worker

PR_SET_PDEATHSIG = 1  # prctl(2)


def become_rank(job: dict, rank: int) -> None:
    """Never returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    log = os.open(Path(job["log"], f"workerlog.{rank}"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(job["ranks"][rank])
    sys.argv[1:] = [job["settings"]]
    code = 1
    try:
        code = run_as_rank(train_worker.main)
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        job = json.loads(line)
        pids = []
        for rank in range(len(job["ranks"])):
            pid = os.fork()
            if pid == 0:
                become_rank(job, rank)
            pids.append(pid)
        sys.stdout.write(json.dumps(pids) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
