"""Predicts measured runs from a data sheet, and fits its few physical numbers to them.

Regularized least squares in the logarithms of the numbers, starting at the sheet's figures. Numbers are freed one by
one, each time the number that lowers the leave-one-out error most, while it falls. All other numbers keep the sheet's
figures. A single run frees the number on which it depends most. A slow network is visible only near its own speed, so
several speeds are tried first. Runs determine a number if they narrow its prior error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from statistics import fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...base.errors import UserError
from ...cost_model import CostModel, CostOptions, Task, derive
from ...model import ModelShape
from ...plan import Plan
from ...plan.strategy import IMBALANCE
from ...profiles.analytic import GROUPED, ExpertKernels
from ...profiles.data_sheet import CALIBRATED, HALF_RANKS, DataSheet, Figure, Stack
from ...profiles.reserve import MOST_ALLOCATOR

# Numbers that may be fitted, and their prior errors: standard deviations of the logarithm.
EXPECTED = {
    "matmul_efficiency": 0.15,
    "attention_efficiency": 0.3,
    "memory_efficiency": 0.15,
    "link_efficiency": 0.15,
    "network": 1.0,  # depends on who built the cluster
    "product_start": 0.5,
    "launch": 0.5,
    "host_link": 0.3,
    "overlap_coe": 0.15,
    "tensor_in_pipeline": 0.15,
}
COEFFICIENTS = ("overlap_coe", "tensor_in_pipeline")  # slow-downs: at least 1
SHARES = tuple(name for name in EXPECTED if name.endswith("efficiency"))  # shares of a peak: at most 1
# Standard deviation of a measured step from the best prediction: for published runs of other software, and for runs
# that the prices explain exactly. The latter is used where leave-one-out lowers the error below the share EXACTLY.
NOISE, LITTLE_NOISE, EXACTLY = 0.08, 0.01, 0.2
FREES = 0.9  # a number is freed if this lowers the leave-one-out error below this share
STEPS, STEP = 12, 1e-3  # Gauss-Newton steps, and the step of the logarithm for slopes
ROOM = 0.9  # share of a GPU: an allocator that held more may have taken free memory without need
LONGEST = 300  # characters of a source
LARGEST_MOVE = 1.0  # of a logarithm in one step, as slopes far from the solution mislead
NETWORKS = tuple(2.0**-power for power in range(7))  # shares of the sheet's network speed to try
CLEAR = 0.5  # runs determine a number if they reduce its prior error below this share
ALIKE = 0.5  # correlation of errors from which runs do not separate two numbers


@dataclass(frozen=True)
class MeasuredRun:
    """A run of a plan and its measurements."""

    name: str
    source: str
    device: str  # name of its data sheet, or the start of the name
    shape: ModelShape
    plan: Plan
    step_s: float
    allocated_mib: float | None = None  # peak of tensors
    reserved_mib: float | None = None  # peak of the allocator
    stage: int | None = None  # stage with known memory; None: the largest stage
    offload_optimizer: bool = False
    adapter_rank: int | None = None  # rank of the LoRA adapters; None: all weights are trained
    ours: bool = False  # run by our runtime, which posts pipeline receives ahead
    kept_bytes: Callable[[int, int], float] | None = None  # layers of other software: see `analytic_computation`
    imbalance: float = IMBALANCE  # see `CostOptions.imbalance`
    kernels: ExpertKernels = GROUPED
    document_tokens: float | None = None  # packed rows: see `Task.document_tokens`
    stack: Stack | None = None  # the software; None: the sheet's
    keeps_gathered: bool = False  # see `CostOptions`
    attention_speed: float = 1.0  # speed of its attention kernel / that of the sheet's
    network: float | None = None  # GB/s per direction of a node; None: the sheet's
    loss_in_place: bool = False  # a fused kernel, which stores no logits
    overlaps: bool = True  # see `CostOptions`, also below
    keeps_keys: bool = True


class Expected(NamedTuple):
    """Predictions of a run."""

    step_s: float
    allocated_mib: float
    reserved_mib: float
    bound_mib: float  # upper bound of `reserved_mib`, unless the GPU is full


def cost_of(run: MeasuredRun, sheet: DataSheet) -> CostModel:
    """Prices of the run's model on nodes of this sheet."""
    sheet = sheet.with_stack(run.stack)
    attention = sheet.attention_efficiency.value * run.attention_speed
    figures = {"attention_efficiency": attention}
    if run.network:  # the rings change as well
        figures |= {"network": run.network, "half_ranks": HALF_RANKS.value}
    sheet = _with(sheet, figures if run.ours else figures | {"receive_coe": 1.0})
    gpus = run.plan.world_size
    nodes = next(nodes for nodes in count(-(-gpus // sheet.gpus_per_node)) if gpus % nodes == 0)
    return derive(
        run.shape,
        sheet,
        nodes,
        gpus // nodes,
        replace(run.plan.assumed, offload_optimizer=run.offload_optimizer or None),
        CostOptions(
            masters_first=not run.ours,
            imbalance=run.imbalance,
            imbalance_bound=run.imbalance,
            kernels=run.kernels,
            in_place=run.ours or run.loss_in_place,
            overlaps=run.overlaps,
            fused_gradients=sheet.stack is Stack.TRANSFORMER_ENGINE,
            keeps_keys=run.keeps_keys,
            keeps_gathered=run.keeps_gathered,
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
        cost.profiles.reserve.reserved_mib(memory.tensors_mib, sheet.memory.value * 1024),
        memory.allocator_mib(cost.profiles.reserve),
    )


@dataclass(frozen=True)
class Number:
    """One number of the sheet."""

    name: str
    before: float
    after: float
    determined: bool
    unclear: str = ""  # why the runs do not determine it; empty: they do


@dataclass(frozen=True)
class Calibration:
    """The fitted numbers, and how well they explain the runs."""

    sheet: DataSheet
    numbers: tuple[Number, ...]
    runs: tuple[MeasuredRun, ...]
    before: tuple[float, ...]  # predicted / measured - 1 of each run by the original sheet
    after: tuple[float, ...]
    apart: tuple[float, ...]  # the same with each run left out of the calibration; empty: a single run

    @property
    def refusal(self) -> str | None:
        """Why the fitted sheet is no better than the original; None: it is better."""
        old, new = _mean(self.before), _mean(self.after)
        if not any(number.determined for number in self.numbers):
            return f"runs: they change no number of {self.sheet.name}, which is off by {old:.1%}; keep that sheet"
        if new > old:
            return f"runs: off by {new:.1%} on average once fitted, by {old:.1%} before; keep {self.sheet.name}"
        if self.apart and (left_out := _mean(self.apart)) > old:
            return (
                f"runs: each predicted from the others is off by {left_out:.1%} on average, by {old:.1%} before; "
                f"keep {self.sheet.name}, or give more runs"
            )
        return None

    def lines(self) -> Iterator[str]:
        """The fit as lines for people."""
        for number in self.numbers:
            how = "determined by the runs" if number.determined else "kept: the runs agree"
            how = f"{'fitted' if number.determined else 'kept'}: {number.unclear}" if number.unclear else how
            yield f"{number.name:20s} {number.before:.4g} -> {number.after:.4g}  {how}"
        for run, old, new in zip(self.runs, self.before, self.after, strict=True):
            yield f"{run.name}: step {run.step_s:.4g} s, error {old:+.1%} -> {new:+.1%}"
        if self.apart:
            most = max(map(abs, self.apart))
            yield f"each run predicted from the others: off by {_mean(self.apart):.1%} on average, {most:.1%} at most"
        if (worst := max(map(abs, self.after))) > UNLIKE:
            yield f"unreliable: errors of up to {worst:.0%} remain; the device differs from the sheet's"
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


UNLIKE = 0.1  # of a step: after calibration no published run has a larger error
# Calibrated with 3 of the 25 rows of Qwen3-8B on H800 in benchmarks/published_runs; errors of the other 22.
ELSEWHERE = "Elsewhere it may be off by 5 % on average and 15 % at worst, as in published runs"


def calibrate(runs: Sequence[MeasuredRun], sheet: DataSheet) -> Calibration:
    """The sheet that explains the runs. Raises UserError where there is none, or a plan cannot be priced."""
    if not runs:
        raise UserError("runs: none that can be priced; give a log, a validation.json or a table with other rows")
    stacks = {run.stack or sheet.stack for run in runs}
    if len(stacks) > 1:
        raise UserError(f"stack: the runs are of {', '.join(sorted(stacks))}; give those of one alone")
    sheet = sheet.with_stack(*stacks)
    names = [name for name in EXPECTED if name != "host_link" or any(run.offload_optimizer for run in runs)]
    fitted = _fitted(runs, sheet, names)
    share = _allocator(runs, sheet.memory.value * 1024)
    source = f"{CALIBRATED} {len(runs)} runs: {', '.join(dict.fromkeys(run.name for run in runs))}"[:LONGEST]
    figures = {name: _figure(getattr(sheet, name), value, source) for name, value in fitted.values.items()}
    if share is not None:
        figures["allocator"] = Figure(value=share, unit="ratio", source=source, checked="the most of these runs")
    numbers = [
        Number(
            name,
            errors_before := getattr(sheet, name).value,
            fitted.values.get(name, errors_before),
            name in fitted.values,
            fitted.unclear.get(name, ""),
        )
        for name in names
    ]
    if share is not None:
        numbers.append(Number("allocator", MOST_ALLOCATOR, share, True))
    result = sheet.model_copy(update={**figures, "published": {}})
    errors_before, errors_after = (tuple(_error(run, version) for run in runs) for version in (sheet, result))
    return Calibration(result, tuple(numbers), tuple(runs), errors_before, errors_after, fitted.apart)


class _Problem(NamedTuple):
    """Error of each run's prediction and its derivatives by some numbers; all in logarithms."""

    missed: NDArray[np.float64]
    slopes: NDArray[np.float64]  # derivative of each run by each number
    deviations: NDArray[np.float64]  # prior standard deviations of the numbers
    moved: NDArray[np.float64]  # the numbers minus the sheet's
    noise: float = NOISE  # standard deviation of the runs

    def having(self, chosen: Sequence[int]) -> _Problem:
        """The fit of some of its numbers."""
        return self._replace(
            slopes=self.slopes[:, chosen], deviations=self.deviations[chosen], moved=self.moved[chosen]
        )

    @property
    def curvature(self) -> NDArray[np.float64]:
        prior: NDArray[np.float64] = np.diag(self.deviations**-2)
        return prior + self.slopes.T @ self.slopes / self.noise**2

    @property
    def apart(self) -> NDArray[np.float64]:
        """Leave-one-out error of each run, by its leverage, as for any regularized least squares."""
        gain = -np.linalg.solve(self.curvature, self.slopes.T / self.noise**2)
        step = gain @ (self.missed - self.slopes @ self.moved) - self.moved
        leverage = -np.einsum("rn,nr->r", self.slopes, gain)
        left: NDArray[np.float64] = (self.missed + self.slopes @ step) / (1 - leverage)
        return left

    @property
    def free(self) -> list[int]:
        """The numbers that leave-one-out frees; of a single run, the one on which it depends most."""
        count = len(self.deviations)
        if len(self.missed) == 1:
            return [int(np.abs(self.slopes[0] * self.deviations).argmax())]
        chosen = np.flatnonzero(self.moved).tolist()
        while more := [number for number in range(count) if number not in chosen]:
            best = min(more, key=lambda number: self.off([*chosen, number]))
            if self.off([*chosen, best]) >= FREES * self.off(chosen):
                break
            chosen.append(best)
        return sorted(chosen)

    def off(self, chosen: list[int]) -> float:
        """Leave-one-out error of the runs with these numbers."""
        return float(np.sqrt(np.mean(self.having(chosen).apart ** 2)))

    def unclear(self, names: Sequence[str]) -> Iterator[tuple[str, str]]:
        """The numbers that the runs do not determine, each with the reason."""
        covariance = np.linalg.inv(self.curvature)
        errors = np.sqrt(np.diag(covariance))
        for number in np.flatnonzero(errors > CLEAR * self.deviations):
            alike = np.abs(covariance[number] / errors / errors[number])
            alike[number] = 0.0
            other = int(alike.argmax())
            why = "the runs hardly depend on it"
            if alike[other] > ALIKE:
                why = f"the runs do not separate it from {names[other]}; give other layouts or numbers of nodes"
            yield names[number], why


class _Fit(NamedTuple):
    values: dict[str, float]  # fitted values of the free numbers
    apart: tuple[float, ...]  # predicted / measured - 1 of each run from the others alone; empty: there is one run
    unclear: dict[str, str]  # numbers that the runs do not determine, each with the reason


def _fitted(runs: Sequence[MeasuredRun], sheet: DataSheet, names: list[str]) -> _Fit:
    """Fit the numbers `names` by Gauss-Newton steps."""
    every = names
    current = {name: getattr(sheet, name).value for name in names}

    def misses(values: dict[str, float]) -> NDArray[np.float64]:
        local = _with(sheet, values)
        return np.log([expected(run, local).step_s / run.step_s for run in runs])

    def problem(at: dict[str, float], names: Sequence[str], noise: float) -> _Problem:
        missed = misses(at)
        slopes = [(misses(at | {name: at[name] * np.exp(STEP)}) - missed) / STEP for name in names]
        moved = np.log([at[name] / current[name] for name in names])
        deviations = np.array([EXPECTED[name] for name in names])
        return _Problem(missed, np.array(slopes).reshape(len(names), len(runs)).T, deviations, moved, noise)

    def selected(at: dict[str, float]) -> tuple[float, list[int], float]:
        """Leave-one-out error of the runs, with the freed numbers and the noise."""
        first = problem(at, names, NOISE)
        free, noise = first.free, NOISE
        exact = first._replace(noise=LITTLE_NOISE)
        if len(runs) > 1 and exact.off(exact.free) < EXACTLY * first.off(free):
            free, noise = exact.free, LITTLE_NOISE
        return first._replace(noise=noise).off(free), free, noise

    def unlikely(share: float) -> float:
        """Penalty of this share of the network's speed: its distance from the sheet's, the mean error left for matrix
        products to explain, and the spread of the runs' errors."""
        missed = misses({"network": share * current["network"]})
        left = (np.mean(missed) / EXPECTED["matmul_efficiency"]) ** 2 + len(runs) * np.var(missed) / NOISE**2
        return float(left + (np.log(share) / EXPECTED["network"]) ** 2)

    at = current
    off, free, noise = selected(at)
    if len(runs) > 1 and (share := min(NETWORKS, key=unlikely)) < 1:
        slow = current | {"network": share * current["network"]}
        if (other := selected(slow))[0] < FREES * off:
            at, (off, free, noise) = slow, other
    names = [names[number] for number in free]
    least, most = dict.fromkeys(COEFFICIENTS, 1.0), dict.fromkeys(SHARES, 1.0)
    local = problem(at, names, noise)
    for _ in range(STEPS if names else 0):
        pull = local.slopes.T @ local.missed / noise**2 + local.moved / local.deviations**2
        move = -np.linalg.solve(local.curvature, pull)
        move *= min(1.0, LARGEST_MOVE / max(float(np.abs(move).max()), 1e-12))
        last = at
        at = at | {
            name: float(np.clip(at[name] * np.exp(step), least.get(name, 0.0), most.get(name, np.inf)))
            for name, step in zip(names, move, strict=True)
        }
        local = problem(at, names, noise)
        if max(abs(np.log(at[name] / last[name])) for name in names) < STEP / 10:
            break
    apart = tuple(np.expm1(local.apart).tolist()) if len(runs) > 1 else ()
    unclear = dict(problem(at, every, noise).unclear(every))
    return _Fit({name: at[name] for name in names}, apart, unclear)


def _allocator(runs: Sequence[MeasuredRun], gpu_mib: float) -> float | None:
    """The largest share that an allocator held beyond its tensors, if above the default. Runs on a full GPU don't
    count: an allocator takes free memory without need."""
    shares = [
        run.reserved_mib / run.allocated_mib - 1
        for run in runs
        if run.reserved_mib and run.allocated_mib and run.reserved_mib < ROOM * gpu_mib and not run.offload_optimizer
    ]
    return max(shares) if shares and max(shares) > MOST_ALLOCATOR else None


def _error(run: MeasuredRun, sheet: DataSheet) -> float:
    return expected(run, sheet).step_s / run.step_s - 1


def _mean(errors: Sequence[float]) -> float:
    return fmean(map(abs, errors))


def _with(sheet: DataSheet, values: dict[str, float]) -> DataSheet:
    return sheet.model_copy(
        update={name: getattr(sheet, name).model_copy(update={"value": float(value)}) for name, value in values.items()}
    )


def _figure(figure: Figure, value: float, source: str) -> Figure:
    return figure.model_copy(
        update={"value": round(float(value), 6), "source": source, "checked": f"before: {figure.value:g}"}
    )
