"""The result of a search: the plan, the rejected ones with reasons, the runners-up; in a few lines, and as JSON."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Any

from rich.table import Table

from ..base import GIB_MIB, count
from ..base.printing import table
from ..cost_model import CostModel, PlanFacts
from ..plan import ModelShape
from ..plan.export import PROGRAMS, gaps
from ..planner.hints import Hint
from ..planner.result import SHOWN_GAP, Candidate, FamilyOutcome, Need, SearchResult
from .plan import certificate, describe


def explain(
    result: SearchResult, shape: ModelShape | None = None, cost: CostModel | None = None
) -> Iterator[str | Table]:
    """Lines and tables, to be printed one below the other. `shape`: of a model with identical layers. `cost`: for the
    speed of a device."""
    if result.best:
        best = result.best
        if cost:
            yield PlanFacts(best.plan, best.prediction, cost, shape).speed_words
        yield (
            f"{best.time_s:.4g} s a step, {best.samples_per_s:.4g} samples/s{beside_fastest(result)}; "
            f"{certificate(result.lower_bound_s, best.time_s, result.left_out_s)}"
        )
        yield from layer_wise(result)
        yield from describe(replace(best.plan, metadata={}), shape)
        yield from _memory(best)
    yield f"{len(result.outcomes)} families of plans searched in {result.search_time_s:.3g} s"
    if rejected := _rejected(result):
        yield rejected
    if result.best:
        yield from (runner_up(number, other, result.best) for number, other in enumerate(result.runners_up, 2))


def beside_fastest(result: SearchResult) -> str:
    """The fastest plan if the best one is simpler: `; 6 strategies would take 13.52 s`."""
    best, fastest = result.best, result.fastest
    if not best or not fastest or best.strategies == fastest.strategies:
        return ""
    return f"; {fastest.strategies} strategies would take {_seconds(fastest)} s"


def layer_wise(result: SearchResult) -> Iterator[str]:
    """The gain of layer-wise planning in a line, if it was searched."""
    gain, uniform = result.layer_wise_gain, result.uniform
    if gain and uniform:
        gap = f" (gap {result.uniform_gap:.2g})" if result.uniform_gap >= SHOWN_GAP else ""
        gains = "gains" if result.best and result.best.strategies > 1 else "would gain"
        yield f"layer-wise planning {gains} {gain:.2%}: one strategy for all layers takes {_seconds(uniform)} s{gap}"
    elif uniform:
        yield "layer-wise planning gains nothing: the fastest plan has one strategy for all layers"
    elif result.uniform_bound_s is not None:
        outcome = "fits" if result.uniform_bound_s == inf else "was found"
        yield f"no plan with one strategy for all layers {outcome}"


def layer_wise_summary(result: SearchResult) -> dict[str, Any]:
    """Layer-wise gains as JSON values."""
    uniform = result.uniform
    return {
        "fastest": _simplicity(result.fastest) | {"gap": result.fastest_gap} if result.fastest else None,
        "uniform": _simplicity(uniform) | {"gap": result.uniform_gap} if uniform else None,
        "layer_wise_gain": result.layer_wise_gain,
    }


def _simplicity(candidate: Candidate) -> dict[str, Any]:
    simplicity = {"strategies": candidate.strategies, "segments": candidate.segments}
    return {"time_s": candidate.time_s, "samples_per_s": candidate.samples_per_s, **shape_of(candidate), **simplicity}


def _seconds(candidate: Candidate) -> str:
    return f"{candidate.time_s:.4g}"


def summary(result: SearchResult, budget_mib: float, reserve_mib: float) -> dict[str, Any]:
    """The answer as JSON values: times in s (of stages in ms), memory in MiB."""
    counts = sorted(Counter(result.outcomes.values()).items())
    common = {
        "feasible": result.best is not None,
        "budget_mib": budget_mib,
        "reserve_mib": reserve_mib,
        "search_time_s": result.search_time_s,
        "counts": {outcome.name.lower(): number for outcome, number in counts},
    }
    if result.best is None:
        return common | {
            "least_memory_mib": result.need.enough_mib if result.need else None,
            "binds": _binding(result.need) if result.need else None,
        }
    best = result.best
    return common | {
        "throughput": best.samples_per_s,
        "time_s": best.time_s,
        "lower_bound_s": result.lower_bound_s,
        "gap": result.gap,
        "strategies": best.strategies,
        "segments": best.segments,
        **layer_wise_summary(result),
        "global_bsz": best.plan.global_batch,
        **shape_of(best),
        "bubble_share": best.prediction.bubble_share,
        "stages": [stage.summary() for stage in best.prediction.stages],
        "runners_up": [
            {
                "global_bsz": other.plan.global_batch,
                **shape_of(other),
                "throughput": other.samples_per_s,
                "time_s": other.time_s,
                "memory_mib": most_mib(other),
                "why": other.why_slower_than(best),
            }
            for other in result.runners_up
        ],
    }


def shape_of(candidate: Candidate) -> dict[str, Any]:
    """Micro-batches, stages and schedule, by the names of a plan's file."""
    plan = candidate.plan
    return {
        "chunks": plan.micro_batches,
        "pp_deg": plan.pipeline,
        "pipeline_type": plan.schedule.value,
        **({"virtual_pp_deg": plan.chunks} if plan.chunks > 1 else {}),
    }


