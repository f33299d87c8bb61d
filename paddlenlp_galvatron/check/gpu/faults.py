"""Parts that disturb training: a resume from a checkpoint, a rank out of memory, traced steps. Also finds memory that a
later step allocates from a GPU or frees, as either waits for the whole device, and measures how much matrix products
and messages slow each other down.

Run as a program it is a rank of a training that is interrupted (`resume`), traced (`trace`), runs out of memory
(`starve`) or has its memory read (`wait`), or a rank of the measurements (`overlap`). Only NVIDIA's profiler shows
other waits for the device (docs/dev/gpus.md).
"""

import itertools
import json
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import paddle

from ...base.units import MIB
from ...launch.gpus import gpu_name, p2p_channels
from ...launch.out_of_memory import is_out_of_memory
from ...launch.processes import LaunchError, OutOfMemory
from ...measure.messages import message_mib, overlap_coefficient, overlapping_ranks
from ...measure.stopwatch import Stopwatch
from ...model import config_of
from ...options.uniform import uniform_plan
from ...plan import DataParallel, LayerStrategy, ModelShape, Plan, Precision, VocabStrategy, write_plan
from ...plan.comm_points import Collective
from ...plan.communicators import DOWN, UP
from ...plan.strategy import Assumptions
from ...profiles.data_sheet import Device
from ...profiles.reserve import reserve_of
from ...runtime import device
from ...runtime.collectives import receive_start, send_start
from ...runtime.engine import Engine
from ...runtime.groups import Groups, run_as_rank, start_world
from ...runtime.setup import ModelSetup
from ...runtime.trace import traced
from ...training.loop import train
from ...training.settings import RANDOM, TrainSettings, read_settings
from ...training.step_log import read_log
from ..findings import Finding
from ..parity.parity import Case, batch_of
from .parity import waiting_cases
from .setting import CheckSetting

STRAIGHT, HALVES = "straight", "halves"  # folders of the two runs
STEPS, SEQ = 4, 16
MODEL = ModelShape("small", "qwen2", 2, 64, 128, 8, 8, 64, SEQ)
SHAPE = ModelShape("large", "llama", 2, 1024, 2048, 8, 8, 24_000, SEQ)  # 70 million weights: 1 GiB with their states
LATER, PASSES = 3, 4  # the pipeline step that is traced or runs out of memory; its micro-batches
ROOM_MIB = 100  # free memory of the rank that runs out: less than its gradients
SETTLED, LOOKED_AT = 2, 4  # steps: after the second, no step should allocate more memory
GPU_TOLERANCE = 1e-3  # of a loss: some GPU kernels sum in random order, and training amplifies the difference


def resume(setting: CheckSetting) -> Iterator[Finding]:
    """Interrupted training, under zero3 and a split vocabulary, ends with the same loss as uninterrupted training."""
    folder, precision = setting.folder, Precision.BF16 if setting.on_gpus else Precision.FP32
    wide = min(2, setting.ranks)
    layers = LayerStrategy(dp_type=DataParallel.ZERO3), LayerStrategy(wide)
    assumed = Assumptions(mixed_precision=precision, seq_length=SEQ)
    plan = Plan(setting.ranks, 2 * setting.ranks, 2, (2,), layers, VocabStrategy(wide), assumed=assumed)
    write_plan(plan, folder / "plan.json")
    (folder / "model.json").write_text(json.dumps(config_of(MODEL)))
    settings = TrainSettings(
        plan=folder / "plan.json",
        model=str(folder / "model.json"),
        world_size=setting.ranks,
        output_dir=folder,
        max_steps=STEPS,
        input_dir=RANDOM,
        report_to=("none",),
        lr_scheduler_type="constant",
    )
    settings.save(folder / "settings.json")
    _launch(setting, "resume", folder / "settings.json")
    logs = (read_log(setting.folder / name / "train_log.jsonl") for name in (STRAIGHT, HALVES))
    straight, halves = ([record["loss"] for record in log] for log in logs)
    apart = max(abs(straight_loss - other) for straight_loss, other in zip(straight, halves, strict=False))
    holds = len(straight) == len(halves) == STEPS and apart <= (GPU_TOLERANCE if setting.on_gpus else 0)
    figures = f"losses of {len(halves)} of {STEPS} steps differ by {apart:.1e} at most"
    yield setting.found("interrupted and straight", holds, figures)


def memory(setting: CheckSetting) -> Iterator[Finding]:
    """A rank that runs out of memory in its first step is named in the error and ends the other ranks."""
    yield _starved(setting, "a rank without memory", 1)


