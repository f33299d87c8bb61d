"""Predictions held against real steps: two families, three sizes, processes pinned one to a core. `make validate`.

    python benchmarks/validate.py [--minutes 19] [--seed 0] [--count 20] [--budgets 3] [--output runs/validate]

Measures this machine and each model, runs plans drawn across the space and, at several memory budgets, the searched
plan against its rivals, and prints predicted and measured. The same command continues where it stopped.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from paddlenlp_galvatron.base.printing import Console
from paddlenlp_galvatron.base.writing import write_text
from paddlenlp_galvatron.check.validation.accuracy import Accuracy
from paddlenlp_galvatron.check.validation.options import ValidateOptions
from paddlenlp_galvatron.check.validation.results import accuracy_json, accuracy_tables, page, summary_lines
from paddlenlp_galvatron.check.validation.validate import Validation
from paddlenlp_galvatron.cli.profile import profile_hardware, profile_model
from paddlenlp_galvatron.measure.options import HardwareOptions, PointOptions, ProfileMode
from paddlenlp_galvatron.options.model_options import ModelOptions

RANKS, SEQ, BATCH, MOST_MIB = 2, 64, 8, 8
# A host is slower or faster for minutes. So profiles and plans take turns; the quick part of a
# plan's steps and of a number's turns counts.
TAKES = 3
HARDWARE_TURNS, MODEL_TURNS = 2, 1  # turns that a take adds
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
    "llama-256": {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=19)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20, help="plans drawn for each model")
    parser.add_argument(
        "--budgets", type=int, default=3, help="budgets of each model at which the searched plan meets its rivals"
    )
    parser.add_argument("--nproc", type=int, default=RANKS)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--output", type=Path, default=Path("runs/validate"))
    given = parser.parse_args()
    began, console = time.monotonic(), Console(soft_wrap=True)
    names = given.models.split(",")

    def left_min() -> float:
        return max(given.minutes - (time.monotonic() - began) / 60, 0.1)

    for take in range(1, TAKES):
        _profile(names, given, take, console)
        for name in names:
            _validation(name, given, left_min(), visits=take, budgets=0).run()
    _profile(names, given, TAKES, console)
    found = [_validate(name, given, left_min() / (len(names) - number), console) for number, name in enumerate(names)]
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
    write_text(given.output / "all.json", json.dumps(accuracy_json(together), indent=1) + "\n")


def _profile(names: list[str], given: argparse.Namespace, take: int, console: Console) -> None:
    """Measure every number once more; the models' with the machine's, as their files bear their widths."""
    started, profiles = time.monotonic(), given.output / "profiles"
    hardware = HARDWARE_TURNS * take
    profile_hardware(HardwareOptions(output=profiles, nproc=given.nproc, end_mb=MOST_MIB, turns=hardware))
    for name in names:
        config = given.output / name / "model" / "config.json"
        write_text(config, json.dumps(COMMON | MODELS[name], indent=1) + "\n")
        options = PointOptions(
            output=profiles,
            nproc=given.nproc,
            profile_mode=ProfileMode.BATCH,
            profile_max_batch_size=BATCH,
            max_tp_deg=given.nproc,
            sequence_parallel=True,
            turns=MODEL_TURNS * take,
        )
        profile_model(options, ModelOptions(model_size=str(config), seq_length=SEQ))
    console.print(f"profiled, {time.monotonic() - started:.0f} s")


def _validation(name: str, given: argparse.Namespace, minutes: float, visits: int, budgets: int) -> Validation:
    folder = given.output / name
    return Validation(
        ValidateOptions(
            model_size=str(folder / "model"),
            profiles=given.output / "profiles",
            output=folder,
            nproc=given.nproc,
            count=given.count,
            seed=given.seed,
            budgets=budgets,
            global_train_batch_size=BATCH,
            visits=visits,
            minutes=minutes,
        )
    )


def _validate(name: str, given: argparse.Namespace, minutes: float, console: Console) -> Accuracy:
    validation = _validation(name, given, minutes, TAKES, given.budgets)
    validation.run()
    accuracy, folder = validation.accuracy(), given.output / name
    write_text(folder / "validation.json", json.dumps(accuracy_json(accuracy), indent=1) + "\n")
    write_text(folder / "validation.html", page(accuracy, name, validation.options))
    console.print(f"\n{name}: {given.nproc} ranks")
    for item in accuracy_tables(accuracy):
        console.print(item)
    return accuracy


if __name__ == "__main__":
    main()
