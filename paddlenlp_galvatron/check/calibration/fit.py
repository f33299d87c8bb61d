"""Predicts measured runs from a data sheet, and fits its few physical numbers to them.

Regularized least squares in the numbers' logarithms: each starts at the sheet's figure and moves only as far as the
runs' step times demand, so that a number on which no run depends stays where it was, and one run already helps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...base.errors import UserError
from ...cost_model import CostModel, CostOptions, Task, derive
from ...cost_model.costs import IMBALANCE
from ...model import ModelShape
from ...plan import Plan
from ...profiles.analytic import GROUPED, ExpertKernels
from ...profiles.data_sheet import DataSheet, Figure
from ...profiles.reserve import MOST_ALLOCATOR

# Fitted numbers and their prior errors: standard deviations of the logarithm.
EXPECTED = {
    "matmul_efficiency": 0.15,
    "memory_efficiency": 0.15,
    "link_efficiency": 0.15,
    "network_efficiency": 0.3,
    "product_start": 0.5,
    "launch": 0.5,
    "host_link": 0.3,
}
SHARES = ("matmul_efficiency", "memory_efficiency", "link_efficiency", "network_efficiency")  # of a peak: at most 1
NOISE = 0.02  # of a measured step beside the best prediction, standard deviation: as over the published runs
DETERMINED = 0.5  # a number whose deviation the runs have brought below this share of EXPECTED is determined by them
STEPS, STEP = 12, 1e-3  # of Gauss and Newton, and of the logarithm for slopes
ROOM = 0.9  # of a card: an allocator that held more may have taken it because it was there
LONGEST = 300  # characters of a source
LARGEST_MOVE = 1.0  # of a logarithm in one step: far from the solution slopes mislead


@dataclass(frozen=True)
class MeasuredRun:
    """A run of a plan and its measurements."""

    name: str
    source: str
    device: str  # its data sheet's name, or the beginning of it
    shape: ModelShape
    plan: Plan
    step_s: float
    allocated_mib: float | None = None  # most that tensors held
    reserved_mib: float | None = None  # most that the allocator held
    stage: int | None = None  # whose memory was told; None: the fullest one's
    offload_optimizer: bool = False
    adapter_rank: int | None = None  # rank of the LoRA adapters; None: all weights are trained
    ours: bool = False  # by this project's runtime, which posts the receives of a pipeline ahead
    kept_bytes: Callable[[int, int], float] | None = None  # of layers that are not ours, see `analytic_computation`
    imbalance: float = IMBALANCE  # of experts, as `CostOptions` has it
    kernels: ExpertKernels = GROUPED
    document_tokens: float | None = None  # of packed rows, as `Task` has it


class Expected(NamedTuple):
    """Predictions of a run."""

    step_s: float
    allocated_mib: float
    reserved_mib: float
    bound_mib: float  # the most of `reserved_mib`, unless the card is full


def cost_of(run: MeasuredRun, sheet: DataSheet) -> CostModel:
    """Prices of its model on nodes of this sheet."""
    if not run.ours:
        alone = sheet.receive_coe.model_copy(update={"value": 1.0})
        sheet = sheet.model_copy(update={"receive_coe": alone})
    per_node = min(run.plan.world_size, sheet.gpus_per_node)
    return derive(
        run.shape,
        sheet,
        run.plan.world_size // per_node,
        per_node,
        run.plan.assumed,
        CostOptions(
            offload_optimizer=run.offload_optimizer,
            imbalance=run.imbalance,
            imbalance_bound=run.imbalance,
            kernels=run.kernels,
            task=Task(run.adapter_rank, document_tokens=run.document_tokens),
        ),
        run.kept_bytes,
    )


def expected(run: MeasuredRun, sheet: DataSheet) -> Expected:
    """Raises UserError where the plan cannot be priced."""
    cost = cost_of(run, sheet)
    prediction = cost.predict(run.plan)
    stages = prediction.stages if run.stage is None else prediction.stages[run.stage : run.stage + 1]
    memory = max((stage.memory for stage in stages), key=lambda memory: memory.tensors_mib)
    return Expected(
        prediction.time_s,
        memory.tensors_mib,
        cost.reserve.reserved_mib(memory.tensors_mib, sheet.memory.value * 1024),
        memory.allocator_mib(cost.reserve),
    )


@dataclass(frozen=True)
class Number:
    """One number of the sheet."""

    name: str
    before: float
    after: float
    determined: bool


@dataclass(frozen=True)
class Calibration:
    """The fitted numbers, and how well they explain the runs."""

    sheet: DataSheet
    numbers: tuple[Number, ...]
    runs: tuple[MeasuredRun, ...]
    before: tuple[float, ...]  # predicted / measured - 1 of each run by the sheet that was given
    after: tuple[float, ...]
    apart: tuple[float, ...]  # the same of each run, calibrated from the others alone; empty: there is one run

    def lines(self) -> Iterator[str]:
        """For people."""
        for number in self.numbers:
            how = "determined by the runs" if number.determined else "kept close to its default"
            yield f"{number.name:20s} {number.before:.4g} -> {number.after:.4g}  {how}"
        for run, before, after in zip(self.runs, self.before, self.after, strict=True):
            yield f"{run.name}: step {run.step_s:.4g} s, error {before:+.1%} -> {after:+.1%}"
        if self.apart:
            each = [abs(error) for error in self.apart]
            yield f"each run predicted from the others: off by {fmean(each):.1%} on average, {max(each):.1%} at most"
        if (worst := max(map(abs, self.after))) > UNLIKE:
            yield f"trust it little: it explains the runs only within {worst:.0%}, the device is unlike the sheet's"
        else:
            yield f"trust it for plans between these: {self._range()}. {ELSEWHERE}"

    def _range(self) -> str:
        plans = [run.plan for run in self.runs]
        axes = {
            "tp": [plan.layers[0].tp for plan in plans],
            "pp": [plan.pipeline for plan in plans],
            "samples of a rank": [plan.micro_batch // plan.dp(plan.layers[0]) for plan in plans],
            "tokens a sample": [plan.assumed.seq_length or 0 for plan in plans],
        }
        low_high = {name: (min(values), max(values)) for name, values in axes.items()}
        return ", ".join(f"{name} {low}" + (f"-{high}" if high > low else "") for name, (low, high) in low_high.items())


UNLIKE = 0.1  # of a step: no published run is explained worse once its like are calibrated
# 3 of the 25 rows of Qwen3-8B on H800 of benchmarks/published_runs, the other 22 predicted.
ELSEWHERE = "Elsewhere it may be off by 5 % on average and 15 % at worst, as in published runs"


def calibrate(runs: Sequence[MeasuredRun], sheet: DataSheet) -> Calibration:
    """The sheet that explains the runs. Raises UserError where there is none, or a plan cannot be priced."""
    if not runs:
        raise UserError("runs: none that can be priced; give a log, a validation.json or a table with other rows")
    fitted, determined = _fitted(runs, sheet)
    share = _allocator(runs, sheet.memory.value * 1024)
    source = f"calibrated from {len(runs)} runs: {', '.join(dict.fromkeys(run.name for run in runs))}"[:LONGEST]
    figures = {
        name: _figure(getattr(sheet, name), value, source if determined[name] else f"{source}; they hardly tell it")
        for name, value in fitted.items()
    }
    if share is not None:
        figures["allocator"] = Figure(value=share, unit="ratio", source=source, checked="the most of these runs")
    result = sheet.model_copy(update=figures)
    numbers = [Number(name, getattr(sheet, name).value, value, determined[name]) for name, value in fitted.items()]
    if share is not None:
        numbers.append(Number("allocator", MOST_ALLOCATOR, share, True))
    apart = []
    for run in runs if len(runs) > 1 else ():
        others = [other for other in runs if other is not run]
        apart.append(_error(run, _with(sheet, _fitted(others, sheet)[0])))
    before, after = (tuple(_error(run, one) for run in runs) for one in (sheet, result))
    return Calibration(result, tuple(numbers), tuple(runs), before, after, tuple(apart))


def _fitted(runs: Sequence[MeasuredRun], sheet: DataSheet) -> tuple[dict[str, float], dict[str, bool]]:
    """Numbers that a step depends on, and whether the runs determine each."""
    names = [name for name in EXPECTED if name != "host_link" or any(run.offload_optimizer for run in runs)]
    start = np.log([getattr(sheet, name).value for name in names])
    deviations = np.array([EXPECTED[name] for name in names])
    limits = np.array([0.0 if name in SHARES else np.inf for name in names])

    def misses(at: NDArray[np.float64]) -> NDArray[np.float64]:
        there = _with(sheet, dict(zip(names, np.exp(at), strict=True)))
        return np.log([expected(run, there).step_s / run.step_s for run in runs])

    at, curvature = start.copy(), np.diag(deviations**-2)
    for _ in range(STEPS):
        missed = misses(at)
        slopes = np.array([(misses(at + STEP * one) - missed) / STEP for one in np.eye(len(names))]).T
        curvature = np.diag(deviations**-2) + slopes.T @ slopes / NOISE**2
        move = -np.linalg.solve(curvature, slopes.T @ missed / NOISE**2 + (at - start) / deviations**2)
        move *= min(1.0, LARGEST_MOVE / max(float(np.abs(move).max()), 1e-12))
        at = np.minimum(at + move, limits)
        if np.abs(move).max() < STEP / 10:
            break
    left = np.sqrt(np.diag(np.linalg.inv(curvature))) / deviations
    found = dict(zip(names, np.exp(at).tolist(), strict=True))
    return found, {name: bool(share < DETERMINED) for name, share in zip(names, left, strict=True)}


def _allocator(runs: Sequence[MeasuredRun], card_mib: float) -> float | None:
    """The largest share that an allocator held beside tensors, where it is more than is taken anyway. A full card
    tells nothing: an allocator holds more where there is more."""
    shares = [
        run.reserved_mib / run.allocated_mib - 1
        for run in runs
        if run.reserved_mib and run.allocated_mib and run.reserved_mib < ROOM * card_mib and not run.offload_optimizer
    ]
    return max(shares) if shares and max(shares) > MOST_ALLOCATOR else None


def _error(run: MeasuredRun, sheet: DataSheet) -> float:
    return expected(run, sheet).step_s / run.step_s - 1


def _with(sheet: DataSheet, values: dict[str, float]) -> DataSheet:
    return sheet.model_copy(
        update={name: getattr(sheet, name).model_copy(update={"value": float(value)}) for name, value in values.items()}
    )


def _figure(figure: Figure, value: float, source: str) -> Figure:
    return figure.model_copy(
        update={"value": round(float(value), 6), "source": source, "checked": f"before: {figure.value:g}"}
    )
