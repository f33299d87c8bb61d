"""The facts of a plan and its prediction, one record for text, JSON, pages, differences and scalings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

from ..plan import Assumption, ModelShape, PassKind, Plan, Strategy, VocabStrategy, runs
from ..plan.strategy import states_words
from .costs import Prediction, Terms, Workspace
from .model import CostModel

# Terms of a step's time on one stage, in ms, by key and name. They and `waiting` add up to the step.
TIME = {
    "forward": "forward",
    "backward": "backward",
    "recompute": "recompute",
    "offload": "copies of activations to and from the host",
    "vocabulary": "embedding, LM head, loss",
    "tensor": "TP/CP/Ulysses communication",
    "experts": "EP communication",
    "layouts": "resharding",
    "gathers": "ZeRO-3 all-gather",
    "gradients": "gradient reduction",
    "publish": "ZeRO-2 all-gather",
    "optimizer": "optimizer",
    "waiting": "pipeline bubble",
}
COMMUNICATION = ("tensor", "experts", "layouts", "gathers", "gradients", "publish")
# Terms of a device's memory on one stage, in MiB. They and `free` add up to the budget.
MEMORY = {
    "parameters": "parameters",
    "gradients": "gradients",
    "moments": "optimizer states",
    "masks": "masks, ids, P2P buffers",
    "activations": "activations",
    "working": "workspace",
    "reserve": "reserve",
    "free": "free",
}


@dataclass(frozen=True, slots=True)
class PlanPart:
    """Consecutive layers of one strategy, or a vocabulary layer: time of a step and memory of a device."""

    name: str
    time_ms: Mapping[str, float]  # of all these layers, by the keys of TIME
    hidden_ms: Mapping[str, float]  # communication hidden by compute
    memory_mib: Mapping[str, float]  # by the keys of MEMORY; `working`: of the layer that needs most


@dataclass(frozen=True, slots=True)
class StageBreakdown:
    """One stage: time and memory of its busiest rank."""

    time_ms: Mapping[str, float]
    hidden_ms: Mapping[str, float]
    hand_over_ms: float  # messages to the next stage and back, hidden or in the `waiting` of a stage
    memory_mib: Mapping[str, float]
    parts: tuple[PlanPart, ...]

    @property
    def busy_ms(self) -> float:
        """Step time without waiting."""
        return sum(self.time_ms.values()) - self.time_ms["waiting"]


def breakdown(plan: Plan, cost: CostModel, prediction: Prediction, stage: int, budget_mib: float) -> StageBreakdown:
    """A stage of a plan. `budget_mib`: memory of a device, of which `free` is unused."""
    predicted = prediction.stages[stage]
    chunks = enumerate(cost.in_flight(plan, stage))
    parts = tuple(module for chunk, in_flight in chunks for module in _chunk_parts(plan, cost, stage, chunk, in_flight))
    time_ms = {key: sum(module.time_ms.get(key, 0.0) for module in parts) for key in TIME}
    hidden_ms = {key: sum(each.hidden_ms.get(key, 0.0) for each in parts) for key in ("tensor", "gathers", "gradients")}
    time_ms["layouts"] = layouts_ms(plan, cost, stage)
    busy = plan.micro_batches * sum(predicted.passes_ms) + predicted.sync_ms
    time_ms["waiting"] = max(0.0, prediction.time_s * 1000 - busy)
    memory = {key: sum(module.memory_mib.get(key, 0.0) for module in parts) for key in MEMORY if key != "free"}
    memory |= {"working": predicted.memory.working_mib, "reserve": predicted.memory.context_mib}
    memory["free"] = budget_mib - predicted.memory.total_mib
    hand_over = plan.micro_batches * 2 * predicted.send_ms
    return StageBreakdown(time_ms, hidden_ms, hand_over, memory, parts)


def _chunk_parts(plan: Plan, cost: CostModel, stage: int, chunk: int, in_flight: int) -> Iterator[PlanPart]:
    """`in_flight`: micro-batches in flight at the peak of the stage's activations."""
    costs, layers = cost.chunk_parts(plan, stage, chunk), plan.chunk_layers(stage, chunk)
    is_first, is_last = plan.is_first(stage, chunk), plan.is_last(stage, chunk)
    ahead = 0 if is_last and not is_first else 1

    def part(name: str, first: int, count: int, vocabulary: bool) -> PlanPart:
        parts = costs[first : first + count]
        times = [_named(part_ms(item.terms, plan.micro_batches), vocabulary) for item in parts]
        states = [item.terms.states for item in parts]
        return PlanPart(
            name,
            {key: sum(item.get(key, 0.0) for item in times) for key in TIME if any(item.get(key) for item in times)},
            {
                "tensor": plan.micro_batches * sum(item.terms.tensor_hidden_ms for item in parts),
                "gathers": plan.micro_batches * sum(item.terms.gather_hidden_ms for item in parts),
                "gradients": sum(_each(item.terms, plan.micro_batches) * item.terms.reduce_hidden_ms for item in parts),
            },
            {
                "parameters": sum(item.parameters_mib for item in states),
                "gradients": sum(item.gradients_mib for item in states),
                "moments": sum(item.moments_mib for item in states),
                "masks": sum(item.masks_mib for item in states),
                "activations": in_flight * sum(item.activation_mib for item in parts),
                "working": Workspace.of(item.workspace for item in parts).total_mib,
            },
        )

    if ahead:
        name = "the stage's input" if not is_first else "embedding, LM head" if is_last else "embedding"
        yield part(name, 0, 1, vocabulary=True)
    for run, (_, kind) in runs([(plan.layers[layer], cost.layer_types[layer]) for layer in layers]):
        start, stop = layers[run[0]], layers[run[-1]]
        name = f"layer {start}" if start == stop else f"layers {start}-{stop}"
        if cost.has_experts and not cost.models[kind].experts:
            name += " (dense)"
        if cost.models[kind].mtp_layers:
            name += " (MTP)"
        if len(cost.models) > 1 and (how := cost.models[kind].attention):
            name += f" ({how})"
        yield part(name, ahead + run.start, len(run), vocabulary=False)
    if not ahead:
        yield part("LM head", len(costs) - 1, 1, vocabulary=True)


