"""Predictions held against real steps: two families, three sizes, processes pinned one to a core. `make validate`.

    python benchmarks/validate.py [--minutes 19] [--seed 0] [--count 22] [--budgets 3] [--output runs/validate]

Measures this machine and each model, runs plans drawn across the space and, at several memory budgets, the searched
plan beside its rivals, and prints predicted beside measured. The same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from paddlenlp_galvatron.base.printing import Console
from paddlenlp_galvatron.base.writing import write_text
from paddlenlp_galvatron.cli.profile import profile_hardware, profile_model
from paddlenlp_galvatron.options.model_options import ModelOptions
from paddlenlp_galvatron.profiler.options import HardwareOptions, PointOptions, ProfileMode
from paddlenlp_galvatron.validation.accuracy import Accuracy
from paddlenlp_galvatron.validation.options import ValidateOptions
from paddlenlp_galvatron.validation.page import render
from paddlenlp_galvatron.validation.validate import Validation
from paddlenlp_galvatron.validation.words import as_json, summary_lines, tables

RANKS, SEQ, BATCH = 2, 128, 8
HARDWARE_S, MODEL_S = 120, 70  # after which profiles are brief
COMMON: dict[str, Any] = {
    "vocab_size": 2048,
    "max_position_embeddings": SEQ,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama-128": {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
    "qwen2-192": {
        "model_type": "qwen2",
        "num_hidden_layers": 6,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "llama-320": {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 320,
        "intermediate_size": 864,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=19)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=22, help="plans drawn for each model")
    parser.add_argument("--budgets", type=int, default=3, help="contests of each model")
    parser.add_argument("--nproc", type=int, default=RANKS)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--output", type=Path, default=Path("runs/validate"))
    given = parser.parse_args()
    began, console = time.monotonic(), Console(soft_wrap=True)
    names = given.models.split(",")
    profile_machine(given.output, given.nproc)
    found: list[Accuracy] = []
    for number, name in enumerate(names):
        left_s = 60 * given.minutes - (time.monotonic() - began)
        share_s = left_s / (len(names) - number)
        started = time.monotonic()
        profile(_folder(name, given.output) / "model", given.output, given.nproc)
        spent_s = time.monotonic() - started
        console.print(f"\n{name}: {given.nproc} ranks, profiled in {spent_s:.0f} s")
        found.append(_validate(name, given, max((share_s - spent_s) / 60, 0.1), console))
    together = Accuracy(
        [one for accuracy in found for one in accuracy.outcomes],
        [one for accuracy in found for one in accuracy.verdicts],
    )
    console.print(f"\nall models, {time.monotonic() - began:.0f} s")
    for line in list(summary_lines(together))[1:]:
        console.print(line.partition("; Kendall")[0])
    console.print("tau          " + ", ".join(f"{n} {a.tau or 0:.2f}" for n, a in zip(names, found, strict=True)))
    if together.verdicts:
        console.print(
            f"contests     {len(together.verdicts)}, {sum(one.layer_wise for one in together.verdicts)} layer-wise; "
            f"worst regret {max(one.regret for one in together.verdicts):.1%}; "
            f"beaten by uniform {sum(bool(one.beaten_by) for one in together.verdicts)}; "
            f"over the budget {sum(len(one.over_budget) for one in together.verdicts)} of "
            f"{sum(one.plans for one in together.verdicts)}"
        )
    write_text(given.output / "all.json", json.dumps(as_json(together), indent=1) + "\n")


def _folder(name: str, output: Path) -> Path:
    folder = output / name
    write_text(folder / "model" / "config.json", json.dumps(COMMON | MODELS[name], indent=1) + "\n")
    return folder


def profile_machine(output: Path, nproc: int) -> None:
    profile_hardware(HardwareOptions(output=output / "profiles", nproc=nproc, end_mb=8, time_budget_s=HARDWARE_S))


def profile(model: Path, output: Path, nproc: int) -> None:
    """Beside the hardware's files: a model's bear its width, and these differ."""
    options = PointOptions(
        output=output / "profiles",
        nproc=nproc,
        profile_mode=ProfileMode.BATCH,
        profile_max_batch_size=BATCH,
        max_tp_deg=nproc,
        sequence_parallel=True,
        time_budget_s=MODEL_S,
    )
    profile_model(options, ModelOptions(model_size=str(model), seq_length=SEQ))


def _validate(name: str, given: argparse.Namespace, minutes: float, console: Console) -> Accuracy:
    folder = _folder(name, given.output)
    options = ValidateOptions(
        model_size=str(folder / "model"),
        profiles=given.output / "profiles",
        output=folder,
        nproc=given.nproc,
        count=given.count,
        seed=given.seed,
        budgets=given.budgets,
        global_train_batch_size=BATCH,
        minutes=minutes,
    )
    validation = Validation(options)
    validation.run()
    accuracy = validation.accuracy()
    write_text(folder / "validation.json", json.dumps(as_json(accuracy), indent=1) + "\n")
    write_text(folder / "validation.html", render(accuracy, name, options))
    for item in [*tables(accuracy), validation.disturbance.words]:
        console.print(item)
    return accuracy


if __name__ == "__main__":
    main()
