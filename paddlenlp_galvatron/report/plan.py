"""A plan for people: its facts, and a table of layer placement, equal layers as one line."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from math import inf
from pathlib import Path
from textwrap import fill
from typing import Any, Self

from pydantic import BaseModel, ValidationError
from rich.table import Table
from rich.text import Text

from ..base.printing import table
from ..base.text import count, gib, shortened
from ..plan import Assumption, Axis, LayerStrategy, ModelShape, Plan, Recompute, VocabStrategy, runs
from ..plan.check import misfits
from ..plan.mesh import STAGE
from ..plan.strategy import Predicted, gap_of, states_words

MOST_ROWS, LONGEST = 500, 2000  # rows of a table and characters of a cell, which print within a second


class Memory(BaseModel):
    """Memory of a stage, MiB a rank."""

    context_mib: float
    states_mib: float
    activations_mib: float
    working_mib: float


class StageSummary(BaseModel):
    """The search's prediction of a stage; times of a micro-batch."""

    memory_mib: float
    memory: Memory
    forward_ms: float
    backward_ms: float
    sync_ms: float


class Metadata(BaseModel):
    """The search's fields. Fields of other programs' files are shown unchanged."""

    @classmethod
    def of(cls, content: Any) -> Self | None:
        try:
            return cls.model_validate(content)
        except ValidationError:
            return None


def certificate(lower_bound_s: float, time_s: float, left_out_s: float) -> str:
    """The bound of a search, and the plans for which it is proven."""
    scope = "searched to the end" if left_out_s < time_s else "of the space"
    return f"no plan {scope} takes less than {lower_bound_s:.4g} s (gap {gap_of(lower_bound_s, time_s):.2g})"


class Searched(Metadata):
    """The search's prediction."""

    time_s: float
    samples_per_s: float
    lower_bound_s: float | None = None  # bound of a searched plan
    left_out_s: float = inf  # bound of the families that it leaves out
    stages: list[StageSummary]


class ProfilePath(BaseModel):
    """A profile file."""

    path: str


class PlanOrigin(Metadata):
    """Inputs of the search; the file has more, such as hashes."""

    model: str
    num_nodes: int
    num_gpus_per_node: int
    memory_constraint_gb: float
    profiles: list[ProfilePath]
    assumptions: dict[str, Assumption] = {}
    options: dict[str, Any] = {}
    model_options: dict[str, Any] = {}  # options as the user gave them

    @property
    def facts(self) -> list[tuple[str, str]]:
        folders = dict.fromkeys(str(Path(file.path).parent) for file in self.profiles)
        words = (
            f"for {self.model} on {self.num_nodes} x {self.num_gpus_per_node} devices of "
            f"{self.memory_constraint_gb:.4g} GiB; "
            + (f"profiles in {', '.join(folders)}" if folders else "derived from a data sheet")
        )
        facts = {"searched": words, "rests on": _by_origin(self.assumptions), "options": _words(self.options)}
        return [(name, value) for name, value in facts.items() if value]


def assumed(assumptions: Mapping[str, Assumption]) -> str:
    """The numbers and choices that an answer rests on, in a few lines."""
    return fill(f"assumptions: {_by_origin(assumptions)}", 118, subsequent_indent="  ", break_on_hyphens=False)


def _by_origin(assumptions: Mapping[str, Assumption]) -> str:
    origins = dict.fromkeys(assumption.origin for assumption in assumptions.values())
    named = {origin: [str(each) for each in assumptions.values() if each.origin == origin] for origin in origins}
    return "; ".join(f"{origin}: {', '.join(words)}" for origin, words in named.items())


def assumed_summary(assumptions: Mapping[str, Assumption]) -> dict[str, Any]:
    """The same for programs."""
    return {"assumptions": {name: assumption._asdict() for name, assumption in assumptions.items()}}


def describe(plan: Plan, shape: ModelShape | None = None) -> list[Table]:
    """Facts and layers of a plan, and the search's prediction of its stages, to be printed one below the other."""
    facts = Table.grid(padding=(0, 2, 0, 0))
    for name, value in [*_facts(plan, shape), *(("note", note) for note in notes(plan, shape))]:
        facts.add_row(name, Text(shortened(value, LONGEST)))
    searched = Searched.of(plan.metadata.get("predicted"))
    return [facts, _table(plan), *([_stages(searched)] if searched else [])]


