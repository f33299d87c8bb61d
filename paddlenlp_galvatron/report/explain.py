"""An explained plan as text and JSON: time and memory by term, bottlenecks, and the best plans under changes."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from math import isfinite
from typing import Any

from rich.table import Table

from ..base import GIB_MIB, gib
from ..base.printing import table
from ..cost_model import Prediction
from ..cost_model.facts import COMMUNICATION, MEMORY, TIME, PlanFacts, StageBreakdown, strategy_words
from ..plan.strategy import load_summary
from ..planner.explain import ASSUMED, INTERLEAVING, Explanation, OtherStrategy, WhatIf
from ..planner.result import Candidate
from ..planner.whole_run import Job
from .fit import in_words
from .plan import assumed, assumed_summary, certificate, describe
from .search import beside_fastest, layer_wise, layer_wise_summary, runner_up, shape_of

COLUMNS = 4  # stages side by side: 80 characters
MOST_COLUMNS = 8  # stages in a table; of more, the busiest and those with the highest peaks
LARGE = 1000.0  # larger numbers have no decimals
MOST_OTHERS = 12  # other strategies of a layer that are shown
UNCERTAIN = "at least: the search was not taken to its end; a plan that gains more may exist"


def printed(explanation: Explanation, job: Job | None = None) -> Iterator[str | Table]:
    """Lines and tables, to be printed one below the other."""
    yield from before_searches(explanation)
    yield from by_searches(explanation, job)


def before_searches(explanation: PlanFacts) -> Iterator[str | Table]:
    """The lines and tables that need no search."""
    plan, prediction = explanation.plan, explanation.prediction
    yield (
        f"{prediction.time_s:.4g} s a step, {prediction.samples_per_s:.4g} samples/s, "
        f"{prediction.bubble_share:.1%} pipeline bubble"
    )
    yield explanation.speed_words
    yield assumed(explanation.assumptions)
    if (needs := explanation.memory_mib) > explanation.budget_mib:
        yield f"note: the plan does not fit: it needs {gib(needs)} GiB a GPU, of {gib(explanation.budget_mib)}"
    yield from describe(replace(plan, metadata={}), explanation.shape)
    shown = _shown(explanation)
    if len(shown) < len(explanation.stages):
        yield f"{len(explanation.stages)} stages; shown are those that work longest or need most memory"
    blocks = [shown[first : first + COLUMNS] for first in range(0, len(shown), COLUMNS)]
    yield "\ntime of a step on each stage, ms (in brackets: overlapped with computation)"
    yield from (_time_table(explanation.stages, block) for block in blocks)
    yield f"\nmemory of a device on each stage, GiB, of {gib(explanation.budget_mib)}"
    yield from (_memory_table(explanation.stages, block) for block in blocks)
    if away := max(stage.memory.host_mib for stage in prediction.stages):
        yield f"offloaded to the hosts' memory: at most {gib(away)} GiB a device"


def by_searches(explanation: Explanation, job: Job | None = None) -> Iterator[str | Table]:
    """The lines and tables that need searches."""
    yield "\nbottlenecks"
    yield from binding(explanation)
    yield "\nthe best plans of this batch"
    yield from _runners_up(explanation)
    one_layer = explanation.one_layer
    scope = f" (the best of {one_layer.tried} of its layers)" if one_layer.tried < one_layer.count else ""
    yield f"\none layer more under another strategy{scope}"
    yield _others(one_layer.others, explanation.prediction)
    if len(one_layer.others) > MOST_OTHERS:
        yield f"… and {len(one_layer.others) - MOST_OTHERS} more; --json has all"
    yield "\nwhat if (each found by a search)"
    yield _what_ifs(explanation)
    if any(item.is_open for item in explanation.what_ifs):
        yield UNCERTAIN
    yield from (f"{item.name}, {item.change}: {item.why_not}" for item in explanation.what_ifs if item.why_not)
    yield from changed_assumptions(explanation)
    if job and job.days:
        yield f"\nthe whole training: {job}"


def changed_assumptions(explanation: Explanation) -> Iterator[str]:
    """The step time of this plan under a changed assumption, and the plan that is then fastest."""
    step_s, plan = explanation.prediction.time_s, in_words(explanation.plan)
    for item in explanation.what_ifs:
        if item.plan and item.name in (*ASSUMED, INTERLEAVING):
            more = [f"this plan takes {item.unchanged_s / step_s:.2f} x as long"] if item.unchanged_s else []
            best = in_words(item.plan)
            words = "this plan" if best == plan else f"{best}: {item.time_s / step_s:.2f} x"
            verb = "found is" if item.is_open else "would be"
            yield f"{item.name}, {item.change}: {'; '.join([*more, f'the fastest {verb} {words}'])}"


def binding(explanation: Explanation) -> list[str]:
    """The bottlenecks of a plan, a sentence each."""
    stages, prediction = explanation.stages, explanation.prediction
    full, busy = explanation.fullest, explanation.busiest
    memory = stages[full].memory_mib
    most = max((key for key in MEMORY if key != "free"), key=lambda key: memory[key])
    step_ms = prediction.time_s * 1000
    free = f"{gib(abs(memory['free']))} GiB {'is free' if memory['free'] >= 0 else 'is missing'}"
    lines = [f"memory of stage {full}: {free} of {gib(explanation.budget_mib)}; most of it is {MEMORY[most]}"]
    if explanation.spared_mib > 0:
        spared = gib(explanation.spared_mib)
        lines.append(f"Megatron-SP on stage {full}: gathers tokens again in backward, which spares {spared} GiB")
    if len(stages) > 1:
        share = stages[busy].busy_ms / step_ms
        lines.append(f"compute of stage {busy}: busy {share:.1%} of the step, the other stages wait for it")
    term = max(COMMUNICATION, key=lambda key: stages[busy].time_ms[key])
    if stages[busy].time_ms[term]:
        share = stages[busy].time_ms[term] / step_ms
        lines.append(f"communication of stage {busy}: mostly {TIME[term]}, {share:.1%} of the step")
    if lost_ms := explanation.imbalance_ms:
        share = lost_ms / step_ms
        lines.append(f"load imbalance of experts: {lost_ms:.4g} ms of a step, {share:.1%}, as {explanation.cost.load}")
    lines += explanation.cost.options.task.notes(explanation.cost.has_experts)
    if (pieces := explanation.plan.vocab.pieces) > 1:
        vocab = replace(explanation.plan.vocab, pieces=1)
        whole = explanation.cost.predict(replace(explanation.plan, vocab=vocab))
        saved = whole.stages[-1].memory.total_mib - prediction.stages[-1].memory.total_mib
        more = prediction.time_s / whole.time_s - 1
        lines.append(f"loss in {pieces} pieces of tokens: saves {gib(saved)} GiB, and the step takes {more:.1%} longer")
    speeds = [item for item in explanation.what_ifs if item.name.startswith("links") and isfinite(item.time_s)]
    if speeds:
        link, faster = min(speeds, key=lambda item: item.time_s), explanation.faster
        gain = 1 - link.time_s / (faster or prediction).time_s
        whose = "the best plan's step" if faster else "a step"
        lines.append(f"{link.name}: twice as fast, {whose} takes {gain:.1%} less")
    return lines


def summary(explanation: Explanation, job: Job | None = None) -> dict[str, Any]:
    """The explanation as JSON values: times of stages in ms, of steps in s, memory in MiB."""
    plan, prediction = explanation.plan, explanation.prediction
    best = explanation.searched.best
    return {
        "time_s": prediction.time_s,
        "samples_per_s": prediction.samples_per_s,
        "bubble_share": prediction.bubble_share,
        "budget_mib": explanation.budget_mib,
        **assumed_summary(explanation.assumptions),
        "imbalance_ms": explanation.imbalance_ms,
        "stages": [asdict(stage) | {"busy_ms": stage.busy_ms} for stage in explanation.stages],
        "binds": binding(explanation),
        "best": _of(best) | {"gap": explanation.searched.gap} if best else None,
        "runners_up": [
            _of(other) | {"why": other.why_slower_than(best)} for other in explanation.searched.runners_up if best
        ],
        **layer_wise_summary(explanation.searched),
        "one_layer_more": [
            {
                "layer": other.layer,
                "strategy": strategy_words(other.strategy),
                "time_s": other.prediction.time_s,
                "memory_mib": other.memory_mib,
                "fits": other.fits,
            }
            for other in explanation.one_layer.others
        ],
        "layers_tried": explanation.one_layer.tried,
        "layers_that_differ": explanation.one_layer.count,
        "what_if": [
            {
                "name": item.name,
                "change": item.change,
                "time_s": item.time_s if isfinite(item.time_s) else None,
                "samples_per_s": item.samples_per_s,
                "tokens_per_s": item.tokens_per_s,
                "gap": item.gap,
                "why_not": item.why_not or None,
                "unchanged_s": item.unchanged_s,
            }
            for item in explanation.what_ifs
        ],
        "batch": plan.global_batch,
        "load": load_summary(explanation.cost.load),
    }


def _of(candidate: Candidate) -> dict[str, Any]:
    return {"time_s": candidate.time_s, "samples_per_s": candidate.samples_per_s, **shape_of(candidate)}


def _shown(explanation: PlanFacts) -> list[int]:
    stages = explanation.stages
    if len(stages) <= MOST_COLUMNS:
        return list(range(len(stages)))
    by_time = sorted(range(len(stages)), key=lambda stage: -stages[stage].busy_ms)
    by_memory = sorted(range(len(stages)), key=lambda stage: stages[stage].memory_mib["free"])
    return sorted({0, len(stages) - 1, *by_time[:3], *by_memory[:3]})


def _time_table(stages: Sequence[StageBreakdown], shown: Sequence[int]) -> Table:
    chosen = [stages[stage] for stage in shown]
    made = table("", *(f"stage {stage}" for stage in shown))
    for key, name in TIME.items():
        hidden = [round(stage.hidden_ms.get(key, 0.0), 1) for stage in chosen]
        if any(stage.time_ms[key] for stage in chosen) or any(hidden):
            made.add_row(name, *(_cell(stage.time_ms[key]) for stage in chosen))
        if any(hidden):
            made.add_row("  overlapped", *(f"({_cell(ms)})" for ms in hidden))
    made.add_row("step", *(_cell(sum(stage.time_ms.values())) for stage in chosen))
    if any(stage.hand_over_ms for stage in chosen):
        made.add_row("P2P to the next stage", *(f"({_cell(stage.hand_over_ms)})" for stage in chosen))
    return made


def _memory_table(stages: Sequence[StageBreakdown], shown: Sequence[int]) -> Table:
    chosen = [stages[stage] for stage in shown]
    made = table("", *(f"stage {stage}" for stage in shown))
    for key, name in MEMORY.items():
        if any(stage.memory_mib[key] for stage in chosen):
            made.add_row(name, *(gib(stage.memory_mib[key]) for stage in chosen))
    made.add_row("budget", *(gib(sum(stage.memory_mib.values())) for stage in chosen))
    return made


def _cell(value: float) -> str:
    return f"{round(value, 1) + 0.0:.1f}" if abs(value) < LARGE else f"{value:.0f}"  # nothing has no sign


def _runners_up(explanation: Explanation) -> Iterator[str]:
    result, prediction = explanation.searched, explanation.prediction
    if result.best is None:
        yield f"none fits: {result.need}" if result.need else "none was found in the time that searches have here"
        return
    if explanation.faster:
        slower = prediction.time_s / explanation.faster.time_s - 1
        is_what = "the simplest within the tolerance, " if explanation.is_simplest else ""
        words = f"this plan is {is_what}{slower:.1%} slower than the best one of its batch"
        yield words if explanation.is_searched else f"{words}; galvatron search finds that"
    else:
        words = "no faster plan was found" if result.fastest_gap or result.left_out else "this plan is the best one"
        compared = beside_fastest(result) if prediction.time_s >= result.best.time_s else ""
        words = "this plan is the simplest within the tolerance" if compared else words
        yield f"{words}{compared}; {certificate(result.lower_bound_s, prediction.time_s, result.left_out_s)}"
    yield from (f"note: {line}" for line in result.left_out)
    for number, other in enumerate(result.runners_up, 2):
        yield runner_up(number, other, result.best)
    yield from layer_wise(result)


def _others(others: Sequence[OtherStrategy], prediction: Prediction) -> Table:
    made = table("strategy", "layer", "step, ms", "", "memory, GiB", "")
    step_ms = prediction.time_s * 1000
    now_mib = max(stage.memory.total_mib for stage in prediction.stages)
    for other in others[:MOST_OTHERS]:
        ms = other.prediction.time_s * 1000
        made.add_row(
            strategy_words(other.strategy),
            str(other.layer),
            f"{ms:.1f}",
            f"{ms - step_ms:+.1f}",
            gib(other.memory_mib),
            f"{(other.memory_mib - now_mib) / GIB_MIB:+.2f}" if other.fits else "does not fit",
        )
    return made


def _what_ifs(explanation: Explanation) -> Table:
    made = table("", "change", "step, s", "tokens/s", "")
    seq = explanation.question.options.seq_length or 0
    now = explanation.prediction.samples_per_s * seq
    made.add_row("as planned", "", f"{explanation.prediction.time_s:.4g}", f"{now:,.0f}")
    answers = [item for item in explanation.what_ifs if not item.why_not]
    if faster := explanation.faster:
        speed, gap = faster.samples_per_s, explanation.searched.fastest_gap
        best = WhatIf("the best plan", "as things are", faster.plan, faster.time_s, speed, speed * seq, gap)
        answers.insert(0, best)
    for item in answers:
        made.add_row(item.name, item.change, f"{item.time_s:.4g}", f"{item.tokens_per_s:,.0f}", item.gain(now))
    return made