def later(setting: CheckSetting) -> Iterator[Finding]:
    """Pipeline steps with receives posted ahead (from the second step on): a traced step, and a step that runs out of
    memory. A wait for the whole device would also wait for a message."""
    if setting.ranks == 1:
        yield setting.skipped("a pipeline", "it needs 2 ranks or more")
        return
    name, given_s = f"step {LATER} traced", setting.launch_s
    try:
        _launch(setting, "trace", setting.folder)
    except LaunchError as error:
        yield setting.ended(name, str(error), given_s)
    else:
        passes = [sum(event["cat"] in ("forward", "backward") for event in events) for events in setting.results()]
        yield setting.found(name, set(passes) == {2 * PASSES}, f"passes by rank: {', '.join(map(str, passes))}")
    if setting.left_s <= 0:
        yield setting.no_time(f"memory ends in step {LATER}")
        return
    yield _starved(setting, f"memory ends in step {LATER}", LATER)


def waits(setting: CheckSetting) -> Iterator[Finding]:
    """Memory that Paddle's allocator reserves, before and after some steps, and its peak between them."""
    if not setting.on_gpus:
        yield setting.skipped("memory that a later step takes", "CPUs have no such wait")
        return
    names = [named.name for named in waiting_cases(setting.ranks)]
    _launch(setting, "wait", setting.folder)
    for name, *rows in zip(names, *setting.results(), strict=True):
        moved = max(max(row) - min(row) for row in rows)
        yield setting.found(name, moved == 0, f"{moved / MIB:.1f} MiB taken or given back after step {SETTLED}")


def _starved(setting: CheckSetting, name: str, step: int) -> Finding:
    """The last rank runs out of memory in this step."""
    rank, given_s = setting.ranks - 1, setting.launch_s
    try:
        _launch(setting, "starve", rank, ROOM_MIB, step)
    except OutOfMemory as error:
        return setting.found(name, error.rank == rank, str(error))
    except LaunchError as error:
        return setting.ended(name, f"the error does not name the cause: {error}", given_s)
    return setting.found(name, False, "it trained all the same")


def _launch(setting: CheckSetting, work: str, *words: object) -> None:
    setting.launch(f"{__package__}.faults", work, *words, logs=setting.folder / work)


class Training:
    """Train steps on random tokens, in two stages if there are two ranks."""

    def __init__(self, micro_batches: int):
        self.rank, ranks = start_world()
        plan = uniform_plan(
            layers=SHAPE.layers,
            world_size=ranks,
            global_train_batch_size=micro_batches * ranks,
            chunks=micro_batches,
            pp_deg=2 if ranks > 1 else 1,
            assumed=Assumptions(seq_length=SEQ),
        )
        self.case = Case(plan, SHAPE, "adamw")
        self.engine = Engine(ModelSetup.of(plan, SHAPE, SEQ))
        self._optimizer: Any = None

    def step(self) -> None:
        if self._optimizer is None:
            self._optimizer = self.case.recipe.build(self.engine.tensors, self.engine.decaying)
        self.engine.forward_backward(batch_of(self.case, 0))
        self.engine.update(self._optimizer, 1.0)


def train_until_full(rank: int, room_mib: int, step: int) -> None:
    """Train until one rank runs out of memory in this step. It may allocate only `room_mib` more: in the first step
    beyond its weights, in a later step beyond all that it has used so far."""
    training = Training(1 if step == 1 else PASSES)
    for _ in range(step - 1):
        training.step()
    filled = []
    if training.rank == rank:
        filled = _leave(room_mib)
        if step > 1:
            filled += _blocks(room_mib)  # blocks that the allocator kept from earlier steps
            _need_more(training.engine.stage, 2 * room_mib)
    training.step()
    filled.clear()


def _need_more(stage: Any, mib: int) -> None:
    """Make the second forward pass need `mib` more, during the receive for the next pass."""
    forward, passes = stage.forward, itertools.count(1)

    def larger(*arguments: Any) -> Any:
        more = paddle.empty([mib * MIB], "uint8") if next(passes) == 2 else None
        out = forward(*arguments)
        del more
        return out

    stage.forward = larger


