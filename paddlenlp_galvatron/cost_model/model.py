"""The cost model: what a layer, the vocabulary layers, a switch and a hand-over cost, and what a whole plan takes.

Every term with its unit, source and a worked number: docs/dev/cost_model.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from ..base.errors import UserError
from ..model import ModelShape, kinds_of, layer_types_of
from ..plan.comm_points import Collective, CommPoint
from ..plan.communicators import communicators
from ..plan.layout import TokenLayout, redistribution, token_layout
from ..plan.mesh import OF_A_SAMPLE, Axis, Mesh
from ..plan.strategy import Assumptions, Load, Plan, Strategy, VocabStrategy
from ..profiles.computation import PassTimes
from ..profiles.compute_time import ComputeTimes
from ..profiles.data_sheet import Device
from ..profiles.files import ProfileFile, device_of
from ..profiles.memory import STATE_BYTES, Role
from ..profiles.memory_use import MemoryUse
from ..profiles.network import Network
from ..profiles.reserve import MeasuredReserve, Reserve, reserve_of
from .collectives import Calls, Setting, place_of, vocab_calls
from .costs import CostOptions, LayerCost, PartMemory, Prediction, StagePrediction, States, Terms, Workspace
from .head import HeadShare, piece_passes, piece_room
from .layers import LayerPrices, samples_of
from .module import Room, once
from .simulate import StageTimes, step_ms
from .stage_memory import batch_mib, fullest, memory_of, own_positions_mib
from .weights import MIB, StateBytes, Weights, head_weights, table_weights

GB_PER_S = 1e9 / MIB / 1e3  # in MiB/ms
# Messages that a rank of a pipeline holds besides activations, with one micro-batch and with several. From the next
# stage: the gradient in use, and a posted one; from the previous one: a posted activation, and a gradient leaving.
NEXT, BEFORE = (1, 2), (0, 2)


class StageCost(NamedTuple):
    """Cost of a stage in all, and times of each of its chunks for one micro-batch, in ms."""

    totals: StagePrediction
    forward_ms: list[float]
    backward_ms: list[float]
    send_ms: list[float]  # to the next chunk, and the gradient back


class CostModel(LayerPrices):
    """Prices of one model on one cluster, from its profiles, under one set of assumptions.

    `model` is the shape of all layers, or one shape for each layer type in the order of the model (their number of
    layers says which layer is of which type). Prices are by kind: dense layers and those with experts of one shape are
    two layer types. Raises UserError where an assumption is missing, or types of layers contradict each other.
    """

    def __init__(
        self,
        model: ModelShape | Sequence[ModelShape],
        *,
        network: Network,
        times: ComputeTimes,
        memory: MemoryUse,
        num_nodes: int,
        gpus_per_node: int,
        assumed: Assumptions,
        options: CostOptions = CostOptions(),
        device: Device | None = None,
    ):
        """`device`: that of every rank; None: the one of the profiles."""
        super().__init__()
        self.given = (model,) if isinstance(model, ModelShape) else tuple(model)
        self.models = kinds_of(self.given)
        self.network = network
        self.times = times
        self.memory = memory
        self.num_nodes = num_nodes
        self.gpus_per_node = gpus_per_node
        self.assumed = assumed
        self.options = options
        if assumed.seq_length is None:
            raise UserError("seq_length: missing; say how many tokens a sample has")
        self.seqs = tuple(shape.seq_length or assumed.seq_length for shape in self.models)  # of each layer type
        self.state_bytes = StateBytes.of(assumed.mixed_precision, bool(assumed.fp32_gradients))
        self.layer_types = layer_types_of(self.given)
        metas = (network.profile.meta, times.profile.meta, memory.profile.meta)
        self.device = device or device_of(*metas)
        self.host_mib_per_ms = self._host_mib_per_ms() if options.offload_optimizer else None
        mixture = next((model for model in self.models if model.experts), None)
        if mixture and (len(self.given) > 1 or options.task.frozen):
            what = "several types of layers" if len(self.given) > 1 else "LoRA's adapters"
            raise UserError(f"model_size: {mixture.name} has experts; {what} are not planned for such models")
        first, last = self.models[0], self.models[-1]
        if first.tied_embeddings and first.hidden_size != last.hidden_size:
            raise UserError(
                f"hidden_size_list: embedding and LM head share their weights, but the first layers have hidden size "
                f"{first.hidden_size}, the last ones {last.hidden_size}; make them equal"
            )

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.gpus_per_node

    @property
    def context_mib(self) -> float:
        """The reserve on every device, as the user set it."""
        return self.options.context_mib

    @property
    def load(self) -> Load | None:
        """The load of experts that it assumes; None: of no model with experts."""
        return self.options.load if self.has_experts else None

    def reserving(self, context_mib: float, freed: float | None = None) -> CostModel:
        """The same model with this reserve on every device, and this share of freed working memory besides it."""
        other = copy(self)
        other.options = replace(self.options, context_mib=context_mib, freed=freed)
        if self.options.offload_optimizer:  # whose prices depend on it
            other.known = defaultdict(dict)
        return other

    def keeping_gathered(self) -> CostModel:
        """The same model of a runtime that keeps what Megatron-SP gathers for products."""
        other = copy(self)
        other.options, other.known = replace(self.options, keeps_gathered=True), defaultdict(dict)
        return other

    def _host_mib_per_ms(self) -> float:
        if self.device.host_link_gb_per_s is None:
            raise UserError(
                "offload_optimizer: no profile names a GPU whose data sheet has the speed of its host's memory; "
                "leave the option out, or galvatron profile all --analytic"
            )
        return self.device.host_link_gb_per_s * GB_PER_S

    @property
    def reserve(self) -> Reserve:
        """Memory of its devices besides tensors: none where no profile names a GPU."""
        measured = MeasuredReserve.of(self.network.profile.meta, self.memory.profile.meta)
        return reserve_of(self.device, self.world_size, measured)

    def reserve_of(self, plan: Plan) -> Reserve:
        """The same with the communicators of a plan."""
        return self.reserve.having(communicators(plan, self.given[0], self.seqs[0]))

    @property
    def profile_files(self) -> tuple[ProfileFile, ...]:
        """The files that its prices come from."""
        return (*self.network.profile.files, *self.times.profile.files, *self.memory.profile.files)

    def vocab_cost(
        self, vocab: VocabStrategy, *, stage_size: int, micro_batch: int, micro_batches: int, pipeline: int, role: Role
    ) -> LayerCost:
        """Embedding and LM head as a stage of this role has them. Raises UserError as `layer_cost` does."""
        return self._vocabulary(vocab, stage_size, micro_batch, micro_batches, pipeline, role)

    def middle_cost(self, *, stage_size: int, micro_batch: int, micro_batches: int, later: bool = False) -> LayerCost:
        """Cost of the input of a stage without embedding and LM head; the previous stage keeps it as its output, too.
        `later`: the stage's masks and messages are counted with another chunk, except those of one neighbour: the
        first stage follows the last."""
        widest = max(self._token_bytes(micro_batch, kind) for kind in range(len(self.models)))
        input_mib = widest / stage_size / MIB
        several = micro_batches > 1
        messages = NEXT[several] + (2 if later else BEFORE[several])  # two more gradients may be leaving
        fixed_mib = messages * input_mib + (0.0 if later else self._constants_mib)
        memory = PartMemory(fixed_mib=fixed_mib, activation_mib=input_mib)
        return LayerCost.of(Terms(States(masks_mib=fixed_mib)), input_mib, Workspace(), memory)

    def crossing_type(self, layer: int) -> int:
        """Layer type whose tokens are handed on in front of a layer (one past the last: behind it).

        Where the type changes they are those of fewer bytes: the change of width or length stands where less crosses.
        """
        last = len(self.layer_types) - 1
        beside = {self.layer_types[max(layer - 1, 0)], self.layer_types[min(layer, last)]}
        return min(sorted(beside), key=lambda kind: self.seqs[kind] * self.models[kind].hidden_size)

    def switch_cost(
        self, before: Strategy | None, after: Strategy | None, *, stage_size: int, micro_batch: int, layer_type: int = 0
    ) -> tuple[float, float]:
        """(forward, backward) ms of handing one micro-batch's tokens of a layer type on; None is the stage's edge.

        Gradients go the other way between the same layouts. Equal layouts cost nothing.
        """
        sharded = self.assumed.sequence_parallel
        source, target = (token_layout(strategy, stage_size, sharded) for strategy in (before, after))
        where = micro_batch, layer_type
        return self._move_ms(source, target, *where), self._move_ms(target, source, *where)

    def boundary_cost(self, *, stage_size: int, micro_batch: int, pipeline: int, layer_type: int = 0) -> float:
        """Time in ms of one micro-batch's hand-over to the next stage, and of its gradient's back: each rank sends
        its own slice of a layer type's tokens to its peer."""
        tokens = self._token_bytes(micro_batch, layer_type)
        return self.network.send_ms(pipeline, tokens / stage_size / MIB)

    def predict(self, plan: Plan) -> Prediction:
        """Time and memory of one step: the one function behind every predicted time. Raises UserError."""
        return self.joined(plan, [self.stage_cost(plan, stage) for stage in range(plan.pipeline)])

    def stage_cost(self, plan: Plan, stage: int) -> StageCost:
        """Cost of one stage, which depends on its own layers alone. Raises UserError."""
        self._require_mine(plan)
        where = {"stage_size": plan.stage_size, "micro_batch": plan.micro_batch, "pipeline": plan.pipeline}
        chunks = [self.chunk_parts(plan, stage, chunk) for chunk in range(plan.chunks)]
        forward_ms, backward_ms, send_ms = [], [], []
        for chunk, parts in enumerate(chunks):
            switches, behind = self.chunk_switches(plan, stage, chunk), plan.chunk_layers(stage, chunk).stop
            forward_ms.append(sum(part.forward_ms for part in parts) + sum(forward for forward, _ in switches))
            backward_ms.append(sum(part.backward_ms for part in parts) + sum(backward for _, backward in switches))
            last = plan.is_last(stage, chunk)
            send_ms.append(0.0 if last else self.boundary_cost(layer_type=self.crossing_type(behind), **where))
        each = not self.assumed.async_grad_reduce
        memory = memory_of(plan, stage, chunks, self.options, each, self._shared_mib(plan, stage))
        sync_ms = sum(part.sync_ms for parts in chunks for part in parts)
        totals = StagePrediction(sum(forward_ms), sum(backward_ms), sync_ms, sum(send_ms), memory)
        return StageCost(totals, forward_ms, backward_ms, send_ms)

    def joined(self, plan: Plan, costs: Sequence[StageCost]) -> Prediction:
        """The prediction of a plan whose stages cost this."""
        stages, chunks = tuple(cost.totals for cost in costs), range(plan.chunks)
        times = StageTimes(
            [cost.forward_ms[chunk] for chunk in chunks for cost in costs],
            [cost.backward_ms[chunk] for chunk in chunks for cost in costs],
            [stage.sync_ms for stage in stages],
            [cost.send_ms[chunk] for chunk in chunks for cost in costs][:-1],
        )
        time_ms = step_ms(plan.schedule, times, plan.micro_batches)
        busy = sum(plan.micro_batches * (s.forward_ms + s.backward_ms) + s.sync_ms for s in stages)
        return Prediction(
            time_s=time_ms / 1000,
            samples_per_s=plan.global_batch / time_ms * 1000,
            bubble_share=1 - busy / (len(stages) * time_ms),
            stages=stages,
            times=times,
        )

    def in_flight(self, plan: Plan, stage: int) -> tuple[int, ...]:
        """Micro-batches of each chunk whose activations a stage holds when they take most."""
        parts = [self.chunk_parts(plan, stage, chunk) for chunk in range(plan.chunks)]
        return fullest(plan, stage, parts)

    def stage_parts(self, plan: Plan, stage: int) -> list[LayerCost]:
        """Costs of a stage's parts, chunk by chunk."""
        return [part for chunk in range(plan.chunks) for part in self.chunk_parts(plan, stage, chunk)]

    def chunk_parts(self, plan: Plan, stage: int, chunk: int) -> list[LayerCost]:
        """Costs of the parts of a chunk of a stage: its layers in order, before them what comes with the embedding or
        of the chunk before, behind them the LM head where it has it apart."""
        last = plan.pipeline - 1
        where = {
            "stage_size": plan.stage_size,
            "micro_batch": plan.micro_batch,
            "micro_batches": plan.micro_batches,
        }
        common = {**where, "pipeline": plan.pipeline}
        parts = [
            self.layer_cost(plan.layers[layer], layer_type=self.layer_types[layer], **common)
            for layer in plan.chunk_layers(stage, chunk)
        ]
        if plan.is_first(stage, chunk):
            parts.insert(0, self.vocab_cost(plan.vocab, role="first" if last else "only", **common))
        elif plan.is_last(stage, chunk):
            parts.append(self.vocab_cost(plan.vocab, role="last", **common))
        else:
            later = chunk > 0 or stage in (0, last)
            parts.insert(0, self.middle_cost(later=later, **where))
        return parts

    def chunk_switches(self, plan: Plan, stage: int, chunk: int) -> list[tuple[float, float]]:
        """(forward, backward) ms of one micro-batch at each boundary between the parts of a chunk of a stage."""
        where = {"stage_size": plan.stage_size, "micro_batch": plan.micro_batch}
        boundaries, layers = pairwise(plan.chunk_chain(stage, chunk)), plan.chunk_layers(stage, chunk)
        return [
            self.switch_cost(before, after, layer_type=self.crossing_type(layer), **where)
            for layer, (before, after) in enumerate(boundaries, layers.start)
        ]

    def _shared_mib(self, plan: Plan, stage: int) -> float:
        """Memory shared by the layers of a stage, which is in no layer's price."""
        return own_positions_mib(plan, stage, self.models[0], self.memory)

    def _require_mine(self, plan: Plan) -> None:
        if plan.world_size != self.world_size:
            raise UserError(
                f"world_size: the plan is for {plan.world_size} ranks, the cluster has {self.num_nodes} nodes x "
                f"{self.gpus_per_node}; set num_nodes and num_gpus_per_node to the plan's"
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

    @once
    def _move_ms(self, source: TokenLayout, target: TokenLayout, micro_batch: int, layer_type: int) -> float:
        """Resharding takes as long as an all-to-all in which all receive as much as the rank with most."""
        tokens = micro_batch * self.seqs[layer_type]
        change = redistribution(source, target, tokens, micro_batch)
        if not change.most_tokens:
            return 0.0
        mesh = Mesh.of(source.size, (Axis.TENSOR, change.span))
        place = place_of((Axis.TENSOR,), mesh, self.gpus_per_node, self.world_size // source.size)
        received = change.most_tokens / tokens * self._token_bytes(micro_batch, layer_type) / MIB
        return self.network.collective_ms(Collective.ALL_TO_ALL, place, received * change.span / (change.span - 1))

    @once
    def _vocabulary(
        self, vocab: VocabStrategy, stage_size: int, micro_batch: int, micro_batches: int, pipeline: int, role: Role
    ) -> LayerCost:
        first, last = 0, len(self.models) - 1
        mesh = vocab.mesh(stage_size)
        samples = samples_of(vocab, mesh, stage_size, micro_batch)
        settings = [
            self._setting(stage_size, micro_batch, micro_batches > 1, pipeline, layer_type)
            for layer_type in (first, last)
        ]
        split = mesh.degree(*OF_A_SAMPLE)
        own = samples / split
        table = table_weights(self.models[first if role == "first" else last], vocab.tp)
        states_mib = self.memory.vocab_states_mib(role, vocab.tp)
        held = Weights(round(states_mib * MIB / STATE_BYTES), largest=table.largest)
        timed = self.call_times(self._vocab_calls(vocab, role, *settings), mesh, pipeline, held, vocab.sharding)
        pieces = self._head_share(vocab, own) if role != "first" and vocab.pieces > 1 else None

        def head(share: float = 1.0) -> PassTimes:
            return self.times.head(share * own, self.seqs[last], vocab.tp)

        every = []  # the passes of embedding and LM head
        if role != "last":
            every.append(self.times.embedding(own, self.seqs[first], vocab.tp))
        if pieces:
            how = pieces, self.times.profile.launch, timed.forward_ms + timed.backward_ms, self.task.frozen
            every.append(piece_passes(head, *how))
        elif role != "first":
            every.append(head())
        passes = PassTimes(sum(one.forward_ms for one in every), sum(one.backward_ms for one in every))
        passes = passes.slowed(self.network.receive_slowdown(pipeline))
        seq = self.seqs[first if role == "first" else last]  # most of what is kept are the logits
        peak, kept = self.memory.vocab_activation_mib(role, vocab.tp, seq, self.assumed.sequence_parallel, own)
        others = self.others_mib(vocab.tp, self._token_bytes(samples, last) / split / MIB)
        if role != "first" and self.options.keeps_gathered:
            peak, kept = peak + others, kept + others
        if self.task.frozen:  # nothing below the embedding learns, so that nothing goes back through it
            passes = PassTimes(passes.forward_ms, 0.0 if role == "first" or pieces else every[-1].forward_ms)
        room = Room(kept, peak - kept)
        if pieces:
            whole = peak + others, kept + others  # the gradient of all tokens that the group's ranks hold is kept
            room = piece_room(whole, pieces, self.assumed, self.state_bytes, learns=not self.task.frozen)
        elif kept < peak:  # of a few tokens less is kept than the head's gradient takes, which is made again
            made_mib = head_weights(self.models[last], vocab.tp).matrices * self.state_bytes.gradient / MIB
            peak = max(peak, kept + made_mib + self._token_bytes(samples, last) / split / MIB)
            room = Room(kept, peak - kept)
        late = self._late(role)
        room = room._replace(begins=pipeline > 1, sent=0.0 if role == "first" else 1 - late, late=late)
        timed = timed.behind({CommPoint.INTO_HEAD: every[-1].forward_ms})
        sharding = vocab.as_layer().shards(stage_size)
        cost = self.module_cost(vocab.dp_type, sharding, settings[0], timed, passes, held, room, several_matrices=False)
        fixed_mib = self._constants_mib
        fixed_mib += batch_mib(self.memory, samples * micro_batches, seq, micro_batches)
        if role != "only":
            tokens = self._token_bytes(micro_batch, first if role == "first" else last)
            messages = (NEXT if role == "first" else BEFORE)[micro_batches > 1]
            fixed_mib += messages * tokens / stage_size / MIB
        gradients_mib, memory = cost.terms.states.gradients_mib, cost.memory
        if memory and not self.assumed.async_grad_reduce and micro_batches > 1:
            gradients_mib += late * (memory.gradient_mib - memory.kept_mib)  # whole until the step ends
        states = cost.terms.states._replace(gradients_mib=gradients_mib, masks_mib=fixed_mib)
        if memory:
            late_mib = late * memory.gradient_mib
            memory = memory._replace(fixed_mib=memory.fixed_mib + fixed_mib, late_mib=late_mib)
        workspace = cost.workspace  # backward begins with the LM head and ends with the embedding
        if role == "first":  # nothing is fetched while it works
            workspace = workspace._replace(own_mib=workspace.own_mib - workspace.weights_mib)
        else:
            workspace = workspace._replace(weights_mib=0.0)
        return LayerCost.of(cost.terms._replace(states=states), cost.activation_mib, workspace, memory)

    def _head_share(self, vocab: VocabStrategy, samples: float) -> HeadShare:
        """A rank's share of the LM head, with so many samples' worth of tokens."""
        model, tokens = self.models[-1], samples * self.seqs[-1]
        columns = model.padded_vocab_size(vocab.tp) // vocab.tp
        sizes = tuple(vocab.piece_sizes(round(tokens)))
        return HeadShare(tokens, columns, model.hidden_size, vocab.tp > 1, sizes)

    def _late(self, role: Role) -> float:
        """Share of the vocabulary layers' gradients that are reduced when a step ends: an embedding's, as no
        gradient of token ids shows when its backward is done, and those of tied weights, which two modules make."""
        tied, each = self.models[0].tied_embeddings, not self.assumed.async_grad_reduce
        if role == "only":
            return float(each) if tied else 0.5
        return float(each and (tied or role == "first"))

    def _vocab_calls(self, vocab: VocabStrategy, role: Role, embedding: Setting, head: Setting) -> Calls:
        """The embedding is of the first layer type's width and length, the LM head of the last one's."""
        first, last = self.models[0], self.models[-1]
        if role == "only" and not last.tied_embeddings:
            return vocab_calls(first, vocab, "first", embedding).also(vocab_calls(last, vocab, "last", head))
        if role == "first":
            return vocab_calls(first, vocab, role, embedding)
        return vocab_calls(last, vocab, role, head)
