"""The answers of `galvatron fit` (a table with a row per number of GPUs, the recommended numbers, and JSON) and of
`galvatron plan spare` (the cost of each lost node)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from ..base.printing import table
from ..base.text import count, large, plain
from ..base.units import GIB_MIB
from ..plan import Load, ModelShape, Plan, load_summary, plan_to_dict
from ..planner.fit import MORE_GIB, TOKENS, Fit, FitOptions
from ..planner.hints import Hint
from ..planner.spare import Spare
from ..planner.whole_run import ENDLESS
from ..profiles.data_sheet import Device, load_data_sheet
from .plan import assumed, assumed_summary
from .search import hint_line


def whole_runs(fits: Sequence[Fit], options: FitOptions) -> Iterator[str]:
    """The whole training of each row with failures, or a note that failures are not included."""
    if not options.mtbf_hours:
        yield "days are those without failures; --mtbf_hours and --save_gb_per_s add these"
    for fit in fits if options.mtbf_hours else ():
        if fit.best:
            device = f"{fit.device.name}, " * (len(options.device or ()) > 1)
            yield f"{device}{fit.gpus} GPUs: {fit.job(options).run or ENDLESS}"


def recommendations(rows: Sequence[Mapping[str, Any]], options: FitOptions) -> list[dict[str, Any]]:
    """The cheapest row, the fastest, and the smallest number of GPUs within the given limits, for programs."""
    able = [row for row in rows if row["fits"] and not row["endless"]]
    if not able or (options.gpus and len(rows) == 1 and not (options.days or options.budget)):
        return []

    def days(row: Mapping[str, Any]) -> float:
        return float(row["run"]["days"] if row["run"] else row["days"])

    def cost(row: Mapping[str, Any]) -> float:
        """In the currency of the prices, or GPU-days."""
        return float(row["cost"] or days(row) * row["gpus"])

    chosen = {"fastest": min(able, key=days)}
    if options.price_per_gpu_hour or len({row["device"] for row in able}) == 1:  # devices without prices are not ranked
        chosen = {"cheapest": min(able, key=cost)} | chosen
    if limits := _limits(options):
        inside = [row for row in able if days(row) <= (options.days or inf) and cost(row) <= (options.budget or inf)]
        chosen[f"fewest within {limits}"] = min(inside, key=lambda row: (row["gpus"], cost(row)), default={})
    names = ("device", "gpus", "cost", "energy_mwh")
    return [
        {"why": why, "days": days(row) if row else None, **{name: row.get(name) for name in names}}
        for why, row in chosen.items()
    ]


def recommended_lines(chosen: Sequence[Mapping[str, Any]], options: FitOptions) -> Iterator[str]:
    """A line each."""
    for row in chosen:
        if row["gpus"] is None:
            yield f"{row['why']}: none of these; name larger numbers: --gpus"
            continue
        where = f"{row['gpus']} GPUs" + f" of {row['device']}" * (len(options.device or ()) > 1)
        price = f"cost {row['cost']:,.0f}" if row["cost"] else f"{plain(row['gpus'] * row['days'])} GPU-days"
        energy = f", at most {plain(row['energy_mwh'])} MWh" if row["energy_mwh"] else ""
        yield f"{row['why']}: {where}, {plain(row['days'])} days, {price}{energy}"


def _limits(options: FitOptions) -> str:
    days = f"{plain(options.days)} days" if options.days else ""
    return " and ".join(filter(None, (days, f"cost {options.budget:,.0f}" if options.budget else "")))


def rows(fits: Sequence[Fit], shape: ModelShape, options: FitOptions) -> list[dict[str, Any]]:
    """A row a number of GPUs, for programs."""
    return [_row(fit, later, shape, options) for fit, later in zip(fits, [*fits[1:], None], strict=True)]


def summary(fits: Sequence[Fit], shape: ModelShape, options: FitOptions, hints: Sequence[Hint]) -> dict[str, Any]:
    """The answer for programs."""
    records = rows(fits, shape, options)
    assumptions = assumed_summary(fits[-1].question.assumptions)
    extras = {"recommended": recommendations(records, options), "hints": [hint.summary() for hint in hints]}
    return {"rows": records, "load": load_summary(_load(shape, options)), **assumptions, **extras}


def _load(shape: ModelShape, options: FitOptions) -> Load | None:
    return options.cost_options.load if shape.experts else None


def _row(fit: Fit, following: Fit | None, shape: ModelShape, options: FitOptions) -> dict[str, Any]:
    speed = fit.best.samples_per_s if fit.best else None
    tokens_per_s = speed * options.tokens_of_a_sample if speed else None
    if following and following.device != fit.device:
        following = None
    later = following.best.samples_per_s if following and following.best else None
    task = options.trained
    job = fit.job(options)
    mfu = (
        fit.device.mfu(tokens_per_s, fit.best.plan, shape, task.frozen, task.document_tokens)
        if fit.best and tokens_per_s
        else None
    )
    return {
        "device": fit.device.name,
        "gpus": fit.gpus,
        "fits": fit.best is not None,
        "verdict": fit.verdict,
        "step_s": fit.best.time_s if fit.best else None,
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_gpu": tokens_per_s / fit.gpus if tokens_per_s else None,
        "mfu": mfu,
        **asdict(job),
        "memory_estimate_gib": fit.tensors_mib / GIB_MIB,
        "memory_bound_gib": fit.bound_mib / GIB_MIB,
        "memory_gib": fit.gpu_gib,
        "binds": fit.held.binds if fit.held else "no strategy splits batch, heads and GPUs evenly",
        "plan": plan_to_dict(fit.best.plan) if fit.best else None,
        "next_gpus": following.gpus if following else None,
        "next_times": later / speed if later and speed else None,
        "more_gib_times": fit.with_more / speed if fit.with_more and speed else None,
        "more_gib_fits": fit.with_more is not None,
    }


def explain(
    fits: Sequence[Fit], shape: ModelShape, options: FitOptions, hints: Sequence[Hint]
) -> Iterator[str | Table]:
    """Tables and lines, to be printed one below the other."""
    yield from heading(fits, shape, options)
    yield speeds(fits, None, shape, options)
    yield from memory(fits, shape, options)
    yield from hint_lines(fits, hints)


def heading(fits: Sequence[Fit], shape: ModelShape, options: FitOptions) -> Iterator[str]:
    """The task, the devices, and the speed range of published runs."""
    adapters = f", adapters of rank {options.trained.adapter_rank}" if options.trained.frozen else ""
    devices = _by_device(fits)
    kinds = "; ".join(f"{device.name or 'a device'}, {row[0].gpu_gib:.4g} GiB a GPU" for device, row in devices.items())
    tokens = f"{options.num_train_epochs:g} x " * (options.num_train_epochs != 1) + large(options.tokens or TOKENS)
    yield (
        f"{shape.name}, {options.task}{adapters}: {options.global_train_batch_size} samples of {options.seq_length} "
        f"tokens a step; {kinds}; days for {tokens} tokens"
    )
    if load := _load(shape, options):
        yield str(load)
    yield from options.trained.notes(bool(shape.experts))
    kind: Literal["dense", "MoE"] = "MoE" if shape.experts else "dense"
    for row in devices.values():
        yield assumed(row[-1].question.assumptions)
        sheet = row[0].question.options.device
        spread = load_data_sheet(sheet).published.get(kind) if sheet and not options.products else None
        if spread:
            yield (
                f"published runs of {kind} models on {row[0].device.name} reach {spread.low:.2g} to {spread.high:.2g} "
                f"of these speeds (8 of 10 of {spread.runs}, any software)"
            )


def speeds(fits: Sequence[Fit], previous: Fit | None, shape: ModelShape, options: FitOptions) -> Table:
    """A row per number of GPUs, in columns of fixed width; without column names after a `previous` row."""
    several = len(_by_device(fits)) > 1
    first = ("device", "GPUs") if several else ("GPUs",)
    columns = SPEEDS | ({"cost": _money} if options.price_per_gpu_hour else {}) | ({} if several else COMPARISONS)
    shown = table(*first, *columns, left=("device",))
    shown.show_header = previous is None
    for column in shown.columns:
        column.min_width = max(len(str(column.header)), WIDTHS.get(str(column.header), 5))
    for fit in fits:
        row = _row(fit, None, shape, options)
        last = previous and previous.best
        row["times"] = fit.best.samples_per_s / last.samples_per_s if last and fit.best else None
        begins = (str(row[name.lower()] or "a device") for name in first)
        shown.add_row(*begins, *(make(row) for make in columns.values()))
        previous = fit
    return shown


def memory(fits: Sequence[Fit], shape: ModelShape, options: FitOptions) -> Iterator[str | Table]:
    """Verdict, memory and plan of each row, and the parts of the bound besides tensors."""
    devices = _by_device(fits)
    several = len(devices) > 1
    first = ("device", "GPUs") if several else ("GPUs",)
    texts = ("device", "verdict", "plan", "bottleneck")
    plans = table(*first, "verdict", "estimate", "bound", "plan", "bottleneck", left=texts)
    for fit in fits:
        where = [fit.device.name or "a device"] * several + [str(fit.gpus)]
        row = _row(fit, None, shape, options)
        numbers = f"{row['memory_estimate_gib']:.1f}", f"{row['memory_bound_gib']:.1f}"
        plans.add_row(*where, fit.verdict, *numbers, in_words(fit.best.plan) if fit.best else "-", row["binds"])
    yield plans
    for of_device in devices.values():
        name = f"{of_device[0].device.name}: " * several
        if of_device[0].held and not of_device[0].best and any(fit.best for fit in of_device):
            yield f"{name}{of_device[0].gpus} GPUs: {of_device[0].held}"
        if parts := of_device[-1].question.reserve.parts_on(of_device[-1].question.budget_mib):
            amounts = ", ".join(f"{amount.name} {amount.mib / GIB_MIB:.2f}" for amount in parts)
            yield f"{name}bound: estimate of tensors + {amounts} GiB on a full GPU"
    if working := max(fit.question.reserve.working for fit in fits):
        yield f"the allocator may also keep {working:.0%} of working memory when it is freed"
    yield fits[0].job(options).checkpoint
    yield from whole_runs(fits, options)
    yield from recommended_lines(recommendations(rows(fits, shape, options), options), options)


def _by_device(fits: Sequence[Fit]) -> dict[Device, list[Fit]]:
    return {fit.device: [other for other in fits if other.device == fit.device] for fit in fits}


def hint_lines(fits: Sequence[Fit], hints: Sequence[Hint]) -> list[str]:
    """Options with which training is faster, a line each."""
    per_node = fits[0].device.gpus_per_node or fits[0].question.options.num_gpus_per_node
    return [hint_line(hint, per_node) for hint in hints]


def _column(name: str, form: str) -> Callable[[dict[str, Any]], str]:
    """The text of a figure of a row; `-` where it is not known."""
    return lambda row: format(row[name], form) if row[name] else "-"


def _times(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: f"x{row[name]:.2f}" if row[name] else "-"


WIDTHS = {"tokens/s": 10, "MFU": 6, "step, s": 7, "days": 6, "cost": 9}  # columns wider than their names
_money = _column("cost", ",.0f")
SPEEDS: dict[str, Callable[[dict[str, Any]], str]] = {
    "tokens/s": _column("tokens_per_s", ",.0f"),
    "tokens/s/GPU": _column("tokens_per_s_per_gpu", ",.0f"),
    "MFU": _column("mfu", ".1%"),
    "step, s": _column("step_s", ".3g"),
    "days": lambda row: plain(row["days"]) if row["days"] else "-",
}
# Columns only for one device: the speed relative to the previous row, and with more memory.
COMPARISONS: dict[str, Callable[[dict[str, Any]], str]] = {
    "speed-up": _times("times"),
    f"+{MORE_GIB:g} GiB": lambda row: (
        "fits" if row["more_gib_fits"] and not row["fits"] else _times("more_gib_times")(row)
    ),
}


def in_words(plan: Plan) -> str:
    """A plan in a few words: the strategy of most layers, and how many recompute."""
    most = max(plan.layers, key=plan.layers.count)
    again, away = (sum(bool(getattr(layer, name)) for layer in plan.layers) for name in ("recompute", "offload"))
    words = [
        f"pp {plan.pipeline}" if plan.pipeline > 1 else "",
        f"{plan.chunks} chunks" if plan.chunks > 1 else "",
        *(f"{axis.words} {degree}" for axis, degree in most.axes if degree > 1),
        f"dp {plan.dp(most)} {most.dp_type}" if plan.dp(most) > 1 else "",
        f"ep {most.ep}" if most.ep > 1 else "",
        f"tp {most.etp} of experts" if most.etp > 1 else "",
        count(plan.micro_batches, "micro-batch", "micro-batches"),
        f"recompute {again} of {len(plan.layers)}" if again else "",
        f"activations of {away} of {len(plan.layers)} offloaded" if away else "",
        "mixed" if len({(layer.axes, layer.dp_type, layer.experts) for layer in plan.layers}) > 1 else "",
    ]
    return ", ".join(word for word in words if word)


def spare_summary(spares: Sequence[Spare]) -> dict[str, Any]:
    """The rows as JSON values."""
    names = ("nodes", "gpus", "samples_per_s", "lost", "lost_per_gpu", "why_not")
    return {"spares": [{name: getattr(spare, name) for name in names} for spare in spares]}


def spare_lines(spares: Sequence[Spare], batch: int, folder: Path) -> Iterator[str | Table]:
    """A row for each number of nodes, and how to use the plans in a run."""
    shown = table("nodes", "GPUs", "samples/s", "lost", "lost a GPU", "plan", left=("plan",))
    for spare in spares:
        facts = ["-", "-", "-", spare.why_not]
        if spare.best:
            speed = f"{spare.samples_per_s:.4g}", f"{spare.lost:.1%}", f"{spare.lost_per_gpu:.1%}"
            facts = [*speed, in_words(spare.best.plan)]
        shown.add_row(str(spare.nodes), str(spare.gpus), *facts)
    yield shown
    yield f"global batch {batch} kept; written: {folder}; galvatron train --spare {folder} takes the plan that fits"
