"""Reasons for a plan: the runners-up, the best plan after one change and under other budgets, each by a search; and the
plan's cost with one layer changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any

from ..base.errors import GalvatronError, Infeasible
from ..cost_model import CostModel, PlanFacts, Prediction
from ..plan import LayerStrategy, Plan, runs
from ..profiles.hardware import Collective, HardwareProfile, MessageGroup
from ..profiles.network import Network
from .options import MOST_CHUNKS
from .question import Question, SharedTime
from .result import SHOWN_GAP, Candidate, SearchResult
from .space import PlanFamily, Space

SAME = 1e-6  # share of a step by which rounding may change a time
SEARCHES_S = 15.0  # time that all searches share; in usual spaces they take a few seconds
FIRST = 4  # shares of the first search, whose plans start the others
RUNNERS_UP = 4  # plans of other families that are shown after the best one
FRONTIER_S = 8.0  # time that its searches share
BUDGETS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)  # share of the plan's budget, for the frontier
BETWEEN_STAGES = "links between stages"
ASSUMED = NETWORK, IMBALANCE = "network", "expert load imbalance"
INTERLEAVING = "interleaving"
MOST_CHANGES = 14  # tried changes, and one more share for interleaving
MOST_PRICED = 1200  # plans with one layer changed: a few seconds


@dataclass(frozen=True, kw_only=True)
class Explanation(PlanFacts):
    """The facts of a plan, the runners-up, and what would change it."""

    question: Question
    searched: SearchResult  # the best plans of this batch, the plan's family among them
    one_layer: OneLayerChanged
    what_ifs: list[WhatIf]

    @property
    def faster(self) -> Candidate | None:
        """The best plan of this batch; None: this plan."""
        best = self.searched.best
        return best if best and best.time_s < self.prediction.time_s / (1 + SAME) else None

    @property
    def imbalance_ms(self) -> float:
        """Step time that a perfectly balanced load of experts would save."""
        if not self.cost.load:
            return 0.0
        even = self.question.changed(moe_imbalance=1.0).cost.predict(self.plan)
        return (self.prediction.time_s - even.time_s) * 1000

    @property
    def is_searched(self) -> bool:
        """Whether a search wrote the plan."""
        predicted = self.plan.metadata.get("predicted")
        return isinstance(predicted, dict) and "lower_bound_s" in predicted

    @property
    def is_simplest(self) -> bool:
        """Whether no found plan within the tolerance has fewer strategies."""
        candidate, best, fastest = Candidate(self.plan, self.prediction), self.searched.best, self.searched.fastest
        if not best or not fastest:
            return False
        most_s = fastest.time_s * (1 + self.question.options.simplest_within / 100)
        return candidate.time_s <= most_s and candidate.strategies <= best.strategies


def explain(plan: Plan, question: Question) -> Explanation:
    """Explain a plan by a dozen searches. Raises UserError where the plan cannot be priced."""
    one_layer = one_layer_changed(question, plan)
    time = SharedTime(min(SEARCHES_S, question.options.time_limit or SEARCHES_S), FIRST + MOST_CHANGES)
    searched = question.changed(top_k=RUNNERS_UP).search(known=[plan], seconds=time.take(FIRST))
    best = [candidate.plan for candidate in (searched.best, searched.fastest) if candidate]
    plans = [plan, *best, *(other.plan for other in searched.runners_up)]
    return Explanation(
        **vars(question.facts_of(plan)),
        question=question,
        searched=searched,
        one_layer=one_layer,
        what_ifs=list(what_ifs(question, plan, plans, time)),
    )


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """A budget, and the best step time under it."""

    memory_gb: float
    time_s: float | None  # None: no plan was found
    least_s: float  # no plan takes less; infinite: none fits

    @property
    def is_uncertain(self) -> bool:
        """Whether a faster plan may exist because the search was incomplete."""
        return self.time_s is not None and self.least_s < self.time_s * (1 - SAME)


def frontier(explanation: Explanation) -> list[FrontierPoint]:
    """The best step time of the plan's batch under budgets around the plan's, each found by a search that starts with
    the previous results."""
    question, points = explanation.question, []
    plans = [explanation.plan, *(what_if.plan for what_if in explanation.what_ifs if what_if.plan)]
    time = SharedTime(FRONTIER_S, len(BUDGETS))
    for share in BUDGETS:
        memory_gb = question.options.memory_gib * share
        try:
            changed = question.changed(memory_constraint=memory_gb)
            result = changed.search(known=plans, seconds=time.take(), compared=False)
            plans.append(result.plan)
            points.append(FrontierPoint(memory_gb, result.time_s, result.lower_bound_s))
        except GalvatronError as error:
            points.append(FrontierPoint(memory_gb, None, inf if isinstance(error, Infeasible) else 0.0))
    return points


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A change, and the best plan under it."""

    name: str  # such as memory
    change: str  # change in words
    plan: Plan | None
    time_s: float  # step time; infinite where no plan fits
    samples_per_s: float
    tokens_per_s: float
    gap: float = 0.0  # share of the time by which a better plan may be faster, if the search was incomplete
    why_not: str = ""  # reason where there is no answer
    unchanged_s: float | None = None  # step time of the unchanged plan under a changed assumption

    def gain(self, tokens_per_s: float) -> str:
        """Gain over `tokens_per_s`: `+4.4%`, or `at least +4.4%` if the search was incomplete."""
        return "at least " * self.is_open + f"{self.tokens_per_s / tokens_per_s - 1:+.1%}"

    @property
    def is_open(self) -> bool:
        """Whether a faster plan may exist, by a share that a table would show."""
        return not self.why_not and self.gap >= SHOWN_GAP


