"""The answer of `galvatron fit`: a table with a row for each number of cards, and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table

from ..base.printing import table
from ..cost_model.facts import trained_flops_per_token
from ..plan import ModelShape, plan_to_dict
from ..plan.strategy import Load, Plan, load_summary
from ..planner.fit import MORE_GIB, Fit, FitOptions
from ..profiles.data_sheet import DataSheet
from ..profiles.reserve import GIB_MIB
from .plan import count

DAY_S = 24 * 3600


def rows(found: Sequence[Fit], shape: ModelShape, sheet: DataSheet, options: FitOptions) -> list[dict[str, Any]]:
    """A row a number of cards, for programs."""
    return [
        _row(one, following, shape, sheet, options) for one, following in zip(found, [*found[1:], None], strict=True)
    ]


def summary(found: Sequence[Fit], shape: ModelShape, sheet: DataSheet, options: FitOptions) -> dict[str, Any]:
    """The answer for programs."""
    return {"rows": rows(found, shape, sheet, options), "load": load_summary(_load(shape, options))}


def _load(shape: ModelShape, options: FitOptions) -> Load | None:
    return options.priced.load if shape.experts else None


def _row(one: Fit, following: Fit | None, shape: ModelShape, sheet: DataSheet, options: FitOptions) -> dict[str, Any]:
    speed = one.best.samples_per_s if one.best else None
    tokens_per_s = speed * options.tokens_of_a_sample if speed else None
    flops = trained_flops_per_token(shape, options.tokens_of_a_sample, options.trained)
    peak = sheet.matmul_16bit.value * 1e12 * one.gpus
    later = following.best.samples_per_s if following and following.best else None
    return {
        "gpus": one.gpus,
        "fits": one.best is not None,
        "verdict": one.verdict,
        "step_s": one.best.time_s if one.best else None,
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_gpu": tokens_per_s / one.gpus if tokens_per_s else None,
        "mfu": tokens_per_s * flops / peak if tokens_per_s else None,
        "days": options.tokens / tokens_per_s / DAY_S if tokens_per_s else None,
        "memory_estimate_gib": one.tensors_mib / GIB_MIB,
        "memory_bound_gib": one.bound_mib / GIB_MIB,
        "memory_gib": one.card_gib,
        "binds": one.held.binds if one.held else "no strategy splits batch, heads and cards evenly",
        "plan": plan_to_dict(one.best.plan) if one.best else None,
        "next_gpus": following.gpus if following else None,
        "next_times": later / speed if later and speed else None,
        "more_gib_times": one.with_more / speed if one.with_more and speed else None,
        "more_gib_fits": one.with_more is not None,
    }


def explain(found: Sequence[Fit], shape: ModelShape, sheet: DataSheet, options: FitOptions) -> Iterator[str | Table]:
    """Tables and lines, to be printed one below the other."""
    adapters = f", adapters of rank {options.trained.adapter_rank}" if options.trained.frozen else ""
    card_gib = found[-1].card_gib
    yield (
        f"{shape.name}, {options.task}{adapters}: {options.global_train_batch_size} samples of {options.seq_length} "
        f"tokens a step; {sheet.device}, {card_gib:g} GiB a GPU; days for {options.tokens:.4g} tokens"
    )
    if load := _load(shape, options):
        yield str(load)
    if (spread := sheet.published) and options.profiles is None:
        yield (
            f"published runs on {sheet.device} reach {spread.low:.2g} to {spread.high:.2g} of these speeds "
            f"(8 of 10 of {spread.runs}, any software)"
        )
    told = rows(found, shape, sheet, options)
    speeds = ("tokens/s", "tokens/s/GPU", "MFU", "step, s", "days", "next", f"+{MORE_GIB:g} GiB")
    shown = table("GPUs", *speeds)
    plans = table("GPUs", "verdict", "estimate", "bound", "plan", "bottleneck", left=("verdict", "plan", "bottleneck"))
    for row, one in zip(told, found, strict=True):
        shown.add_row(*_speeds(row))
        memory = row["verdict"], f"{row['memory_estimate_gib']:.1f}", f"{row['memory_bound_gib']:.1f}"
        plans.add_row(str(row["gpus"]), *memory, in_words(one.best.plan) if one.best else "-", row["binds"])
    yield shown
    yield plans
    if found[0].held and not found[0].best and any(one.best for one in found):
        yield f"{found[0].gpus} GPUs: {found[0].held}"
    reserve = found[-1].reserve
    if parts := reserve.told(card_gib * GIB_MIB):
        beside = ", ".join(f"{part.name} {part.mib / GIB_MIB:.2f}" for part in parts)
        yield f"bound: estimate of tensors + {beside} GiB on a full GPU"
        if reserve.working:
            yield f"the allocator may also keep {reserve.working:.0%} of working memory when it is freed"


def _speeds(row: dict[str, Any]) -> list[str]:
    if not row["fits"]:
        return [str(row["gpus"]), *"------", "fits" if row["more_gib_fits"] else "-"]
    return [
        str(row["gpus"]),
        f"{row['tokens_per_s']:,.0f}",
        f"{row['tokens_per_s'] / row['gpus']:,.0f}",
        f"{row['mfu']:.1%}",
        f"{row['step_s']:.3g}",
        f"{row['days']:.3g}",
        f"x{row['next_times']:.2f}" if row["next_times"] else "-",
        f"x{row['more_gib_times']:.2f}" if row["more_gib_times"] else "-",
    ]


def in_words(plan: Plan) -> str:
    """A plan in a few words: what most of its layers do, and how many recompute."""
    most = max(plan.layers, key=plan.layers.count)
    again = sum(bool(layer.recompute) for layer in plan.layers)
    words = [
        f"pp {plan.pipeline}" if plan.pipeline > 1 else "",
        *(f"{axis.words} {degree}" for axis, degree in most.axes if degree > 1),
        f"dp {plan.dp(most)} {most.dp_type}" if plan.dp(most) > 1 else "",
        f"ep {most.ep}" if most.ep > 1 else "",
        f"tp {most.etp} of experts" if most.etp > 1 else "",
        count(plan.micro_batches, "micro-batch", "micro-batches"),
        f"recompute {again} of {len(plan.layers)}" if again else "",
        "mixed" if len({(layer.axes, layer.dp_type, layer.experts) for layer in plan.layers}) > 1 else "",
    ]
    return ", ".join(word for word in words if word)
