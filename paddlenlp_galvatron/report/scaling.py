"""A plan on another number of GPUs: which fields changed and why, and its speed and memory before and after."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.table import Table

from ..base.printing import table
from ..base.units import GIB_MIB
from ..plan.strategy import load_summary
from ..planner.scale import Scaled


def printed(of: Scaled) -> Iterator[str | Table]:
    """Lines and a table, to be printed one below the other."""
    columns = ("field", f"{of.before.world_size} GPUs", f"{of.after.world_size} GPUs", "why")
    shown = table(*columns, left=columns)
    for change in of.changes:
        shown.add_row(change.field, change.before, change.after, change.why)
    yield shown
    yield "unchanged: each layer's degrees, ZeRO and recompute, and the samples of a GPU in a micro-batch"
    length, batch, now = of.after.assumed.seq_length, of.before.global_batch, of.after.global_batch
    size = f"{batch * length:,} -> {now * length:,} tokens" if length else f"{batch:,} -> {now:,} samples"
    yield f"a step trains {size} ({now / batch - 1:+.1%})"
    if of.facts:
        before, after = of.facts
        yield (
            f"highest memory of a GPU: {before.memory_mib / GIB_MIB:.2f} -> {after.memory_mib / GIB_MIB:.2f} GiB of "
            f"{after.budget_mib / GIB_MIB:.4g}"
        )
        yield f"step: {before.prediction.time_s:.4g} -> {after.prediction.time_s:.4g} s"
        yield f"speed: {before.speed_words} -> {after.speed_words}"
        gain, gpus = after.prediction.samples_per_s / before.prediction.samples_per_s, of.after.world_size
        yield f"tokens/s of a GPU {gain * of.before.world_size / gpus - 1:+.1%}, of all GPUs {gain - 1:+.1%}"
        if of.hint:
            yield f"hint: {of.hint}"
    else:
        yield f"no time and memory: {of.why_not}"


def summary(of: Scaled) -> dict[str, Any]:
    """The table as JSON values: time in s, memory in MiB, before and after."""
    facts = of.facts or ()
    return {
        "changes": [asdict(change) for change in of.changes],
        "global_bsz": [of.before.global_batch, of.after.global_batch],
        "hint": of.hint or None,
        "time_s": [one.prediction.time_s for one in facts] or None,
        "memory_mib": [one.memory_mib for one in facts] or None,
        "samples_per_s": [one.prediction.samples_per_s for one in facts] or None,
        "load": load_summary(facts[0].cost.load) if facts else None,
    }