def what_ifs(question: Question, plan: Plan, plans: Sequence[Plan], time: SharedTime) -> Iterator[WhatIf]:
    """The best plan under each change, by a separate search that starts with the known plans."""
    options, hardware = question.options, question.cost.profiles.network.profile
    seq, batch, now = options.seq_length or 0, plan.global_batch, plan.micro_batches
    nodes = options.num_nodes

    def changed(
        name: str, change: str, length: int = seq, samples: int = batch, shares: int = 1, **changes: Any
    ) -> WhatIf:
        more = samples * length / (batch * seq or 1) * nodes / changes.get("num_nodes", nodes)  # tokens of a device
        begin = [plan for each in plans for plan in _split_otherwise(each, samples, more)]
        seconds = time.take(shares)
        try:
            asked = question.changed(**changes)
            result = asked.search(known=begin, seconds=seconds, compared=False)
            best = result.require_in(seconds)
        except GalvatronError as error:
            return WhatIf(name, change, None, inf, 0.0, 0.0, why_not=str(error).split("\n")[0])
        speed = best.samples_per_s
        own_s = asked.cost.predict(plan).time_s if name in ASSUMED else None
        return WhatIf(
            name, change, best.plan, best.time_s, speed, speed * length, result.fastest_gap, unchanged_s=own_s
        )

    memory = options.memory_gib
    yield changed("memory", f"{memory:.4g} -> {memory + 1:.4g} GiB", memory_constraint=memory + 1)
    yield changed("nodes", f"{nodes} -> {2 * nodes} nodes", num_nodes=2 * nodes)
    for link, faster in faster_links(hardware).items():
        if plan.pipeline > 1 or link != BETWEEN_STAGES:
            yield changed(link, "twice as fast", hardware=faster)
    if nodes > 1 and (network := question.assumptions.get("network")):
        half = float(network.value) / 2
        yield changed(NETWORK, f"{network.value:.4g} -> {half:.4g} GB/s a node", network=f"{half:g}")
    if question.cost.load:
        now_most, more = options.moe_imbalance, 2 * options.moe_imbalance - 1  # twice the rows beyond the mean
        yield changed(IMBALANCE, f"{now_most:g} -> {more:g}", moe_imbalance=more)
    if options.allows("pp") and options.most_chunks == 1 and options.trainer == "galvatron":
        yield changed(INTERLEAVING, f"up to {MOST_CHUNKS} chunks a stage", shares=2, max_virtual_pp_deg=MOST_CHUNKS)
    yield changed("sequence", f"{seq} -> {2 * seq} tokens", 2 * seq, seq_length=2 * seq)
    yield changed("batch", f"{batch} -> {2 * batch} samples", samples=2 * batch, settle_bsz=2 * batch)
    parts = plan.vocab.as_layer(), *plan.layers
    if any(strategy.sharding or strategy.experts_sharding for strategy in parts):
        yield changed("ZeRO in parts", "over all ranks", sharding_sizes="0")
    for count in (now // 2, 2 * now):
        if count and batch % count == 0:
            yield changed("micro-batches", f"{now} -> {count}", settle_chunk=count)


def _split_otherwise(plan: Plan, samples: int, more: float) -> Iterator[Plan]:
    """A plan for another batch with the same, twice and half the number of micro-batches; any may fit. `more`: tokens
    of a step on a device / those now; pieces of the loss keep their tokens."""
    now, pieces = plan.micro_batches, plan.vocab.pieces
    for count in (now, 2 * now, now // 2):
        if count and samples % count == 0:
            vocab = replace(plan.vocab, pieces=ceil(pieces * more * now / count) if pieces > 1 else 1)
            yield replace(plan, global_batch=samples, micro_batches=count, vocab=vocab)


def faster_links(profile: HardwareProfile) -> dict[str, HardwareProfile]:
    """The same cluster with one kind of link twice as fast: half the time for every message on it, latency too."""
    network = Network(profile)

    def crosses(size: int, consecutive: bool) -> bool:
        return network.measured_place(size, consecutive).nodes > 1

    def groups(across: bool) -> HardwareProfile:
        def halved(group: MessageGroup) -> bool:
            return group.kind is not Collective.SEND and crosses(group.size, group.consecutive) == across

        return replace(
            profile,
            allreduce_mib_per_ms={
                key: speed * (2 if crosses(*key) == across else 1)
                for key, speed in profile.allreduce_mib_per_ms.items()
            },
            messages_ms=_halved(profile, halved),
        )

    links = {}
    if profile.world_size > 1:
        links["links in a node"] = groups(across=False)
    if profile.num_nodes > 1:
        links["links between nodes"] = groups(across=True)
    if profile.p2p_mib_per_ms or any(group.kind is Collective.SEND for group in profile.messages_ms):
        links[BETWEEN_STAGES] = replace(
            profile,
            p2p_mib_per_ms={stages: 2 * speed for stages, speed in profile.p2p_mib_per_ms.items()},
            messages_ms=_halved(profile, lambda group: group.kind is Collective.SEND),
        )
    return links


def _halved(profile: HardwareProfile, which: Callable[[MessageGroup], bool]) -> dict[MessageGroup, dict[float, float]]:
    return {
        group: {mib: ms / 2 if which(group) else ms for mib, ms in times.items()}
        for group, times in profile.messages_ms.items()
    }


@dataclass(frozen=True, slots=True)
class OtherStrategy:
    """The prediction with one layer's strategy changed, for the layer that makes the step shortest."""

    layer: int
    strategy: LayerStrategy
    prediction: Prediction
    fits: bool

    @property
    def memory_mib(self) -> float:
        """Memory of the stage with the highest peak."""
        return max(stage.memory.total_mib for stage in self.prediction.stages)


@dataclass(frozen=True, slots=True)
class OneLayerChanged:
    """The best plan that differs in the strategy of one layer."""

    others: list[OtherStrategy]
    tried: int  # layers
    count: int  # layers whose change may have a different effect


def one_layer_changed(question: Question, plan: Plan) -> OneLayerChanged:
    """Tries all layers whose change may differ, or an even sample of many."""
    cost, options = question.cost, question.options
    family = PlanFamily.of(plan)
    spaces = [
        Space(shape, replace(cost.assumed, seq_length=seq), options, cost, layer_type).layers(family)
        for layer_type, (shape, seq) in enumerate(zip(cost.models, cost.seqs, strict=True))
    ]
    best_others: dict[LayerStrategy, OtherStrategy] = {}
    edges = _edges(plan, cost)
    most = max(2, MOST_PRICED // max(map(len, spaces)))
    layers = edges if len(edges) <= most else [edges[k * (len(edges) - 1) // (most - 1)] for k in range(most)]
    stages = [cost.stage_cost(plan, stage) for stage in range(plan.pipeline)]
    for layer in layers:
        stage = next(stage for stage in range(plan.pipeline) if layer in plan.stage_layers(stage))
        earlier, behind = stages[:stage], stages[stage + 1 :]
        for strategy in spaces[cost.layer_types[layer]]:
            if strategy == plan.layers[layer]:
                continue
            changed = replace(plan, layers=(*plan.layers[:layer], strategy, *plan.layers[layer + 1 :]))
            prediction = cost.joined(changed, [*earlier, cost.stage_cost(changed, stage), *behind])
            fits = max(stage.memory.total_mib for stage in prediction.stages) <= question.budget_mib
            other = OtherStrategy(layer, strategy, prediction, fits)
            least = best_others.get(strategy)
            if least is None or _order(other) < _order(least):
                best_others[strategy] = other
    return OneLayerChanged(sorted(best_others.values(), key=_order), len(layers), len(edges))


def _order(other: OtherStrategy) -> tuple[bool, float, float]:
    return not other.fits, other.prediction.time_s, other.memory_mib


def _edges(plan: Plan, cost: CostModel) -> Sequence[int]:
    """First and last layer of every run of equal layers in a stage: those between have the same effect."""
    edges: set[int] = set()
    for stage in range(plan.pipeline):
        for chunk in range(plan.chunks):
            layers = plan.chunk_layers(stage, chunk)
            for run, _ in runs([(plan.layers[layer], cost.layer_types[layer]) for layer in layers]):
                edges |= {layers[run[0]], layers[run[-1]]}
    return sorted(edges)