def layouts_ms(plan: Plan, cost: CostModel, stage: int) -> float:
    """Resharding between the layers of a stage in a step, ms."""
    switches = [switch for chunk in range(plan.chunks) for switch in cost.chunk_switches(plan, stage, chunk)]
    return plan.micro_batches * sum(forward + backward for forward, backward in switches)


def part_ms(terms: Terms, micro_batches: int) -> dict[str, float]:
    """Terms of a layer, embedding or LM head in a step, ms."""
    _, recompute_ms, gather_ms, reduce_ms, tensor_ms, expert_ms, offload_ms = map(sum, zip(*terms.passes, strict=True))
    return {
        **{kind: micro_batches * terms.passes.of(kind).compute_ms for kind in PassKind},
        "recompute": micro_batches * recompute_ms,
        "offload": micro_batches * offload_ms,
        "tensor": micro_batches * tensor_ms,
        "experts": micro_batches * expert_ms,
        "gathers": micro_batches * gather_ms,
        "gradients": micro_batches * reduce_ms + terms.reduce_ms + terms.finish_ms,
        "publish": terms.publish_ms,
        "optimizer": terms.optimizer_ms,
    }


def _named(times_ms: dict[str, float], vocabulary: bool) -> dict[str, float]:
    """The vocabulary's computation is a separate term and is never recomputed."""
    if not vocabulary:
        return times_ms
    computed = sum(times_ms.pop(kind) for kind in PassKind)
    return times_ms | {"vocabulary": computed, "recompute": 0.0}


def _each(terms: Terms, micro_batches: int) -> int:
    """How often a step reduces gradients."""
    return micro_batches if terms.reduced_each else 1


