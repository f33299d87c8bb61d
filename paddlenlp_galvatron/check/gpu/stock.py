"""The part that compares with PaddleNLP's own Trainer: the same model, weights and batches, in alternating steps."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from unittest import mock

from ...launch.processes import LaunchError
from ...plan import ModelShape, Plan, plan_to_dict
from ...training.recipe import Recipe
from ..findings import Finding
from .prediction import GPU_MODEL, small_plans
from .setting import Setting

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"  # of a checkout, with replacements for PaddleNLP's GPU-only parts
CPU_MODEL = ModelShape("check", "llama", 2, 256, 704, 8, 8, 2000, 64)
WARM_UP, STEPS = 2, 5
TOLERANCE = 0.03  # of a step's time: two medians of five steps differ by as much


def stock(setting: Setting) -> Iterator[Finding]:
    """Compare our step's time with PaddleNLP's, for plans that it can express."""
    if not BENCHMARKS.exists():
        yield setting.skipped("PaddleNLP's Trainer", "it needs the folder benchmarks of a checkout of this project")
        return
    shape = GPU_MODEL if setting.on_gpus else CPU_MODEL
    plans = small_plans(shape, setting.ranks, setting.on_gpus)
    for name in (name for name in plans if name not in ("recompute", "zero3")):
        if setting.left_s <= 0:
            yield setting.no_time(name)
            continue
        given_s = setting.launch_s
        try:
            yield _compared(setting, name, plans[name], shape)
        except LaunchError as error:
            yield setting.ended(name, str(error), given_s)
    if setting.ranks == 1:
        yield setting.skipped("tensor parallel and two stages", "they need 2 ranks or more")


def _compared(setting: Setting, name: str, plan: Plan, shape: ModelShape) -> Finding:
    folder = setting.folder / name.replace(" ", "-")
    folder.mkdir(parents=True)
    recipe = Recipe(learning_rate=3e-4, weight_decay=0.01, lr_scheduler_type="constant")
    job = {"plan": plan_to_dict(plan), "shape": asdict(shape), "recipe": recipe.model_dump()}
    (folder / "job.json").write_text(json.dumps(job | {"steps": WARM_UP + STEPS}))
    paths = os.pathsep.join(filter(None, [str(BENCHMARKS), os.environ.get("PYTHONPATH")]))
    with mock.patch.dict(os.environ, PYTHONPATH=paths):
        setting.launch("runtime_worker", folder / "job.json", folder / "result.json", logs=folder)
    result = json.loads((folder / "result.json").read_text())
    ours_ms, other_ms = (median(result[side]["steps_ms"][WARM_UP:]) for side in ("ours", "other"))
    losses = zip(result["ours"]["losses"], result["other"]["losses"], strict=True)
    apart = max(abs(ours - other) for ours, other in losses)
    figures = f"{ours_ms:.1f} ms, PaddleNLP {other_ms:.1f} ms: {ours_ms / other_ms:.2f}; losses differ by {apart:.0e}"
    return setting.found(name, ours_ms <= (1 + TOLERANCE) * other_ms if setting.on_gpus else None, figures)
