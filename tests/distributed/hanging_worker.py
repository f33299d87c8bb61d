"""One of two ranks that hang: the first waits for a message; the second sleeps (`one`), or waits, too (`both`)."""

import sys
import time

import paddle

from paddlenlp_galvatron.launch import status
from paddlenlp_galvatron.plan.communicators import DOWN, UP
from paddlenlp_galvatron.runtime import collectives
from paddlenlp_galvatron.runtime.collectives import receive_start
from paddlenlp_galvatron.runtime.groups import Groups, run_as_rank, start_world

LONG_S = 600


def main() -> None:
    who, limit_s = sys.argv[1], float(sys.argv[2])
    rank, _ = start_world()
    groups = Groups(rank)
    groups.create({((0, 1), DOWN), ((0, 1), UP)})
    collectives.watch(limit_s)
    status.enter(3)
    if rank and who == "one":
        time.sleep(LONG_S)
    receive_start(paddle.empty([4]), 1 - rank, groups.get((0, 1), DOWN if rank else UP)).wait()


if __name__ == "__main__":
    run_as_rank(main)