def strategy_words(strategy: Strategy) -> str:
    """`tp 4, zero3, recompute`, or `recompute norms+attention`; `tp 4, zero2, loss in 8 pieces` of the vocabulary."""
    if isinstance(strategy, VocabStrategy):
        pieces = f", loss in {strategy.pieces} pieces" if strategy.pieces > 1 else ""
        return strategy_words(strategy.as_layer()) + pieces
    split = [f"{axis.words} {degree}" for axis, degree in strategy.axes if degree > 1]
    strided = [] if strategy.consecutive or strategy.ranks == 1 else ["strided"]
    again = f"recompute {strategy.recompute.words}".removesuffix(" full") if strategy.recompute else ""
    away = f"{strategy.offload} % offloaded" if strategy.offload else ""
    ep, etp, dp_type, sharding = strategy.experts
    own_type = states_words(dp_type, sharding) if strategy.experts_dp_type or sharding else ""
    experts = " ".join(filter(None, [f"ep {ep}" * (ep > 1), f"tp {etp}" * (etp > 1), own_type]))
    experts_words = f"experts {experts}" if experts else ""
    states = states_words(strategy.dp_type, strategy.sharding)
    return ", ".join(word for word in [*split, *strided, states, again, away, experts_words] if word)


@dataclass(frozen=True)
class PlanFacts:
    """A plan and its prediction under a cost model."""

    plan: Plan
    prediction: Prediction
    cost: CostModel
    shape: ModelShape | None  # unset: layers differ
    budget_mib: float = inf  # memory budget of a device
    assumptions: Mapping[str, Assumption] = field(default_factory=dict)

    @cached_property
    def stages(self) -> list[StageBreakdown]:
        how = self.plan, self.cost, self.prediction
        return [breakdown(*how, stage, self.budget_mib) for stage in range(self.plan.pipeline)]

    @property
    def fullest(self) -> int:
        """The stage with least memory left."""
        return max(range(self.plan.pipeline), key=lambda stage: self.prediction.stages[stage].memory.total_mib)

    @property
    def busiest(self) -> int:
        """The busiest stage."""
        return max(range(self.plan.pipeline), key=lambda stage: self.stages[stage].busy_ms)

    @property
    def memory_mib(self) -> float:
        """Memory of a device of the stage with the highest peak."""
        return self.prediction.stages[self.fullest].memory.total_mib

    @cached_property
    def spared_mib(self) -> float:
        """Memory saved on the stage with the highest peak by gathering tokens again in backward."""
        keeping = self.cost.keeping_gathered().predict(self.plan)
        return keeping.stages[self.fullest].memory.total_mib - self.memory_mib

    @property
    def mean_time_ms(self) -> dict[str, float]:
        """Terms of a step, mean over the stages."""
        return {key: sum(stage.time_ms[key] for stage in self.stages) / len(self.stages) for key in TIME}

    @property
    def tokens_per_s(self) -> float:
        return self.prediction.samples_per_s * (self.plan.assumed.seq_length or 0)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization; None where the device's peak or the shape of all layers is unknown."""
        if self.shape is None:
            return None
        task, device = self.cost.options.task, self.cost.profiles.device
        return device.mfu(self.tokens_per_s, self.plan, self.shape, task.frozen, task.document_tokens)

    @property
    def origin(self) -> str:
        """Whether the prices were measured, or derived from a data sheet."""
        profiles = self.cost.profiles
        metas = profiles.network.profile.meta, profiles.times.profile.meta, profiles.memory.profile.meta
        named = list(zip(("links", "layers", "memory"), metas, strict=True))
        derived = [name for name, meta in named if meta.analytic]
        if len(derived) in (0, len(named)):
            return "prices from a data sheet" if derived else "prices measured"
        return f"prices of {' and '.join(derived)} from a data sheet, others measured"

    @property
    def device_word(self) -> str:
        """`GPU` if the devices are known to be GPUs, else `rank`."""
        return "GPU" if self.cost.profiles.reserve.parts else "rank"

    @property
    def speed_words(self) -> str:
        """`9,656 tokens/s/GPU, MFU 46.2%`."""
        words = f"{self.tokens_per_s / self.plan.world_size:,.0f} tokens/s/{self.device_word}"
        words += f", MFU {self.mfu:.1%}" if self.mfu else ""
        return words + (f"; {self.cost.load}" if self.cost.load else "")
