"""The part that compares Paddle's GPU kernels with plain operations, in the sizes of real layers."""

from __future__ import annotations

import json
from collections.abc import Iterator

from ...launch.processes import LaunchError, launch
from .findings import Finding, Setting, in_turn

NAMES = (
    "flash attention, causal, 4 heads a kv head",
    "flashmask, first of 2 context ranks",
    "flashmask, second of 2 context ranks",
    "rotary positions",
    "RMSNorm",
    "SwiGLU",
    "linear with bias",
    "embedding, half of the tokens alike",
    "AdamW, two steps",
)
TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-4}  # of the largest number of a result: a few roundings of the type


def kernels(setting: Setting) -> Iterator[Finding]:
    """Compare result and gradients of each kernel with those of plain fp32 operations on the same device."""
    return in_turn(setting, NAMES, lambda first, launches: _launched(setting, first, launches))


def _launched(setting: Setting, first: int, launches: int) -> tuple[list[Finding], str]:
    folder = setting.folder / f"{launches}"
    folder.mkdir(parents=True)
    fault = ""
    try:
        words = [str(folder), f"{first}"]
        launch(f"{__package__}.kernels_worker", words, 1, folder, setting.launch_s, device=setting.device)
    except LaunchError as error:
        fault = str(error)
    done: list[Finding] = []
    for number in range(first, len(NAMES)):
        path = folder / f"{number}.json"
        if not path.exists():
            break
        done.append(_judged(setting, NAMES[number], json.loads(path.read_text())))
    return done, fault or ("" if first + len(done) == len(NAMES) else "it left no result")


def _judged(setting: Setting, name: str, result: dict[str, str | float]) -> Finding:
    if "missing" in result:
        return setting.left_out(name, f"Paddle has it on GPUs alone: {result['missing']}")
    off, tolerance = float(result["off"]), TOLERANCE[str(result["type"])]
    return setting.found(name, off <= tolerance, f"{result['worst']} off by {off:.1e} of {tolerance:.0e}")