def _facts(plan: Plan, shape: ModelShape | None) -> list[tuple[str, str]]:
    micro_batches = count(plan.micro_batches, "micro-batch", "micro-batches")
    uneven = plan.global_batch % plan.micro_batches
    samples = f"at most {plan.micro_batch + 1}" if uneven else plan.micro_batch
    facts = [
        (
            "ranks",
            f"{plan.world_size} in {count(plan.pipeline, 'stage')}"
            + (f" of {plan.stage_size}" if plan.world_size % plan.pipeline == 0 else "")
            + (f", {plan.schedule_words}" if plan.pipeline > 1 else ""),
        ),
        ("batch", f"{count(plan.global_batch, 'sample')} a step, {micro_batches} of {samples}"),
        ("assumed", _assumed(plan)),
    ]
    if shape:
        facts.append(("model", f"{shape.name}, {shape.parameters / 1e9:.3g} billion parameters"))
    predicted, searched = (plan.metadata.get(name) or {} for name in ("predicted", "searched_from"))
    if by_search := Searched.of(predicted):
        forecast = f"{by_search.time_s:.4g} s a step, {by_search.samples_per_s:.4g} samples/s"
        if plan.assumed.seq_length:
            forecast += f", {by_search.samples_per_s * plan.assumed.seq_length / plan.world_size:,.0f} tokens/s/GPU"
        if (bound_s := by_search.lower_bound_s) is not None:
            forecast += f"; {certificate(bound_s, by_search.time_s, by_search.left_out_s)}"
        facts.append(("predicted", forecast))
        if load := Predicted.of(plan).load:
            facts.append(("load", str(load)))
    else:
        facts += [("predicted", line) for line in islice(_lines(predicted), MOST_ROWS)]
    if origin := PlanOrigin.of(searched):
        return [*facts, *origin.facts]
    if searched.keys() == {"model", "model_options"}:  # of one strategy for all layers, which no search chose
        return [*facts, ("made for", str(searched["model"]))]
    return [*facts, *(("searched_from", line) for line in islice(_lines(searched), MOST_ROWS))]


def _stages(searched: Searched) -> Table:
    """Numbers of each stage."""
    title = "predicted of each stage: memory, GiB a rank; time of a micro-batch, ms"
    shown = table(
        *("stage", "memory", "states", "activations", "working", "reserve", "forward", "backward", "sync"), title=title
    )
    for number, stage in enumerate(searched.stages[:MOST_ROWS]):
        memory = stage.memory
        mib = (stage.memory_mib, memory.states_mib, memory.activations_mib, memory.working_mib, memory.context_mib)
        times = (stage.forward_ms, stage.backward_ms, stage.sync_ms)
        numbers = (f"{value:,.0f}" if value >= 1000 else f"{value:.4g}" for value in times)
        shown.add_row(str(number), *map(gib, mib), *numbers)
    return shown


def _assumed(plan: Plan) -> str:
    assumed = plan.assumed
    words = {
        "mixed_precision": str(assumed.mixed_precision),
        "seq_length": f"{assumed.seq_length} tokens",
        "sequence_parallel": f"Megatron-SP {'on' if assumed.sequence_parallel else 'off'}",
        "async_grad_reduce": f"gradients reduced every {'step' if assumed.async_grad_reduce else 'micro-batch'}",
        "fp32_gradients": f"gradients summed in {'fp32' if assumed.fp32_gradients else assumed.mixed_precision}",
        "flash_attention": f"{'flash' if assumed.flash_attention else 'plain'} attention",
        "fused_rope": f"{'fused' if assumed.fused_rope else 'plain'} rotary positions",
        "fused_rms_norm": f"{'fused' if assumed.fused_rms_norm else 'plain'} RMSNorm",
        "fused_cross_entropy": f"{'fused' if assumed.fused_cross_entropy else 'plain'} cross entropy",
        "offload_optimizer": f"optimizer states on the {'host' if assumed.offload_optimizer else 'device'}",
    }
    return ", ".join(text for name, text in words.items() if name in plan.stated) or "nothing; training's flags decide"


