"""Compares a plan file's prediction with a log, as a table, a line, warnings or advice."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import ceil
from statistics import median
from typing import Any, NamedTuple, TypeVar

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..base import FP32_BYTES, GIB_MIB, MIB, count, gib
from ..base.printing import table
from ..plan import DataParallel, ModelShape, Plan, Recompute, plan_id
from ..plan.strategy import Load, Predicted

Record = TypeVar("Record", bound=Mapping[str, Any])
Log = Sequence[Mapping[str, Any]]  # lines of train_log.jsonl

WARM_UP_STEPS = 5  # untimed steps of a process, which allocate, compile and connect
WINDOW_STEPS = 20  # latest steps for medians
ENOUGH_STEPS = 10  # least number of steps for a warning
TOLERANCE = 0.15  # tolerance of a prediction
MARGIN = 0.9  # next budget / a budget that was too large


def of_plan(plan: Plan, records: Iterable[Record]) -> list[Record]:
    """The lines of a log that this plan wrote: a run may have continued under other plans."""
    identity = plan_id(plan)
    return [record for record in records if record.get("plan") == identity]


def stage_peaks_mib(plan: Plan, records: Log) -> list[float]:
    """Peak MiB of a rank of each stage in these steps, whose lines have all ranks or stages."""

    def most(peaks: Sequence[float], stage: int) -> float:
        size = len(peaks) // plan.pipeline
        return max(peaks[stage * size : (stage + 1) * size])

    return [max(most(record["peak_memory_mib"], stage) for record in records) for stage in range(plan.pipeline)]


def has_all_peaks(plan: Plan, record: Mapping[str, Any]) -> bool:
    """Whether a line has the peaks of all ranks of the plan, or of its stages."""
    peaks = record.get("peak_memory_mib")
    return isinstance(peaks, list) and len(peaks) in (plan.world_size, plan.pipeline)


def predicted_and_measured(plan: Plan, records: Log) -> Table:
    """Step time and peak memory of each stage: predicted in the plan's file, and measured in train_log.jsonl."""
    predicted, shown = Predicted.of(plan), table("", "predicted", "measured", "predicted / measured")

    def row(name: str, guess: float, truth: float, unit: str) -> None:
        shown.add_row(name, f"{guess:.4g} {unit}", f"{truth:.4g} {unit}", f"{guess / truth:.2f}")

    if predicted.step_s:
        row("step time", predicted.step_s, median(r["step_time_s"] for r in records[WARM_UP_STEPS:]), "s")
    for stage, (guess, peak) in enumerate(zip(predicted.memory_mib, stage_peaks_mib(plan, records), strict=False)):
        row(f"peak memory, stage {stage}", guess / GIB_MIB, peak / GIB_MIB, "GiB")
    if predicted.load and (measured := measured_load(records[WARM_UP_STEPS:])):
        row("rows of experts, busiest rank", predicted.load.moe_imbalance, measured.usual, "x mean")
    return shown


class MeasuredLoad(NamedTuple):
    """Experts' rows of the busiest rank / mean."""

    usual: float  # mean over layers and micro-batches, median over the steps
    most: float  # maximum over layers, micro-batches and steps


def measured_load(records: Log) -> MeasuredLoad | None:
    """The measured load of experts; None: no experts on other ranks."""
    logged = [record for record in records if "moe_imbalance" in record]
    if not logged:
        return None
    most = max(record.get("moe_imbalance_most", record["moe_imbalance"]) for record in logged)
    return MeasuredLoad(median(record["moe_imbalance"] for record in logged), most)


