"""The cost model: costs of a layer, the vocabulary layers, resharding, a send, and a whole plan.

Every term with its unit, source and a worked number: docs/dev/cost_model.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from itertools import pairwise

from ..base import MIB, UserError, once
from ..model import ModelShape, Recompute, layer_types_of
from ..plan import Assumptions, Axis, ByKind, LayerStrategy, Load, Mesh, PassKind, Plan, Strategy, VocabStrategy
from ..plan.comm_points import Collective
from ..plan.communicators import communicators
from ..plan.layout import TokenLayout, redistribution, token_layout
from ..plan.strategy import Experts
from ..profiles.memory import Role
from ..profiles.reserve import Reserve
from .collectives import MTP_CHANGES, place_of
from .costs import CostOptions, LayerCost, Prediction, Profiles, StagePrediction, StageSetting
from .experts import OF_EXPERTS, ExpertPrices
from .layers import LayerPrices
from .module import ModulePrices
from .simulate import StageTimes, step_ms
from .stage_memory import fullest, memory_of, own_positions_mib
from .vocabulary import VocabPrices


class CostModel:
    """Prices of one model on one cluster, from its profiles, under one set of assumptions.

    `model` is the shape of all layers, or one shape for each layer type in the model's order, each with its number of
    layers. Prices are per layer type: the dense layers and the MoE layers of one shape are two types. Raises UserError
    if an assumption is missing or layer types contradict each other.
    """

    def __init__(
        self,
        model: ModelShape | Sequence[ModelShape],
        profiles: Profiles,
        assumed: Assumptions,
        options: CostOptions = CostOptions(),
    ):
        self.given = (model,) if isinstance(model, ModelShape) else tuple(model)
        self.models = tuple(kind for shape in self.given for kind in shape.kinds)
        self.layer_types = layer_types_of(self.given)
        _require_consistent(self.given)
        self.profiles = profiles
        self.assumed = assumed
        self.options = options
        self._modules = modules = ModulePrices(self.models, profiles, assumed, options)
        self.seqs, self.state_bytes = modules.seqs, modules.state_bytes
        self._experts = ExpertPrices(modules)
        self._layers = LayerPrices(modules, self._experts)
        self._vocabulary = VocabPrices(modules)

    @property
    def world_size(self) -> int:
        return self.profiles.num_nodes * self.profiles.gpus_per_node

    @property
    def has_experts(self) -> bool:
        return any(model.experts for model in self.models)

    @property
    def load(self) -> Load | None:
        """The assumed load of experts; None: a model without experts."""
        return self.options.load if self.has_experts else None

    def reserving(self, context_mib: float, freed: float | None = None) -> CostModel:
        """The same model with this reserve on every device and this share of freed working memory in addition."""
        options = replace(self.options, context_mib=context_mib, freed=freed)
        if options == self.options:
            return self
        if options.masters_first and self.assumed.offload_optimizer:  # in this case cached prices depend on the reserve
            return self._with(options)
        other = copy(self)  # the copy shares the cached prices
        other.options = options
        return other

    def keeping_gathered(self) -> CostModel:
        """The same model for a runtime that keeps Megatron-SP's gathered inputs of products."""
        return self._with(replace(self.options, keeps_gathered=True))

    def _with(self, options: CostOptions) -> CostModel:
        return CostModel(self.given, self.profiles, self.assumed, options)

    def reserve_of(self, plan: Plan) -> Reserve:
        """Memory of a device outside tensors, with the communicators of a plan."""
        adapts = self.options.task.frozen
        return self.profiles.reserve.having(communicators(plan, self.given[0], self.seqs[0], adapts))

    def layer_cost(self, strategy: LayerStrategy, stage: StageSetting, layer_type: int = 0) -> LayerCost:
        """One layer over all ranks of a stage.

        Raises UserError if the samples do not split over the dp degree or a profile lacks an entry for the strategy.
        """
        return self._layers.cost(strategy, self._modules.setting(stage, layer_type))

    def expert_cost(
        self, experts: Experts, recompute: Recompute, stage: StageSetting, layer_type: int = 0
    ) -> LayerCost:
        """Cost of the experts of one MoE layer for one micro-batch."""
        return self._experts.cost(experts, recompute & OF_EXPERTS, self._modules.setting(stage, layer_type))

    def hidden_percent(self, layer: LayerStrategy, stage: StageSetting, layer_type: int = 0) -> int:
        """The largest percentage of a layer's activations whose copies to host memory and back its passes hide."""
        whole = self.layer_cost(replace(layer, offload=100), stage, layer_type).terms.passes
        plain_ms = self.layer_cost(layer, stage, layer_type).passes_ms
        shown = [(terms.offload_ms, pass_ms) for terms, pass_ms in zip(whole, plain_ms, strict=True)]
        return int(min(100 * pass_ms / (pass_ms + more_ms) if more_ms else 100 for more_ms, pass_ms in shown))

    def vocab_cost(self, vocab: VocabStrategy, stage: StageSetting, role: Role) -> LayerCost:
        """Embedding and LM head as a stage of this role has them. Raises UserError as `layer_cost` does."""
        return self._vocabulary.cost(vocab, stage, role)

    def middle_cost(self, stage: StageSetting, later: bool = False) -> LayerCost:
        """Cost of the input of a stage without embedding and LM head; the previous stage also keeps it as its output.
        `later`: another chunk of the stage counts its masks and messages, except messages of one neighbour, as the
        first stage follows the last."""
        return self._vocabulary.middle_cost(stage, later)

    def switch_cost(
        self, former: Strategy | None, latter: Strategy | None, stage: StageSetting, layer_type: int = 0
    ) -> ByKind[float]:
        """Time in ms of resharding one micro-batch's tokens of a layer type; None is the stage's edge.

        Gradients are resharded the other way between the same layouts. Equal layouts cost nothing.
        """
        sharded = self.assumed.sequence_parallel
        source, target = (token_layout(strategy, stage.stage_size, sharded) for strategy in (former, latter))
        moved = stage.micro_batch, layer_type
        return ByKind(self._move_ms(source, target, *moved), self._move_ms(target, source, *moved))

    @once
    def _move_ms(self, source: TokenLayout, target: TokenLayout, micro_batch: int, layer_type: int) -> float:
        """Resharding costs an all-to-all in which every rank receives as much as the busiest."""
        tokens = micro_batch * self.seqs[layer_type]
        change = redistribution(source, target, tokens, micro_batch)
        if not change.most_tokens:
            return 0.0
        mesh = Mesh.of(source.size, (Axis.TENSOR, change.span))
        group = place_of((Axis.TENSOR,), mesh, self.profiles.gpus_per_node, self.world_size // source.size)
        received = change.most_tokens / tokens * self._modules.token_bytes(micro_batch, layer_type) / MIB
        sent = received * change.span / (change.span - 1)
        return self.profiles.network.collective_ms(Collective.ALL_TO_ALL, group, sent)

    def boundary_cost(self, stage: StageSetting, layer_type: int = 0) -> float:
        """Time in ms of sending one micro-batch to the next stage and its gradient back: each rank sends its slice of a
        layer type's tokens to its peer."""
        tokens = self._modules.token_bytes(stage.micro_batch, layer_type)
        return self.profiles.network.send_ms(stage.pipeline, tokens / stage.stage_size / MIB)

    def crossing_type(self, layer: int) -> int:
        """Layer type whose tokens are sent before a layer (one past the last: after it).

        Where the type changes, it is the type with fewer bytes: the stage boundary is on the smaller side of a change
        of width or length.
        """
        last = len(self.layer_types) - 1
        neighbours = {self.layer_types[max(layer - 1, 0)], self.layer_types[min(layer, last)]}
        return min(sorted(neighbours), key=lambda kind: self.seqs[kind] * self.models[kind].hidden_size)

    def predict(self, plan: Plan) -> Prediction:
        """Time and memory of one step: the one function behind every predicted time. Raises UserError."""
        return self.joined(plan, [self.stage_cost(plan, stage) for stage in range(plan.pipeline)])

    def stage_cost(self, plan: Plan, stage: int) -> StagePrediction:
        """Times and memory of one stage, which depend only on its layers. Raises UserError."""
        self._require_mine(plan)
        setting = StageSetting.of(plan)
        chunks = [self.chunk_parts(plan, stage, chunk) for chunk in range(plan.chunks)]
        chunks_ms = []
        for chunk, parts in enumerate(chunks):
            switches, behind = self.chunk_switches(plan, stage, chunk), plan.chunk_layers(stage, chunk).stop
            each_ms = (
                sum(p.passes_ms.of(kind) for p in parts) + sum(s.of(kind) for s in switches) for kind in PassKind
            )
            last = plan.is_last(stage, chunk)
            send_ms = 0.0 if last else self.boundary_cost(setting, self.crossing_type(behind))
            chunks_ms.append((ByKind(*each_ms), send_ms))
        each = not self.assumed.async_grad_reduce
        memory = memory_of(plan, stage, chunks, self.options, each, self._shared_mib(plan, stage))
        sync_ms = sum(module.sync_ms for parts in chunks for module in parts)
        passes, sends_ms = zip(*chunks_ms, strict=True)
        passes_ms: ByKind[float] = ByKind(*map(sum, zip(*passes, strict=True)))
        return StagePrediction(passes_ms, sync_ms, sum(sends_ms), memory, tuple(chunks_ms))

    def joined(self, plan: Plan, stages: Sequence[StagePrediction]) -> Prediction:
        """The prediction of a plan from the costs of its stages."""
        chunks_ms = [stage.chunks_ms[chunk] for chunk in range(plan.chunks) for stage in stages]
        passes, send_ms = zip(*chunks_ms, strict=True)
        passes_ms: ByKind[Sequence[float]] = ByKind(*zip(*passes, strict=True))
        times = StageTimes(passes_ms, [stage.sync_ms for stage in stages], send_ms[:-1])
        time_ms = step_ms(plan.schedule, times, plan.micro_batches)
        busy = sum(plan.micro_batches * sum(s.passes_ms) + s.sync_ms for s in stages)
        return Prediction(
            time_s=time_ms / 1000,
            samples_per_s=plan.global_batch / time_ms * 1000,
            bubble_share=1 - busy / (len(stages) * time_ms),
            stages=tuple(stages),
            times=times,
        )

    def in_flight(self, plan: Plan, stage: int) -> tuple[int, ...]:
        """Micro-batches of each chunk in flight at the peak of a stage's activations."""
        parts = [self.chunk_parts(plan, stage, chunk) for chunk in range(plan.chunks)]
        return fullest(plan, stage, parts)

    def stage_parts(self, plan: Plan, stage: int) -> list[LayerCost]:
        """Costs of a stage's parts by chunk."""
        return [module for chunk in range(plan.chunks) for module in self.chunk_parts(plan, stage, chunk)]

    def chunk_parts(self, plan: Plan, stage: int, chunk: int) -> list[LayerCost]:
        """Costs of the parts of a chunk of a stage, in order: embedding or input, layers, and a separate LM head if it
        has one."""
        last = plan.pipeline - 1
        setting = StageSetting.of(plan)
        layers = plan.chunk_layers(stage, chunk)
        parts = [self.layer_cost(plan.layers[layer], setting, self.layer_types[layer]) for layer in layers]
        if plan.is_first(stage, chunk):
            parts.insert(0, self.vocab_cost(plan.vocab, setting, "first" if last else "only"))
        elif plan.is_last(stage, chunk):
            parts.append(self.vocab_cost(plan.vocab, setting, "last"))
        else:
            later = chunk > 0 or stage in (0, last)
            parts.insert(0, self.middle_cost(setting, later))
        return parts

    def chunk_switches(self, plan: Plan, stage: int, chunk: int) -> list[ByKind[float]]:
        """Time in ms of one micro-batch at each boundary between the parts of a chunk of a stage."""
        setting = StageSetting.of(plan)
        boundaries, layers = pairwise(plan.chunk_chain(stage, chunk)), plan.chunk_layers(stage, chunk)
        switches = [
            self.switch_cost(source, target, setting, self.crossing_type(layer))
            for layer, (source, target) in enumerate(boundaries, layers.start)
        ]
        if self.models[-1].mtp_layers and plan.is_last(stage, chunk):
            switches[-1] = ByKind(*[MTP_CHANGES / 2 * sum(switches[-1])] * len(PassKind))
        return switches

    def _shared_mib(self, plan: Plan, stage: int) -> float:
        """Memory that the layers of a stage share; no layer's price includes it."""
        return own_positions_mib(plan, stage, self.models[0], self.profiles.memory)

    def _require_mine(self, plan: Plan) -> None:
        if plan.world_size != self.world_size:
            nodes, gpus = self.profiles.num_nodes, self.profiles.gpus_per_node
            raise UserError(
                f"world_size: the plan is for {plan.world_size} ranks, the cluster has {nodes} nodes x {gpus}; "
                "set num_nodes and num_gpus_per_node to the plan's"
            )
        if len(plan.layers) != len(self.layer_types):
            raise UserError(
                f"pp_division: the plan has {len(plan.layers)} layers but {self.models[0].name} has "
                f"{len(self.layer_types)}; search a plan for this model"
            )
        if plan.assumed.completed(self.assumed) != self.assumed:
            raise UserError(
                f"galvatron.assumed: {name} is {theirs} in the plan, but it is to be priced with {ours}; "
                "give the plan's value, or search a plan for the other"
                for name, theirs, ours in plan.assumed.completed(self.assumed).unlike(self.assumed)
            )


def _require_consistent(shapes: Sequence[ModelShape]) -> None:
    """Raises UserError if layer types contradict each other."""
    mixture = next((model for model in shapes if model.experts), None)
    if mixture and len(shapes) > 1:
        raise UserError(f"model_size: {mixture.name} has experts; several types of layers are not planned for it")
    first, last = shapes[0], shapes[-1]
    if first.tied_embeddings and first.hidden_size != last.hidden_size:
        raise UserError(
            f"hidden_size_list: embedding and LM head share their weights, but the first layers have hidden size "
            f"{first.hidden_size}, the last ones {last.hidden_size}; make them equal"
        )