def _table(plan: Plan) -> Table:
    extra = _extra(plan)
    experts = ("experts' ep", "tp", "dp", "states") if any(map(_has_experts, plan.layers)) else ()
    titles = ("stage", "layers", "split by", "degree", *extra, "dp", "model states", "recompute", "groups", *experts)
    shown = table(*titles, left=titles)
    shown.add_row("0", "embedding", *_cells(plan, plan.vocab, extra))
    for row in islice(_rows(plan, extra), MOST_ROWS):
        shown.add_row(*row[: len(titles)])
    if shown.row_count > MOST_ROWS:
        shown.add_row("…", "the file has the rest")
    shown.add_row(str(plan.pipeline - 1), "LM head", *_cells(plan, plan.vocab, extra))
    return shown


def _rows(plan: Plan, extra: Sequence[Axis]) -> Iterator[list[str]]:
    for stage in range(plan.pipeline):
        for chunk in range(plan.chunks):
            layers = plan.chunk_layers(stage, chunk)
            for run, strategy in runs([plan.layers[layer] for layer in layers]):
                start, stop = layers[run[0]], layers[run[-1]]
                name, cells = str(start) if start == stop else f"{start}-{stop}", _cells(plan, strategy, extra)
                experts = strategy.experts
                dp = _ranks_left(plan, experts.ranks)
                states = states_words(experts.dp_type, experts.sharding)
                yield [str(stage), name, *cells, str(experts.ep), str(experts.etp), dp, states]


def _cells(plan: Plan, strategy: LayerStrategy | VocabStrategy, extra: Sequence[Axis]) -> list[str]:
    layer = strategy.as_layer() if isinstance(strategy, VocabStrategy) else strategy
    split = "-" if layer.degree == 1 else "sequence" if layer.ulysses else "weights"
    groups = "-" if layer.ranks == 1 else "neighbours" if layer.consecutive else "strided"
    degrees = [str(layer.degree), *(str(dict(layer.extra)[axis]) for axis in extra)]
    states = states_words(layer.dp_type, layer.sharding)
    return [split, *degrees, _ranks_left(plan, layer.ranks), states, _recomputed(layer), groups]


def _ranks_left(plan: Plan, ranks: int) -> str:
    """The data-parallel degree of a stage in which `ranks` ranks share a sample; None if they do not divide it."""
    size, rest = divmod(plan.world_size, plan.pipeline * ranks)
    return "-" if rest else str(size)


def _has_experts(layer: LayerStrategy) -> bool:
    """Whether a strategy has fields of experts."""
    return layer.experts.ranks > 1 or layer.experts_dp_type is not None or layer.experts_sharding is not None


def _extra(plan: Plan) -> list[Axis]:
    """The axes besides that of `degree` that any layer has: a column each."""
    used = {axis for strategy in (*plan.layers, plan.vocab) for axis, degree in strategy.extra if degree > 1}
    return [axis for axis in STAGE if axis in used]


def _recomputed(layer: LayerStrategy) -> str:
    words = {Recompute.NONE: "no", Recompute.FULL: "yes"}
    away = f", {layer.offload} % offloaded" if layer.offload else ""
    return words.get(layer.recompute, layer.recompute.words.replace("+", ", ")) + away


def notes(plan: Plan, shape: ModelShape | None) -> list[str]:
    """Notes on a plan in addition to its fields, a sentence each."""
    read = [*([plan.note] if plan.note else []), *(f"cannot run: {fault}" for fault in misfits(plan, shape))]
    if any(1 < layer.ep < plan.stage_size for layer in plan.layers):
        read.append(
            "ranks that share experts out are neighbours here, as in Megatron; in Galvatron, which trains the same by "
            "this file, they are strided"
        )
    if (pieces := plan.vocab.pieces) > 1:
        read.append(
            f"LM head and loss take a rank's tokens in {pieces} pieces, one after the other: the logits of all of them "
            "never exist at once"
        )
    if shape is None or shape.vocab_size % plan.vocab.tp == 0:
        return read
    padded = shape.padded_vocab_size(plan.vocab.tp)
    return [
        *read,
        f"the vocabulary of {shape.vocab_size} is padded to {padded} so that vtp {plan.vocab.tp} divides it; "
        "the padding never learns nor shows in the loss",
    ]


def _lines(values: dict[str, Any]) -> Iterator[str]:
    """One line for each value; for a list of objects, such as stages, one line for each object."""
    for name, value in values.items():
        if isinstance(value, list) and any(isinstance(item, dict) for item in value):
            yield from (f"{name} {index}: {_words(item)}" for index, item in enumerate(value))
        else:
            yield f"{name} {_words(value)}"


def _words(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(_words, value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(item)}" for name, item in value.items())
    return str(value)
