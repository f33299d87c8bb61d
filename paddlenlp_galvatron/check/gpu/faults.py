"""Parts that disturb a training: resuming from a checkpoint, a rank out of memory, and traced steps."""

from __future__ import annotations

import json
from collections.abc import Iterator

from ...launch.processes import LaunchError, OutOfMemory, launch
from ...plan import DataParallel, LayerStrategy, Plan, Precision, VocabStrategy, write_plan
from ...plan.strategy import Assumptions
from ...training.settings import TrainSettings
from .findings import Finding, Setting

STRAIGHT, HALVES = "straight", "halves"  # folders of the two runs
STEPS, SEQ = 4, 16
MODEL = {
    "model_type": "qwen2",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 64,
    "max_position_embeddings": SEQ,
}
LATER, PASSES = 3, 4  # the step of a pipeline that is traced, or without memory, and its micro-batches
ROOM_MIB = 100  # left to the rank that runs out of memory: less than its gradients
GPU_TOLERANCE = 1e-3  # of a loss: some of Paddle's GPU kernels add in any order, and training amplifies it


def resume(setting: Setting) -> Iterator[Finding]:
    """Interrupted training, under zero3 and a split vocabulary, ends like training that ran straight through."""
    folder, precision = setting.folder, Precision.BF16 if setting.on_gpus else Precision.FP32
    wide = min(2, setting.ranks)
    plan = Plan(
        setting.ranks,
        2 * setting.ranks,
        2,
        (2,),
        (LayerStrategy(dp_type=DataParallel.ZERO3), LayerStrategy(wide)),
        VocabStrategy(wide),
        assumed=Assumptions(mixed_precision=precision, seq_length=SEQ),
    )
    write_plan(plan, folder / "plan.json")
    (folder / "model.json").write_text(json.dumps(MODEL))
    settings = TrainSettings(
        plan=folder / "plan.json",
        model=str(folder / "model.json"),
        world_size=setting.ranks,
        output_dir=folder,
        max_steps=STEPS,
        report_to=("none",),
        lr_scheduler_type="constant",
    )
    settings.save(folder / "settings.json")
    _launch(setting, "resume", folder / "settings.json")
    straight, halves = (_losses(setting, name) for name in (STRAIGHT, HALVES))
    apart = max(abs(mine - other) for mine, other in zip(straight, halves, strict=False))
    holds = len(straight) == len(halves) == STEPS and apart <= (GPU_TOLERANCE if setting.on_gpus else 0)
    told = f"losses of {len(halves)} of {STEPS} steps differ by {apart:.1e} at most"
    yield setting.found("interrupted and straight", holds, told)


def memory(setting: Setting) -> Iterator[Finding]:
    """A rank that runs out of memory in its first step is named, and ends the others."""
    yield _starved(setting, "a rank without memory", 1)


def later(setting: Setting) -> Iterator[Finding]:
    """Steps of a pipeline in which receives are posted ahead, as they are from the second on: one that is traced, and
    one in which memory ends. Whatever waits for the whole device there waits for a message, too."""
    if setting.ranks == 1:
        yield setting.left_out("a pipeline", "it needs 2 ranks or more")
        return
    name, given_s = f"step {LATER} traced", setting.launch_s
    try:
        _launch(setting, "trace", setting.folder)
    except LaunchError as error:
        yield setting.ended(name, str(error), given_s)
    else:
        events = [json.loads((setting.folder / f"events.{rank}.json").read_text()) for rank in range(setting.ranks)]
        passes = [sum(event["cat"] in ("forward", "backward") for event in own) for own in events]
        yield setting.found(name, set(passes) == {2 * PASSES}, f"passes by rank: {', '.join(map(str, passes))}")
    if setting.left_s <= 0:
        yield setting.no_time(f"memory ends in step {LATER}")
        return
    yield _starved(setting, f"memory ends in step {LATER}", LATER)


def _starved(setting: Setting, name: str, step: int) -> Finding:
    """The last rank runs out of memory in this step."""
    rank, given_s = setting.ranks - 1, setting.launch_s
    try:
        _launch(setting, "starve", rank, ROOM_MIB, step)
    except OutOfMemory as error:
        return setting.found(name, error.rank == rank, str(error))
    except LaunchError as error:
        return setting.ended(name, f"not told as what it is: {error}", given_s)
    return setting.found(name, False, "it trained all the same")


def _launch(setting: Setting, work: str, *words: object) -> None:
    given = [work, *map(str, words)]
    logs = setting.folder / work
    launch(f"{__package__}.faults_worker", given, setting.ranks, logs, setting.launch_s, device=setting.device)


def _losses(setting: Setting, name: str) -> list[float]:
    lines = (setting.folder / name / "train_log.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]
