"""The whole training on each number of GPUs, and the numbers that `galvatron fit` recommends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Any

from ..base.text import plain
from ..planner.fit import Fit, FitOptions
from ..planner.result import ENDLESS


def whole_runs(found: Sequence[Fit], options: FitOptions) -> Iterator[str]:
    """The whole training of each row with failures, or that failures are left out."""
    if not options.mtbf_hours:
        yield "days are those without failures; --mtbf_hours and --save_gb_per_s add these"
    for one in found if options.mtbf_hours else ():
        if one.best:
            device = f"{one.device.name}, " * (len(options.device or ()) > 1)
            yield f"{device}{one.gpus} GPUs: {one.job(options).run or ENDLESS}"


def recommendations(rows: Sequence[Mapping[str, Any]], options: FitOptions) -> list[dict[str, Any]]:
    """The cheapest row, the fastest, and the least number of GPUs within the limits that were set, for programs."""
    able = [row for row in rows if row["fits"] and not row["endless"]]
    if not able or (options.gpus and len(rows) == 1 and not (options.days or options.budget)):
        return []

    def days(row: Mapping[str, Any]) -> float:
        return float(row["run"]["days"] if row["run"] else row["days"])

    def cost(row: Mapping[str, Any]) -> float:
        """In the currency of the prices, or GPU-days."""
        return float(row["cost"] or days(row) * row["gpus"])

    chosen = {"fastest": min(able, key=days)}
    if options.price_per_gpu_hour or len({row["device"] for row in able}) == 1:  # else nobody knows the dearer GPU
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
