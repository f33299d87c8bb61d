"""The part that measures products that overlap with messages, and the memory that only the driver counts.

Run as a program it is one rank, whose argument is a folder: it multiplies matrices alone, during a posted receive, and
during all-reduces. The ranks are two stages: those of the first half send to those of the second.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import paddle

from ...base.units import MIB
from ...launch.gpus import gpu_name, p2p_channels
from ...measure.messages import message_mib, overlap_coefficient, overlapping_ranks
from ...measure.stopwatch import Stopwatch
from ...plan import Precision
from ...plan.comm_points import Collective
from ...plan.communicators import DOWN, UP
from ...profiles.data_sheet import Device
from ...profiles.reserve import reserve_of
from ...runtime import device
from ...runtime.collectives import receive_start, send_start
from ...runtime.groups import Groups, run_as_rank, start_world
from ..findings import Finding
from .setting import Setting

SIDE, GPU_SIDE = 256, 4096  # of the matrices
PRODUCTS, LAPS = 50, 4  # the quickest round counts: disturbances only add time


def overlap(setting: Setting) -> Iterator[Finding]:
    """Figures that the cost model prices. Only the memory is checked, against the reserve."""
    if setting.ranks == 1:
        yield setting.skipped("messages", "they need 2 ranks or more")
        return
    with mock.patch.dict(os.environ, p2p_channels()):
        setting.launch(f"{__package__}.overlap", setting.folder)
    ranks = setting.results()
    alone, slowed = (max(rank[f"{name}_ms"] or 0.0 for rank in ranks) for name in ("alone", "during"))
    figures = f"{alone:.2f} ms alone, {slowed:.2f} ms during it: {slowed / alone:.2f}"
    yield setting.found("products during a posted receive", None, figures)
    figures = f"while both run, each takes {ranks[0]['overlap']:.2f} times as long (2: no overlap)"
    yield setting.found(f"products during all-reduces of {ranks[0]['message_mib']} MiB", None, figures)
    if None in (used := [rank["driver_mib"] for rank in ranks]):
        yield setting.skipped("memory that is not Paddle's", "only nvidia-smi reports it, on GPUs")
        return
    yield setting.kept(max(used), reserve_of(Device.named(gpu_name()), setting.ranks).having(ranks[0]["communicators"]))


def main() -> None:
    folder = Path(sys.argv[1])
    idle_mib = device.beside_mib()
    rank, ranks = start_world()
    half = ranks // 2
    pair = (rank % half, rank % half + half)
    groups = Groups(rank)
    pairs = [(low, low + half) for low in range(half)]
    groups.create({(each, use) for each in pairs for use in (DOWN, UP)} | {(overlapping_ranks(ranks), "")})
    precision = Precision.BF16 if device.on_gpu() else Precision.FP32
    result = dict.fromkeys(("alone_ms", "during_ms", "driver_mib"), None) | products_ms(rank, pair, groups)
    stopwatch = Stopwatch(ranks)
    arguments = stopwatch, rank, overlapping_ranks(ranks), groups, Collective.ALL_REDUCE, precision, ranks
    result |= {"overlap": overlap_coefficient(*arguments), "message_mib": message_mib()}
    device.synchronize()
    if (driver_mib := device.beside_mib()) is not None and idle_mib is not None:
        result |= {"driver_mib": driver_mib - idle_mib, "communicators": len(groups.members) + 1}
    stopwatch.any_rank(False)  # nobody ends before all have looked
    (folder / f"{rank}.json").write_text(json.dumps(result))


def products_ms(rank: int, pair: tuple[int, int], groups: Groups) -> dict[str, float]:
    """Measure on a rank that receives: ms of the products alone, and with a receive posted whose message is sent when
    they are done."""
    down, up = (groups.get(pair, use) for use in (DOWN, UP))
    numbers = message_mib() * MIB // 4
    message, word = paddle.zeros([numbers]), paddle.zeros([1])
    alone_ms, during_ms = [], []
    side = GPU_SIDE if device.on_gpu() else SIDE
    matrix = paddle.ones([side, side], "bfloat16" if device.on_gpu() else "float32")

    def products() -> None:
        for _ in range(PRODUCTS):
            paddle.matmul(matrix, matrix)

    for _ in range(1 + LAPS):
        if rank == pair[0]:
            receive_start(word, pair[1], up).wait()  # the message stands behind it in the queue
            send_start(message, pair[1], down).wait()
            device.synchronize()
            continue
        alone_ms.append(_ms(products))
        posted = receive_start(message, pair[0], down)
        during_ms.append(_ms(products))
        send_start(word, pair[0], up).wait()
        posted.wait()
        device.synchronize()
    return {"alone_ms": min(alone_ms[1:]), "during_ms": min(during_ms[1:])} if alone_ms else {}


def _ms(work: Callable[[], Any]) -> float:
    """Time of computation; messages may still be under way."""
    begin, since = device.Mark(timed=True), time.perf_counter()
    work()
    end = device.Mark(timed=True)
    device.finish_computing()
    return float(begin.event.elapsed_time(end.event)) if begin.event else 1000 * (time.perf_counter() - since)


if __name__ == "__main__":
    run_as_rank(main)