def _binding(need: Need) -> dict[str, Any]:
    chunks = [need.plan.chunk_layers(need.stage, chunk) for chunk in range(need.plan.chunks)]
    return {
        "stage": need.stage,
        "layers": [[layers.start, layers.stop - 1] for layers in chunks],
        "term": need.term,
        "term_mib": need.term_mib,
        "part": need.part,
        "part_mib": need.part_mib,
    }


def most_mib(candidate: Candidate) -> float:
    return max(stage.memory.total_mib for stage in candidate.prediction.stages)


def _memory(best: Candidate) -> Iterator[str]:
    for number, stage in enumerate(best.prediction.stages):
        memory = stage.memory
        terms = {
            "model states": memory.states_mib,
            "activations": memory.activations_mib,
            "working": memory.working_mib,
            "reserve": memory.context_mib,
        }
        parts = ", ".join(f"{name} {mib / GIB_MIB:.2f}" for name, mib in terms.items())
        yield f"stage {number}: {memory.total_mib / GIB_MIB:.2f} GiB a device: {parts}"


def _rejected(result: SearchResult) -> Table | None:
    best = result.best and len(result.runners_up) + 1
    counts = Counter(result.outcomes.values())
    counts[FamilyOutcome.SOLVED] -= best or 0
    shown = table("", "outcome", left=("outcome",))
    shown.show_header = False
    for outcome in FamilyOutcome:
        if counts[outcome] > 0:
            shown.add_row(str(counts[outcome]), outcome.words)
    return shown if shown.row_count else None


def hint_line(hint: Hint, gpus_per_node: int | None = None) -> str:
    """One line. `gpus_per_node`: of a command that counts GPUs, not nodes, and that searches less than `search`."""
    words = []
    for name, value in hint.options.items():
        if name == "num_nodes" and gpus_per_node:
            name, value = "gpus", value * gpus_per_node
        elsewhere = "galvatron search " if gpus_per_node and name == "sp_space" else ""
        words.append(f"{elsewhere}--{'batch' if name == 'settle_bsz' else name}{'' if value is True else f' {value}'}")
    gain = "a plan fits" if hint.gain is None else f"{hint.gain:+.1%}"
    return f"hint: with {' '.join(words)} {gain}: {hint.tokens_per_s_per_gpu:,.0f} tokens/s/GPU"


def beside_free(best: Candidate, free: Candidate | None, trainer: str, model: ModelShape | None) -> list[str]:
    """The loss of a plan for another program's trainer, and the fields that cause it."""
    if free is None:
        return [f"{trainer} can run this plan; how much faster galvatron train would be was not found in time"]
    if free.samples_per_s <= best.samples_per_s:
        return [f"{trainer} can run this plan; galvatron train has none that is faster"]
    return [
        f"{trainer} can run this plan; the best plan of galvatron train is "
        f"{free.samples_per_s / best.samples_per_s - 1:.1%} faster: {free.time_s:.4g} s a step",
        *(f"  {each}" for each in gaps(free.plan, PROGRAMS[trainer], model)),
    ]


def runner_up(number: int, other: Candidate, best: Candidate) -> str:
    plan, stages = other.plan, other.plan.pipeline
    schedule = "" if stages == 1 else f" ({plan.schedule_words})"
    return (
        f"{number}. batch {plan.global_batch} in {count(plan.micro_batches, 'micro-batch', 'micro-batches')}, "
        f"{count(stages, 'stage')}{schedule}: "
        f"{other.time_s:.4g} s a step, {most_mib(other) / GIB_MIB:.2f} GiB; {other.why_slower_than(best)}"
    )
