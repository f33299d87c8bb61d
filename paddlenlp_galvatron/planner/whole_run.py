"""A whole training: days, cost and checkpoints; with failures the expected time and its range, the interval between
checkpoints, spare nodes.

Failures come at a constant rate, as for many components of mixed ages. With more early failures (Weibull times of shape
0.7) the mean is the same, but only seven runs of ten are within the range given for nine of ten. A failure loses the
time since the last checkpoint; detection, start and loading follow and may fail as well. Steps wait while a checkpoint
is written. J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, exp, expm1, inf, sqrt

from ..base import UserError, plain
from ..cost_model.costs import Task
from ..model.lora import factors_of
from ..options.prices import JobOptions
from ..plan import ModelShape
from ..profiles import load_data_sheet
from .options import SearchOptions

DAY_S, HOUR_S = 24 * 3600, 3600
RESTART_S = 600.0  # assumed by default: detect a failure, start ranks, load a checkpoint
REPAIR_HOURS = 24.0  # assumed: downtime of a failed node
NINE_OF_TEN = 1.645  # standard deviations on each side of the mean
LONGEST = 50.0  # interval of checkpoints / mean time between failures, beyond which no run ends
JOULES_OF_MWH = 3.6e9
ENDLESS = "failures come faster than checkpoints, so the training would hardly end"
STORED_BYTES = 12  # per weight in a checkpoint: weight and two moments, in fp32


@dataclass(frozen=True, slots=True)
class Failures:
    """How the GPUs of a run fail, and what a failure costs."""

    mtbf_s: float  # mean time between failures of the whole cluster
    save_s: float
    restart_s: float

    @property
    def interval_s(self) -> float:
        """Best training time between two checkpoints, Daly's equation 37."""
        half = self.save_s / (2 * self.mtbf_s)
        if half >= 1:
            return self.mtbf_s
        return sqrt(2 * self.save_s * self.mtbf_s) * (1 + sqrt(half) / 3 + half / 9) - self.save_s

    def expected_s(self, work_s: float, interval_s: float | None = None) -> float:
        """Mean time of a run that trains for `work_s`; Daly's equation 20. Infinite where it would hardly end."""
        interval_s = interval_s or self.interval_s
        segment, restart = (interval_s + self.save_s) / self.mtbf_s, self.restart_s / self.mtbf_s
        if segment + restart > LONGEST:
            return inf
        return self.mtbf_s * exp(restart) * expm1(segment) * work_s / interval_s

    def deviation_s(self, work_s: float) -> float:
        """Standard deviation of that time. A segment from checkpoint to checkpoint is tried a geometric number of
        times; each failure costs a truncated exponential time and a restart."""
        mean, span, restart = self.mtbf_s, self.interval_s + self.save_s, self.restart_s / self.mtbf_s
        if span / mean + restart > LONGEST:
            return inf
        odds = expm1(span / mean)  # failures for each segment that is done
        lost = mean - span / odds
        lost_squared = 2 * mean**2 - (span**2 + 2 * span * mean) / odds
        restarted = mean * expm1(restart)
        restarts = mean**2 * (exp(2 * restart) - 1 - 2 * restart * exp(restart))
        variance = odds * (lost_squared - lost**2 + restarts) + odds * (1 + odds) * (lost + restarted) ** 2
        return sqrt(variance * work_s / self.interval_s)


@dataclass(frozen=True, slots=True)
class WholeRun:
    """A run with failures."""

    days: float  # mean
    days_low: float  # nine runs of ten end between these
    days_high: float
    interval_s: float  # training between two checkpoints
    lost: float  # share of the time: checkpoints, repeated steps, restarts
    failures: float  # expected failures of the whole run
    spare_nodes: int  # enough to replace failed nodes 19 of 20 times

    @classmethod
    def of(cls, work_s: float, failures: Failures) -> WholeRun | None:
        """None: the run would hardly end, as failures come faster than checkpoints."""
        mean_s, deviation_s = failures.expected_s(work_s), failures.deviation_s(work_s)
        if mean_s == inf:
            return None
        return cls(
            days=mean_s / DAY_S,
            days_low=max(work_s, mean_s - NINE_OF_TEN * deviation_s) / DAY_S,
            days_high=(mean_s + NINE_OF_TEN * deviation_s) / DAY_S,
            interval_s=failures.interval_s,
            lost=1 - work_s / mean_s,
            failures=mean_s / failures.mtbf_s,
            spare_nodes=spare_nodes(REPAIR_HOURS * HOUR_S / failures.mtbf_s),
        )

    def __str__(self) -> str:
        return (
            f"{plain(self.days)} days ({plain(self.days_low)} to {plain(self.days_high)} in nine runs of ten) with "
            f"{plain(self.failures)} failures; a checkpoint every {plain(self.interval_s / 60)} minutes is best; "
            f"{self.lost:.1%} of the time is lost; spare nodes, if a failed one is away for {REPAIR_HOURS:g} hours: "
            f"{self.spare_nodes}"
        )


