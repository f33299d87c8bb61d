"""A whole training with failures: expected time and its range, the interval between checkpoints, spare nodes.

Failures come at a constant rate, as those of many parts of any age together do. Frequent early failures (Weibull times
of shape 0.7) leave the mean as it is, but only seven runs of ten are then within the range of nine of ten. A failure
loses the time since the last checkpoint; detection, start and loading follow, which a failure may hit as well. Steps
wait for a checkpoint that is written. J. T. Daly, "A higher order estimate of the optimum checkpoint interval for
restart dumps", 2006.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, exp, expm1, inf, sqrt

from ..base.text import plain

DAY_S, HOUR_S = 24 * 3600, 3600
RESTART_S = 600.0  # assumed where nobody says it: a failure detected, ranks started, a checkpoint loaded
REPAIR_HOURS = 24.0  # assumed: how long a failed node is away
NINE_OF_TEN = 1.645  # standard deviations on each side of the mean
LONGEST = 50.0  # mean times between failures between two checkpoints, beyond which no run ends


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
    spare_nodes: int  # with which 19 of 20 times no failed node is waited for

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
    """The least number of nodes that are enough with this probability, where `away` are away on average (Poisson)."""
    if away > 100:  # where the normal distribution is the same, and the terms would underflow
        return ceil(away + NINE_OF_TEN * sqrt(away))
    term = total = exp(-away)
    nodes = 0
    while total < sure:
        nodes += 1
        term *= away / nodes
        total += term
    return nodes
