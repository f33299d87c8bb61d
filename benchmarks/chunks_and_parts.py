"""Step times of interleaved 1F1B and of recompute by parts, predicted beside measured: one small model, real processes.

    python benchmarks/chunks_and_parts.py [--nproc 2,4] [--rounds 5] [--output runs/chunks-and-parts]

Measures this machine and the model, then runs, in rounds, a pipeline with one chunk a stage and with two, and data
parallelism with each choice of what is recomputed. Of a plan's steps the median over the rounds counts. Prints a table
for each number of processes, and how many of the pairs that should differ by more than CLEAR are in the right order.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import median

from validate import BATCH, COMMON, MODELS, SEQ, profile, profile_machine

from paddlenlp_galvatron.base.printing import Console
from paddlenlp_galvatron.base.writing import write_text
from paddlenlp_galvatron.model.layer import PARTS
from paddlenlp_galvatron.plan import Assumptions, LayerStrategy, Plan, Recompute, write_plan
from paddlenlp_galvatron.plan.uniform import even_stages
from paddlenlp_galvatron.validation.accuracy import CLEAR, Outcome
from paddlenlp_galvatron.validation.options import ValidateOptions
from paddlenlp_galvatron.validation.validate import Validation

MODEL, LAYERS = "llama-320", 8  # so many that four stages have two chunks
RECOMPUTED = (Recompute.NONE, *PARTS, PARTS[0] | PARTS[1] | PARTS[2], Recompute.FULL)


def plans(world_size: int) -> dict[str, Plan]:
    """By name."""
    data = Plan(world_size, BATCH, 1, (LAYERS,), (LayerStrategy(),) * LAYERS, assumed=Assumptions(seq_length=SEQ))
    found = {
        f"{world_size} stages, {chunks} chunk{'s' * (chunks > 1)} each": replace(
            data, micro_batches=BATCH // 2, stages=even_stages(LAYERS, world_size * chunks), chunks=chunks
        )
        for chunks in (1, 2)
    }
    for recompute in RECOMPUTED:
        found[f"recompute {recompute.words}"] = replace(data, layers=(LayerStrategy(recompute=recompute),) * LAYERS)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", default="2,4", help="numbers of processes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("runs/chunks-and-parts"))
    given = parser.parse_args()
    for nproc in map(int, given.nproc.split(",")):
        _compare(given.output / str(nproc), nproc, given.rounds)


def _compare(output: Path, nproc: int, rounds: int) -> None:
    model = output / "model"
    config = COMMON | MODELS[MODEL] | {"num_hidden_layers": LAYERS}
    write_text(model / "config.json", json.dumps(config, indent=1) + "\n")
    profile_machine(output, nproc)
    profile(model, output, nproc)
    named = plans(nproc)
    files = {name: output / "plans" / f"{name}.json" for name in named}
    for name, plan in named.items():
        write_plan(plan, files[name])
    options = ValidateOptions(
        model_size=str(model),
        profiles=output / "profiles",
        output=output,
        nproc=nproc,
        count=0,
        plans=tuple(files.values()),
        global_train_batch_size=BATCH,
        fresh=True,
    )
    found: dict[str, list[Outcome]] = defaultdict(list)
    for _ in range(rounds):
        validation = Validation(options)
        validation.run()
        for name, outcome in zip(named, validation.accuracy().outcomes, strict=True):
            found[name].append(outcome)
    _show(found, nproc)


def _show(found: dict[str, list[Outcome]], nproc: int) -> None:
    console = Console(soft_wrap=True)
    console.print(f"\n| {nproc} processes | predicted ms | measured ms | lowest - highest | error |")
    console.print("|---|---|---|---|---|")
    times = {}
    for name, outcomes in found.items():
        steps = [1000 * one.measured_s for one in outcomes]
        times[name] = predicted, measured = 1000 * outcomes[0].predicted_s, median(steps)
        error = predicted / measured - 1
        console.print(
            f"| {name} | {predicted:.1f} | {measured:.1f} | {min(steps):.1f} - {max(steps):.1f} | {error:+.1%} |"
        )
    clear, wrong = 0, []
    for (one, first), (other, second) in combinations(times.items(), 2):
        if abs(first[0] - second[0]) > CLEAR * min(first[0], second[0]):
            clear += 1
            if (first[0] < second[0]) != (first[1] < second[1]):
                wrong.append(f"{one} / {other}")
    console.print(
        f"\n{clear - len(wrong)} of {clear} pairs that differ by more than {CLEAR:.0%} are in the right order."
    )
    if wrong:
        console.print(f"Wrong: {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
