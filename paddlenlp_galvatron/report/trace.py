"""The predicted time line of a step as Chrome-trace events, in the form of the measured one: a process per stage, named
by its first rank."""

from collections.abc import Iterable, Iterator

from ..base.tracing import Event
from ..base.units import US_PER_MS
from ..cost_model import CostModel, LayerCost, Prediction, timeline
from ..plan import ByKind, Plan

MOST_EVENTS = 200_000  # limit for showing the layers of passes; larger traces show only passes
SHORTEST_MS = 1e-6  # shortest span that is shown

Piece = tuple[str, str, float]  # name, category, ms


def predicted_events(plan: Plan, cost: CostModel, prediction: Prediction) -> list[Event]:
    """Events of one step that begins at 0."""
    spans = timeline(plan.schedule, prediction.times, plan.micro_batches)
    passes = 2 * plan.micro_batches
    detailed = passes * 3 * (len(plan.layers) + 2 * len(plan.stages)) <= MOST_EVENTS
    inside = {
        (stage, chunk): _inside(plan, cost, stage, chunk)
        for stage in range(plan.pipeline if detailed else 0)
        for chunk in range(plan.chunks)
    }
    events: list[Event] = []
    free = [0.0] * plan.pipeline
    step_ms = prediction.time_s * 1000
    for span in spans:
        rank = span.stage * plan.stage_size
        events += _event("wait", "wait", free[span.stage], span.start_ms, rank)
        if span.work is None:
            name, category = "end of step", "sync"
            pieces: Iterable[Piece] = _sync(cost.stage_parts(plan, span.stage))
        else:
            chunk = f", chunk {span.work.chunk}" if plan.chunks > 1 else ""
            category = span.work.kind
            name = f"{category} {span.work.micro_batch}{chunk}"
            pieces = inside[span.stage, span.work.chunk].of(span.work.kind) if detailed else []
        events += _event(name, category, span.start_ms, span.stop_ms, rank)
        start = span.start_ms
        for piece, kind, ms in pieces:
            events += _event(piece, kind, start, start + ms, rank)
            start += ms
        free[span.stage] = span.stop_ms
    for stage, end in enumerate(free):
        events += _event("wait", "wait", end, step_ms, stage * plan.stage_size)
    return events


def rank_names(plan: Plan) -> dict[int, str]:
    """Names a process of the trace."""
    size = plan.stage_size
    return {
        stage * size: f"rank {stage * size}, predicted for all {size} of stage {stage}"
        for stage in range(plan.pipeline)
    }


def _event(name: str, category: str, start_ms: float, stop_ms: float, rank: int) -> list[Event]:
    if stop_ms - start_ms < SHORTEST_MS:
        return []
    length_us = (stop_ms - start_ms) * US_PER_MS
    return [
        {"name": name, "cat": category, "ph": "X", "ts": start_ms * US_PER_MS, "dur": length_us, "pid": rank, "tid": 0}
    ]


def _inside(plan: Plan, cost: CostModel, stage: int, chunk: int) -> ByKind[list[Piece]]:
    """Terms of a forward and a backward pass of a stage's chunk, in order."""
    parts, switches = cost.chunk_parts(plan, stage, chunk), cost.chunk_switches(plan, stage, chunk)
    names = [f"layer {layer}" for layer in plan.chunk_layers(stage, chunk)]
    if plan.is_first(stage, chunk):
        names.insert(0, "embedding, LM head" if plan.is_last(stage, chunk) else "embedding")
    elif plan.is_last(stage, chunk):
        names.append("LM head")
    else:
        names.insert(0, "input")
    forward: list[Piece] = []
    backward: list[Piece] = []
    for name, module in zip(names, parts, strict=True):
        there, back = module.terms.passes
        forward += [
            (name, "compute", there.compute_ms),
            ("gather weights", "collective", there.gather_ms),
            ("split layer", "collective", there.tensor_ms),
            ("copy activations", "collective", there.offload_ms),
            ("exchange of experts' rows", "collective", there.expert_ms),
        ]
        again: list[Piece] = [(f"{name} recompute", "compute", back.recompute_ms)]
        backward = [
            *again,
            (name, "compute", back.compute_ms),
            ("gather weights", "collective", back.gather_ms),
            ("exchange of experts' rows", "collective", back.expert_ms),
            ("split layer", "collective", back.tensor_ms),
            ("copy activations", "collective", back.offload_ms),
            ("reduce gradients", "collective", back.reduce_ms),
            *backward,
        ]
    forward.append(("resharding", "collective", sum(ms for ms, _ in switches)))
    backward.append(("resharding", "collective", sum(ms for _, ms in switches)))
    return ByKind(forward, backward)


def _sync(parts: list[LayerCost]) -> Iterator[Piece]:
    """Terms after the last backward of a stage."""
    terms = [module.terms for module in parts]
    reduce_ms = sum(each.finish_ms + each.reduce_ms for each in terms)
    yield "reduce gradients", "collective", reduce_ms
    yield "optimizer", "optimizer", sum(each.optimizer_ms for each in terms)
    yield "gather updated weights", "collective", sum(each.publish_ms for each in terms)