def spare_nodes(away: float, sure: float = 0.95) -> int:
    """The least number of spare nodes that is enough with this probability, if `away` nodes are down on average
    (Poisson)."""
    if away > 100:  # the normal distribution is the same here, and the terms would underflow
        return ceil(away + NINE_OF_TEN * sqrt(away))
    term = total = exp(-away)
    nodes = 0
    while total < sure:
        nodes += 1
        term *= away / nodes
        total += term
    return nodes


@dataclass(frozen=True, slots=True)
class Job:
    """A whole training. None: unknown without tokens, price, storage speed or failures."""

    days: float | None  # days on the given tokens, without failures
    cost: float | None  # in the currency of the price, with failures where they are known
    checkpoint_gb: float
    save_s: float | None  # time to write a checkpoint
    run: WholeRun | None = None  # the run with failures
    endless: bool = False  # failures come faster than checkpoints
    energy_mwh: float | None = None  # of the GPUs, at the limit of their power

    @classmethod
    def of(
        cls,
        options: JobOptions,
        shape: ModelShape,
        task: Task,
        cluster: SearchOptions,
        tokens_per_s: float | None,
        usual: float | None = None,
    ) -> Job:
        """`tokens_per_s`: None if no plan fits. `usual`: default number of tokens. Raises UserError."""
        tokens, price, speed = options.tokens or usual, price_of(options, cluster.device), options.save_gb_per_s
        gpus, sheet = cluster.world_size, load_data_sheet(cluster.device) if cluster.device else None
        seconds = options.num_train_epochs * tokens / tokens_per_s if tokens and tokens_per_s else None
        stored_gb = _checkpoint_gb(shape, task)
        run, mtbf_hours = None, options.mtbf_of(cluster.num_nodes, cluster.num_gpus_per_node)
        if seconds and speed and mtbf_hours:
            failures = Failures(mtbf_hours * HOUR_S, stored_gb / speed, options.restart_s or RESTART_S)
            run = WholeRun.of(seconds, failures)
        paid_s = run.days * DAY_S if run else None if options.mtbf_hours else seconds
        return cls(
            days=seconds / DAY_S if seconds else None,
            cost=price * gpus * paid_s / HOUR_S if price and paid_s else None,
            checkpoint_gb=stored_gb,
            save_s=stored_gb / speed if speed else None,
            run=run,
            endless=bool(seconds and options.mtbf_hours and not run),
            energy_mwh=sheet.watts.value * gpus * paid_s / JOULES_OF_MWH if sheet and sheet.watts and paid_s else None,
        )

    @property
    def expected_days(self) -> float | None:
        """Days including known failures; None: unknown, or the training would hardly end."""
        return self.run.days if self.run else None if self.endless else self.days

    def within(self, days: float | None) -> bool:
        """Whether the training ends within the limit of days, if set."""
        return days is None or (self.expected_days is not None and self.expected_days <= days)

    @property
    def checkpoint(self) -> str:
        saved = f", {plain(self.save_s)} s to save" if self.save_s else ""
        return f"a checkpoint has {plain(self.checkpoint_gb)} GB{saved}"

    def __str__(self) -> str:
        days = f"{plain(self.days)} days without failures" if self.days else ""
        days = str(self.run) if self.run else ENDLESS if self.endless else days
        cost = f"cost {self.cost:,.0f}" if self.cost else ""
        energy = f"at most {plain(self.energy_mwh)} MWh for the GPUs" if self.energy_mwh else ""
        return "; ".join(filter(None, (days, cost, energy, self.checkpoint)))


def price_of(options: JobOptions, device: str | None) -> float | None:
    """Price of a GPU for an hour; None: none is given. `device`: a data sheet. Raises UserError."""
    prices = options.price_per_gpu_hour
    if not isinstance(prices, dict):
        return prices
    named = {load_data_sheet(name).name: price for name, price in prices.items()}
    price = named.get(load_data_sheet(device).name) if device else None
    if price is None:
        remedy = f"add {device}=PRICE" if device else "give one number, as profiles name no data sheet"
        raise UserError(f"price_per_gpu_hour: {', '.join(prices)}: no price of {device or 'this device'}; {remedy}")
    return price


def _checkpoint_gb(shape: ModelShape, task: Task) -> float:
    """GB of a checkpoint: the trained weights and their moments."""
    learning = shape.parameters
    if task.adapter_rank is not None:
        learning = sum(kind.layers * factors_of(kind.layer, task.adapter_rank).parameters for kind in shape.kinds)
    return learning * STORED_BYTES / 1e9
