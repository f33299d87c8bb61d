"""Out of memory: what the plan predicts beside what the ranks had reached, and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..plan import DataParallel, Plan, Recompute
from .prediction import Predicted, stage_peaks_mib

GB_MIB = 1024  # memory_constraint counts in these
MARGIN = 0.9  # of what is known not to do: the next budget


def out_of_memory_report(
    plan: Plan, records: Sequence[Mapping[str, Any]], rank: int, peak_mib: float | None = None
) -> Group:
    """Predicted beside measured memory of each stage, and advice, to be printed.

    `records`: the lines of train_log.jsonl. `rank` ran out and had held `peak_mib` MiB, if it could say.
    """
    predicted, stage = Predicted.of(plan), rank // plan.stage_size
    reached = dict(enumerate(stage_peaks_mib(plan, records))) if records else {}
    if peak_mib is not None:
        reached[stage] = max(peak_mib, reached.get(stage, 0.0))
    table = Table(box=None, pad_edge=False)
    for column in ("stage", "predicted MiB", "measured MiB", ""):
        table.add_column(column, justify="right" if column else "left")
    for each in range(plan.pipeline):
        guess = f"{predicted.memory_mib[each]:.0f}" if predicted.memory_mib else "not in the plan"
        truth = f"{reached[each]:.0f}" if each in reached else "no step done"
        table.add_row(str(each), guess, truth, f"rank {rank} wanted more" if each == stage else "")
    return Group(table, *(Text(line) for line in _advice(plan, predicted, stage, reached.get(stage))))


def _advice(plan: Plan, predicted: Predicted, stage: int, reached_mib: float | None) -> Iterator[str]:
    guess_mib = predicted.memory_mib[stage] if predicted.memory_mib else None
    known_mib = [mib for mib in (guess_mib, reached_mib) if mib]
    if known_mib:
        budget = MARGIN * (min(known_mib) + predicted.reserve_mib) / GB_MIB
        searched = (plan.metadata.get("searched_from") or {}).get("memory_constraint_gb")
        instead = f" instead of {searched:g}" if searched else ""
        yield f"search again with less memory: galvatron search --memory_constraint {budget:.3g}{instead}"
    if guess_mib and reached_mib and reached_mib > guess_mib:
        yield "the prediction is too low; measure again first: galvatron profile memory"
    layers = [plan.layers[layer] for layer in plan.stage_layers(stage)]
    if kept := sum(layer.recompute is not Recompute.FULL for layer in layers):
        yield (
            f"or let more layers of stage {stage} recompute (checkpoint): {kept} of its {len(layers)} keep activations"
        )
    if any(layer.dp_type is not DataParallel.ZERO3 and plan.stage_size > layer.tp for layer in layers):
        yield f"or shard their weights as well (dp_types_enc 1: zero3), or give stage {stage} fewer layers"