def load_verdicts(planned: Load, measured: MeasuredLoad) -> dict[str, tuple[bool, str]]:
    """Whether the plan's assumed load (estimate and bound) holds, with the remedy, in words."""
    estimate, bound = planned
    rows = f"the busiest rank of experts has rows {_compared(measured.usual, estimate, 'x mean')}"
    over, again = measured.usual / estimate - 1, f"search again: galvatron search --moe_imbalance {measured.usual:.2g}"
    if over < -TOLERANCE:
        rows += f"; the estimate holds; {again} for a plan that may be faster"
    else:
        rows += f"; {again}" if over > TOLERANCE else "; the estimate holds"
    holds = measured.most <= bound
    most = f"a rank of experts had {measured.most:.3g} times the mean rows, "
    if holds:
        most += f"and memory was planned for {bound:.3g}; the bound holds"
    else:
        enough = ceil(10 * measured.most) / 10
        most += f"but memory was planned for {bound:.3g}; galvatron search --moe_imbalance_bound {enough:g}"
    return {"estimate": (over <= TOLERANCE, rows), "bound": (holds, most)}


def scalars_bytes(plan: Plan, shape: ModelShape) -> int:
    """Bytes of a step that the cost model excludes, over all ranks: loss, gradient norm and balance loss."""
    summed = 2 + shape.mtp_layers + bool(shape.router_aux_loss_coef)
    return FP32_BYTES * summed * plan.world_size if plan.world_size > 1 else 0


def traffic_table(plan: Plan, shape: ModelShape, counted: Mapping[str, Any], adapter_rank: int | None = None) -> Table:
    """Table of MiB over all ranks, by kind. `counted`: a run's traffic.json; `adapter_rank`: if only adapters were
    trained."""
    from ..cost_model.traffic import step_traffic_bytes  # here: a run needs it only at its end

    predicted = Counter(step_traffic_bytes(plan, shape, adapter_rank)) + Counter(all_reduce=scalars_bytes(plan, shape))
    groups = max(counted["groups"], default=0)
    title = f"messages of a step, all ranks; at most {count(groups, 'group')} on a rank"
    shown = table("", "calls", "predicted MiB", "counted MiB", title=title)
    for kind, size in counted["bytes"].items():
        if size or predicted[kind]:
            guess, calls = predicted[kind] / MIB, counted["calls"][kind]
            shown.add_row(kind.replace("_", "-"), str(calls), f"{guess:.3f}", f"{size / MIB:.3f}")
    return shown


class Health:
    """Warnings from the log of one run under a plan, each once."""

    def __init__(
        self,
        plan: Plan,
        mfu: Callable[[float], float | None] = lambda tokens_per_s: None,
        steps: int | None = None,
        on: str = "GPU",
    ):
        """`mfu`: by tokens/s. `steps`: of the whole run, for ETA. `on`: the device of a rank."""
        self._steps, self._on = steps, on
        self._plan, self._predicted = plan, Predicted.of(plan)
        self._mfu = mfu
        self._said: set[str] = set()

    def line(self, records: Log) -> str:
        """Progress of the run: its last step, speed and memory of the latest steps, and the plan's prediction."""
        last, latest = records[-1], records[-WINDOW_STEPS:]
        tokens_per_s = median(record["tokens_per_s"] for record in latest)
        step_s = median(record["step_time_s"] for record in latest)
        parts = [
            f"step {last['step']}" + (f"/{self._steps}" if self._steps else ""),
            f"loss {last['loss']:.4f}",
            f"lr {last['lr']:.3g}",
            f"grad norm {last['grad_norm']:.3g}",
            f"{tokens_per_s / self._plan.world_size:,.0f} tokens/s/{self._on}",
        ]
        if "filled" in last:
            targets_per_s = median(record["target_tokens_per_s"] for record in latest)
            parts.append(f"{targets_per_s:,.0f} target tokens/s, rows filled to {last['filled']:.0%}")
        if share := self._mfu(tokens_per_s):
            parts.append(f"MFU {share:.1%}")
        parts.append(f"{last['step_time_s']:.4g} s (median {_compared(step_s, self._predicted.step_s, 's')})")
        stages = stage_peaks_mib(self._plan, latest)
        highest = max(range(len(stages)), key=lambda stage: stages[stage])
        guess_gib = self._predicted.memory_mib[highest] / GIB_MIB if self._predicted.memory_mib else None
        where = f" on stage {highest}" if len(stages) > 1 else ""
        parts.append(f"memory{where} " + _compared(stages[highest] / GIB_MIB, guess_gib, "GiB"))
        if load := measured_load(latest):
            planned = self._predicted.load and self._predicted.load.moe_imbalance
            parts.append(f"busiest rank of experts {_compared(load.usual, planned, 'x mean')}")
        if self._steps:
            parts.append(f"ETA {_duration((self._steps - last['step']) * step_s)}")
        return ", ".join(parts)

    def warnings(self, records: Log, start: int = 0) -> list[str]:
        """New warnings of figures off by more than `TOLERANCE`. `start`: the first step of this process."""
        settled = [record for record in records if record["step"] >= start + WARM_UP_STEPS][-WINDOW_STEPS:]
        if len(settled) < ENOUGH_STEPS:
            return []
        new = [(key, text) for key, text in self._drifts(settled) if key not in self._said]
        self._said.update(key for key, _ in new)
        return [text for _, text in new]

    def _drifts(self, records: Log) -> Iterator[tuple[str, str]]:
        step_s = median(record["step_time_s"] for record in records)
        if self._predicted.step_s and _is_off(step_s, self._predicted.step_s):
            yield (
                "time",
                f"a step takes {_compared(step_s, self._predicted.step_s, 's')}; measure again, then search again: "
                "galvatron profile computation" + " and galvatron profile hardware" * (self._plan.world_size > 1),
            )
        stages = stage_peaks_mib(self._plan, records)
        for stage, (peak_mib, guess_mib) in enumerate(zip(stages, self._predicted.memory_mib, strict=False)):
            if _is_off(peak_mib, guess_mib):
                yield (
                    f"memory of stage {stage}",
                    f"stage {stage} needs {_compared(peak_mib / GIB_MIB, guess_mib / GIB_MIB, 'GiB')}; measure again, "
                    "then search again: galvatron profile memory",
                )
        if (load := measured_load(records)) and self._predicted.load:
            for name, (holds, text) in load_verdicts(self._predicted.load, load).items():
                if not holds:
                    yield f"{name} of experts", text


