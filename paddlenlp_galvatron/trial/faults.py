"""Parts that interrupt a training: going on from a checkpoint, and a rank without memory."""

from __future__ import annotations

import json
from collections.abc import Iterator

from ..launch.processes import LaunchError, OutOfMemory, launch
from ..plan import DataParallel, LayerStrategy, Plan, Precision, VocabStrategy, write_plan
from ..plan.strategy import Assumptions
from ..training.recipe import Recipe
from ..training.settings import TrainSettings
from .findings import TrialFinding, TrialSetting

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
ROOM_MIB = 100  # that the rank without memory may still take: less than its gradients
GPU_TOLERANCE = 1e-3  # of a loss: some of Paddle's GPU kernels add in any order, and training amplifies it


def resume(setting: TrialSetting) -> Iterator[TrialFinding]:
    """Training that is interrupted, under zero3 and a split vocabulary, ends as one that ran straight through."""
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
        recipe=Recipe(lr_scheduler_type="constant"),
    )
    settings.save(folder / "settings.json")
    words = [str(folder / "settings.json")]
    _launch(setting, "resume_worker", words)
    straight, halves = (_losses(setting, name) for name in (STRAIGHT, HALVES))
    apart = max(abs(mine - other) for mine, other in zip(straight, halves, strict=False))
    holds = len(straight) == len(halves) == STEPS and apart <= (GPU_TOLERANCE if setting.on_gpus else 0)
    told = f"losses of {len(halves)} of {STEPS} steps differ by {apart:.1e} at most"
    yield setting.found("interrupted and straight", holds, told)


def memory(setting: TrialSetting) -> Iterator[TrialFinding]:
    """A rank that runs out of memory in a step is named, and ends the others."""
    rank, name = setting.ranks - 1, "a rank without memory"
    try:
        _launch(setting, "starved_worker", [str(rank), str(ROOM_MIB)])
    except OutOfMemory as error:
        yield setting.found(name, error.rank == rank, str(error))
    except LaunchError as error:
        yield setting.found(name, False, f"not told as what it is: {error}")
    else:
        yield setting.found(name, False, "it trained all the same")


def _launch(setting: TrialSetting, worker: str, words: list[str]) -> None:
    logs = setting.folder / worker
    launch(f"{__package__}.{worker}", words, setting.ranks, logs, setting.launch_s, device=setting.device)


def _losses(setting: TrialSetting, name: str) -> list[float]:
    lines = (setting.folder / name / "train_log.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]
