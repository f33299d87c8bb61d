"""The difference between two plans: fields, layers, and predicted time and memory by term.

A plan on another number of GPUs also has the reason why each field changed.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from rich.table import Table

from ..base import GIB_MIB, gib
from ..base.printing import table
from ..cost_model.facts import MEMORY, TIME, PlanFacts, strategy_words
from ..plan import Plan, load_summary, runs
from ..planner.scale import Scaled


def fields(plan: Plan) -> dict[str, str]:
    """A plan's fields besides its layers, in words."""
    assumed = plan.assumed
    return {
        "model": str((plan.metadata.get("searched_from") or {}).get("model", "not in the file")),
        "ranks": str(plan.world_size),
        "stages": str(plan.pipeline),
        "layers of each": ", ".join(f"{count}" for count in plan.stages),
        "schedule": plan.schedule_words,
        "batch": str(plan.global_batch),
        "micro-batches": str(plan.micro_batches),
        "embedding, LM head": strategy_words(plan.vocab),
        "precision": str(assumed.mixed_precision),
        "tokens": str(assumed.seq_length),
        "Megatron-SP": "on" if assumed.sequence_parallel else "off",
        "gradients reduced": "every step" if assumed.async_grad_reduce else "every micro-batch",
        "gradients summed in fp32": _switch(assumed.fp32_gradients),
        "flash attention": _switch(assumed.flash_attention),
        "optimizer offloaded": _switch(bool(assumed.offload_optimizer)),
        "data parallel by default": str(plan.default_dp_type),
    }


def _switch(value: bool | None) -> str:
    return "left to training" if value is None else "on" if value else "off"


def differing_fields(a: Plan, b: Plan) -> dict[str, tuple[str, str]]:
    first, second = fields(a), fields(b)
    return {name: (first[name], second[name]) for name in first if first[name] != second[name]}