def _duration(seconds: float) -> str:
    """`2 d 03:04:05`, without days where there is none."""
    days, rest = divmod(round(seconds), 24 * 3600)
    return (f"{days} d " if days else "") + f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"


def _is_off(measured: float, predicted: float) -> bool:
    return abs(measured / predicted - 1) > TOLERANCE


def _compared(measured: float, predicted: float | None, unit: str) -> str:
    """`1.3 s (predicted 1.2 s, +8%)`; a difference that rounds to none is +0%."""
    if not predicted:
        return f"{measured:.4g} {unit}"
    return f"{measured:.4g} {unit} (predicted {predicted:.4g} {unit}, {round(measured / predicted - 1, 2) + 0.0:+.0%})"


def out_of_memory_report(plan: Plan, records: Log, rank: int, peak_mib: float | None = None) -> Group:
    """Predicted and measured memory of each stage, and advice, to be printed.

    `records`: the lines of train_log.jsonl. `rank` ran out of memory at a peak of `peak_mib` MiB, if known.
    """
    predicted, stage = Predicted.of(plan), rank // plan.stage_size
    reached = dict(enumerate(stage_peaks_mib(plan, records))) if records else {}
    if peak_mib is not None:
        reached[stage] = max(peak_mib, reached.get(stage, 0.0))
    shown = table("stage", "predicted GiB", "measured GiB", "", left=("",))
    for each in range(plan.pipeline):
        guess = gib(predicted.memory_mib[each]) if predicted.memory_mib else "not in the plan"
        truth = gib(reached[each]) if each in reached else "no step done"
        shown.add_row(str(each), guess, truth, f"rank {rank} wanted more" if each == stage else "")
    return Group(shown, *(Text(line) for line in _advice(plan, predicted, stage, reached.get(stage))))


def _advice(plan: Plan, predicted: Predicted, stage: int, reached_mib: float | None) -> Iterator[str]:
    guess_mib = predicted.memory_mib[stage] if predicted.memory_mib else None
    known_mib = [mib for mib in (guess_mib, reached_mib) if mib]
    if known_mib:
        budget = MARGIN * (min(known_mib) + predicted.reserve_mib) / GIB_MIB
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