def _leave(room_mib: int) -> list[Any]:
    """Leave no more memory than this; the returned tensor holds the rest of a GPU's memory."""
    if device.on_gpu():
        return list(_blocks(room_mib))
    match = re.search(r"VmData:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    limit = int(match[1]) * 1024 + room_mib * MIB
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return []


def _blocks(size_mib: int) -> Iterator[Any]:
    while True:
        try:
            yield paddle.empty([size_mib * MIB], "uint8")
        except Exception as error:  # Paddle raises several classes for out of memory
            if is_out_of_memory(error):
                return
            raise


def train_with_a_break(settings_file: str) -> None:
    """Train without interruption, and in two halves through a checkpoint, in separate folders."""
    settings = read_settings(settings_file)
    whole = settings.max_steps
    for name, steps in ((STRAIGHT, whole), (HALVES, whole // 2), (HALVES, whole)):
        changed = {"output_dir": settings.output_dir / name, "max_steps": steps}
        train(settings.model_copy(update=changed))


def train_traced(folder: str) -> None:
    """Trace a later pipeline step and write its events."""
    training, events = Training(PASSES), list[dict[str, Any]]()
    for _ in range(LATER - 1):
        training.step()
    with traced(training.rank, events):
        training.step()
    (Path(folder) / f"{training.rank}.json").write_text(json.dumps(events))


def train_looked_at(folder: str) -> None:
    """Train each case; write the device's memory after the second step, at its peak and at the end."""
    rounds = []
    rank, ranks = start_world()
    for named in waiting_cases(ranks):
        case = replace(named.case, steps=SETTLED + LOOKED_AT)
        engine = Engine(ModelSetup.of(case.plan, case.shape, case.seq_length))
        optimizer = case.recipe.build(engine.tensors, engine.decaying)
        for step in range(case.steps):
            if step == SETTLED:
                paddle.device.cuda.reset_max_memory_reserved()
                reserved = [device.reserved_mib()]
            engine.forward_backward(batch_of(case, step))
            engine.update(optimizer, 1.0)
        rounds.append([round(MIB * mib) for mib in (*reserved, device.reserved_mib(), device.reserved_peak_mib())])
        device.release()
    (Path(folder) / f"{rank}.json").write_text(json.dumps(rounds))


SIDE, GPU_SIDE = 256, 4096  # side length of the matrices
PRODUCTS, LAPS = 50, 4  # the fastest round counts, as disturbances only add time


def overlap(setting: CheckSetting) -> Iterator[Finding]:
    """Figures that the cost model prices. Only the memory is checked, against the reserve."""
    if setting.ranks == 1:
        yield setting.skipped("messages", "they need 2 ranks or more")
        return
    with mock.patch.dict(os.environ, p2p_channels()):
        setting.launch(f"{__package__}.faults", "overlap", setting.folder)
    ranks = setting.results()
    alone, slowed = (max(rank[f"{name}_ms"] or 0.0 for rank in ranks) for name in ("alone", "during"))
    figures = f"{alone:.2f} ms alone, {slowed:.2f} ms during it: {slowed / alone:.2f}"
    yield setting.found("products during a posted receive", None, figures)
    figures = f"while both run, each takes {ranks[0]['overlap']:.2f} times as long (2: no overlap)"
    yield setting.found(f"products during all-reduces of {ranks[0]['message_mib']} MiB", None, figures)
    if None in (used := [rank["driver_mib"] for rank in ranks]):
        yield setting.skipped("memory outside Paddle's allocator", "only nvidia-smi reports it, on GPUs")
        return
    yield setting.kept(max(used), reserve_of(Device.named(gpu_name()), setting.ranks).having(ranks[0]["communicators"]))


def measure_overlap(folder: str) -> None:
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
    stopwatch.any_rank(False)  # barrier: all ranks have read the memory
    Path(folder, f"{rank}.json").write_text(json.dumps(result))


def products_ms(rank: int, pair: tuple[int, int], groups: Groups) -> dict[str, float]:
    """Measure on the receiving rank: ms of matrix products alone, and with a posted receive whose message is sent after
    them."""
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
            receive_start(word, pair[1], up).wait()  # the message is behind this in the queue
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
    """Time of computation; messages may still be in flight."""
    begin, since = device.Mark(timed=True), time.perf_counter()
    work()
    end = device.Mark(timed=True)
    device.finish_computing()
    return float(begin.event.elapsed_time(end.event)) if begin.event else 1000 * (time.perf_counter() - since)


def main() -> None:
    work, *words = sys.argv[1:]
    works = {"resume": train_with_a_break, "trace": train_traced, "wait": train_looked_at, "overlap": measure_overlap}
    if work == "starve":
        train_until_full(*map(int, words))
    else:
        works[work](*words)


if __name__ == "__main__":
    run_as_rank(main)