def differing_layers(a: Plan, b: Plan) -> list[tuple[str, str, str]]:
    """Layers whose strategy or stage differs, in runs: their numbers, and the values in each plan."""
    ours, theirs = _placed(a), _placed(b)
    count = max(len(ours), len(theirs))
    pairs = [
        (ours[layer] if layer < len(ours) else "none", theirs[layer] if layer < len(theirs) else "none")
        for layer in range(count)
    ]
    differ = [(run, pair) for run, pair in runs(pairs) if pair[0] != pair[1]]
    return [(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}", *pair) for run, pair in differ]


def _placed(plan: Plan) -> list[str]:
    """Stage and strategy of every layer."""
    stages = {layer: stage for stage in range(plan.pipeline) for layer in plan.stage_layers(stage)}
    return [f"stage {stages[number]}: {strategy_words(layer)}" for number, layer in enumerate(plan.layers)]


def printed(a: Plan, b: Plan, facts: tuple[PlanFacts, PlanFacts] | None) -> Iterator[str | Table]:
    """Lines and tables, to be printed one below the other."""
    changed, layers = differing_fields(a, b), differing_layers(a, b)
    if not changed and not layers:
        yield "the plans say the same"
    if changed:
        shown = table("field", "first", "second", left=("first", "second"))
        for name, pair in changed.items():
            shown.add_row(name, *pair)
        yield shown
    if layers:
        shown = table("layers", "first", "second", left=("first", "second"))
        for row in layers:
            shown.add_row(*row)
        yield shown
    if facts:
        speed_before, other = (each.tokens_per_s for each in facts)
        if speed_before and other:
            each = [speed / plan.world_size for speed, plan in ((speed_before, a), (other, b))]
            ranks = "" if a.world_size == b.world_size else f"; a rank {each[0]:,.0f} against {each[1]:,.0f}"
            yield f"\n{speed_before:,.0f} tokens/s against {other:,.0f} ({other / speed_before - 1:+.1%}){ranks}"
        yield from (str(load) for load in dict.fromkeys(each.cost.load for each in facts) if load)
        same = a.global_batch == b.global_batch
        first, second = (
            {key: ms / (1 if same else each.plan.global_batch) for key, ms in each.mean_time_ms.items()}
            for each in facts
        )
        batches = f", as the batches differ: {a.global_batch} against {b.global_batch}"
        yield f"\na {'step' if same else 'sample'}, ms, averaged over stages{'' if same else batches}"
        yield _terms(first, second, TIME)
        yield "\nmemory of a device, GiB, on the stage that needs most"
        yield _terms(_memory_mib(facts[0]), _memory_mib(facts[1]), MEMORY, gib)


def _memory_mib(facts: PlanFacts) -> dict[str, float]:
    """Memory terms of the stage with the highest peak."""
    return {key: mib for key, mib in facts.stages[facts.fullest].memory_mib.items() if key != "free"}


def summary(a: Plan, b: Plan, facts: tuple[PlanFacts, PlanFacts] | None) -> dict[str, Any]:
    """The difference as JSON values."""
    return {
        "fields": {name: list(pair) for name, pair in differing_fields(a, b).items()},
        "layers": [
            {"layers": name, "first": first, "second": second} for name, first, second in differing_layers(a, b)
        ],
        "time_ms": [each.mean_time_ms for each in facts] if facts else None,
        "memory_mib": [_memory_mib(each) for each in facts] if facts else None,
        "tokens_per_s": [each.tokens_per_s for each in facts] if facts else None,
        "load": [load_summary(each.cost.load) for each in facts] if facts else None,
    }


def _terms(
    first: dict[str, float],
    second: dict[str, float],
    names: dict[str, str],
    words: Callable[[float], str] = "{:.1f}".format,
) -> Table:
    made = table("", "first", "second", "")

    def row(name: str, before_change: float, other: float) -> None:
        more = words(other - before_change)
        made.add_row(name, words(before_change), words(other), more if more.startswith("-") else f"+{more}")

    for key, name in names.items():
        if first.get(key) or second.get(key):
            row(name, first[key], second[key])
    row("all", sum(first.values()), sum(second.values()))
    return made


def printed_scaled(of: Scaled) -> Iterator[str | Table]:
    """Lines and a table, to be printed one below the other."""
    columns = ("field", f"{of.before.world_size} GPUs", f"{of.after.world_size} GPUs", "why")
    shown = table(*columns, left=columns)
    for change in of.changes:
        shown.add_row(change.field, change.before, change.after, change.why)
    yield shown
    kept = "degrees and ZeRO" if of.before.recomputed != of.after.recomputed else "degrees, ZeRO and recompute"
    yield f"unchanged: each layer's {kept}, and the samples of a GPU in a micro-batch"
    length, batch, now = of.after.assumed.seq_length, of.before.global_batch, of.after.global_batch
    size = f"{batch * length:,} -> {now * length:,} tokens" if length else f"{batch:,} -> {now:,} samples"
    yield f"a step trains {size} ({now / batch - 1:+.1%})"
    if of.facts:
        old, new = of.facts
        yield (
            f"highest memory of a GPU: {old.memory_mib / GIB_MIB:.2f} -> {new.memory_mib / GIB_MIB:.2f} GiB of "
            f"{new.budget_mib / GIB_MIB:.4g}"
        )
        yield f"step: {old.prediction.time_s:.4g} -> {new.prediction.time_s:.4g} s"
        yield f"speed: {old.speed_words} -> {new.speed_words}"
        gain, gpus = new.prediction.samples_per_s / old.prediction.samples_per_s, of.after.world_size
        yield f"tokens/s of a GPU {gain * of.before.world_size / gpus - 1:+.1%}, of all GPUs {gain - 1:+.1%}"
        if of.hint:
            yield f"hint: {of.hint}"
    else:
        yield f"no time and memory: {of.why_not}"


def scaled_summary(of: Scaled) -> dict[str, Any]:
    """The table as JSON values: time in s, memory in MiB, before and after."""
    facts = of.facts or ()
    return {
        "changes": [asdict(change) for change in of.changes],
        "global_bsz": [of.before.global_batch, of.after.global_batch],
        "hint": of.hint or None,
        "time_s": [fact.prediction.time_s for fact in facts] or None,
        "memory_mib": [fact.memory_mib for fact in facts] or None,
        "samples_per_s": [fact.prediction.samples_per_s for fact in facts] or None,
        "load": load_summary(facts[0].cost.load) if facts else None,
    }
