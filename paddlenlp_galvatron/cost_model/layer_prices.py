"""Costs of decoder layers, by strategy."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from ..base.errors import UserError
from ..model import Fused, ModelShape, Recompute
from ..plan.comm_points import CommPoint, block_points, comm_ops, repeated
from ..plan.layout import token_axes
from ..plan.mesh import OF_A_SAMPLE, SHARDING, Axis, Mesh
from ..plan.strategy import Assumptions, DataParallel, Experts, LayerStrategy, Strategy
from ..profiles.computation import PassTimes
from ..profiles.compute_time import ComputeTimes
from ..profiles.memory_use import MemoryUse
from ..profiles.network import Network
from .communication import Setting, block_calls, weight_calls
from .costs import CostOptions, LayerCost, Task
from .experts import ExpertPrices
from .messages import Messages
from .module_cost import ModuleCosts
from .module_memory import Room, others_mib
from .recompute import Partly, made_numbers, partly
from .stage_memory import constants_mib, positions_mib
from .task import adapter_share, adapter_weights, frozen_times, packed_times, product_share
from .weights import FP32_BYTES, StateBytes, Weights, layer_weights

MIB = 2**20

# Degree, Ulysses, context, consecutive, ranks of a stage, layer type, stages.
_Placed = tuple[int, bool, int, bool, int, int, int]


class LayerPrices:
    """The part of a cost model that prices layers. Strategies that split a layer alike share what follows from that."""

    models: tuple[ModelShape, ...]
    seqs: tuple[int, ...]
    network: Network
    times: ComputeTimes
    memory: MemoryUse
    assumed: Assumptions
    options: CostOptions
    state_bytes: StateBytes
    experts: ExpertPrices | None  # None: of a dense model
    _modules: ModuleCosts

    def __init__(self) -> None:
        self._layers: dict[tuple[LayerStrategy, int, int, bool, int, int], LayerCost] = {}
        self._split: dict[tuple[_Placed, int], _Split] = {}  # by what splits a layer, and samples of a micro-batch
        self._of_weights: dict[_Placed, dict[DataParallel, Messages]] = {}
        self._parts: dict[tuple[Recompute, int, int], Partly] = {}  # by parts, tp degree and layer type

    @property
    def task(self) -> Task:
        """Which weights learn, on which rows."""
        return self.options.task

    def layer_cost(
        self,
        strategy: LayerStrategy,
        *,
        stage_size: int,
        micro_batch: int,
        micro_batches: int,
        pipeline: int,
        layer_type: int = 0,
    ) -> LayerCost:
        """One layer on a stage of `stage_size` ranks that takes `micro_batch` samples at once, over all its ranks.

        Raises UserError when the samples don't split over the dp degree or a profile lacks what the strategy needs.
        """
        key = (strategy, stage_size, micro_batch, micro_batches > 1, pipeline, layer_type)
        cost = self._layers.get(key)
        if cost is None:
            cost = self._layers[key] = self._layer(*key)
        return cost

    def expert_cost(
        self,
        experts: Experts,
        recompute: Recompute,
        *,
        stage_size: int,
        micro_batch: int,
        micro_batches: int,
        pipeline: int,
    ) -> LayerCost:
        """The experts' part of such a layer, of a model that has some."""
        assert self.experts
        setting = self._setting(stage_size, micro_batch, 0)
        return self.experts.cost(experts, recompute, setting, micro_batches > 1, pipeline)

    def _token_bytes(self, micro_batch: int, layer_type: int) -> int:
        width = self.models[layer_type].hidden_size * self.assumed.mixed_precision.bytes
        return micro_batch * self.seqs[layer_type] * width

    def _setting(self, stage_size: int, micro_batch: int, layer_type: int) -> Setting:
        return Setting(micro_batch, self.seqs[layer_type], stage_size, self.assumed, self.state_bytes)

    @cached_property
    def _constants_mib(self) -> float:
        return constants_mib(self.models, self.seqs, self.memory)

    def _layer(
        self, strategy: LayerStrategy, stage_size: int, micro_batch: int, several: bool, pipeline: int, layer_type: int
    ) -> LayerCost:
        split = self._split_of(strategy, stage_size, micro_batch, layer_type, pipeline)
        of_weights = split.of_weights.get(strategy.dp_type)
        if of_weights is None:
            calls = weight_calls(layer_weights(self.models[layer_type], strategy.tp), strategy, split.setting)
            of_weights = self._modules.messages(calls, split.mesh, pipeline, split.weights)
            split.of_weights[strategy.dp_type] = of_weights
        recomputing = split.recomputing.get(strategy.recompute)
        if recomputing is None:
            recomputing = self._recomputing(strategy, split, layer_type, pipeline)
            split.recomputing[strategy.recompute] = recomputing
        points, times, room = recomputing
        messages = of_weights.behind(points)
        times = times.launched(self.times.profile.launch, messages.forward_ms + messages.backward_ms)
        cost = self._modules.trained(strategy, split.sharding, messages, times, split.held, several, room)
        if self.experts:
            return cost.also(self.experts.cost(strategy.experts, strategy.recompute, split.setting, several, pipeline))
        if (rank := self.task.adapter_rank) is None:
            return cost
        adapters = adapter_weights(self.models[layer_type], strategy.tp, rank)
        calls = weight_calls(adapters, strategy, split.setting)
        share = adapter_share(self.models[layer_type], strategy.tp, rank, self.assumed.mixed_precision)
        own_ms = times.forward_ms * split.products * share
        tokens = split.samples * split.setting.seq / split.shares
        between = len(self.models[layer_type].block.projections) * rank * tokens * split.setting.states.weight / MIB
        own_room = Room(0.0, between) if strategy.recompute is Recompute.FULL else Room(between, 0.0)
        messages = self._modules.messages(calls, split.mesh, pipeline, adapters)
        own_times = PassTimes(own_ms, 2 * own_ms)
        own = self._modules.own(strategy, split.sharding, messages, own_times, adapters, several, own_room)
        return cost.also(own)

    def _split_of(
        self, strategy: LayerStrategy, stage_size: int, micro_batch: int, layer_type: int, pipeline: int
    ) -> _Split:
        placed = (strategy.degree, strategy.ulysses, strategy.context, strategy.consecutive)
        where = (*placed, stage_size, layer_type, pipeline)
        split = self._split.get((where, micro_batch))
        if split is None:
            of_weights = self._of_weights.setdefault(where, {})
            split = self._split_layer(strategy, stage_size, micro_batch, layer_type, pipeline, of_weights)
            self._split[where, micro_batch] = split
        return split

    def _split_layer(
        self,
        strategy: LayerStrategy,
        stage_size: int,
        micro_batch: int,
        layer_type: int,
        pipeline: int,
        of_weights: dict[DataParallel, Messages],
    ) -> _Split:
        model, seq = self.models[layer_type], self.seqs[layer_type]
        mesh = strategy.mesh(stage_size)
        samples = samples_of(strategy, mesh, stage_size, micro_batch)
        shares = mesh.degree(*OF_A_SAMPLE)  # each rank computes its share of whole weights
        times = self.times.layer(layer_type, samples / shares, seq, strategy.tp)
        for axis in OF_A_SAMPLE:
            if mesh.degree(axis) > 1:
                times = times.beside(self.times.points(layer_type, axis, samples / shares, seq))
        times = times.slowed(self.network.beside_receive(pipeline))
        sequence_parallel = self.assumed.sequence_parallel
        activation = self.memory.activation_mib(layer_type, strategy.tp, seq, sequence_parallel) * samples / shares
        working = self.memory.working_mib(layer_type, strategy.tp, seq, sequence_parallel, samples / shares)
        gathered = sequence_parallel and strategy.tp > 1 and self.options.global_memory_buffer
        measured = working > 0
        if gathered and not measured:  # a measured working set has the gathered tokens in it
            tokens = samples * seq / shares
            working += tokens * model.hidden_size * self.assumed.mixed_precision.bytes / MIB
        others = samples * others_mib(model, strategy, mesh, seq, self.assumed)
        working += others  # their gradients
        tables = 0.0
        if (context := mesh.degree(Axis.CONTEXT)) > 1:  # rows of masks and positions for its own tokens
            working += self._constants_mib / context
            tables = positions_mib(model, seq, self.memory, self.assumed)
        products = product_share(model, seq)
        if self.task.frozen:
            times = frozen_times(times, products)
        if (seen := self.task.seen(seq)) < 1 and Fused.ATTENTION in self.assumed.fused:  # a plain mask saves nothing
            times = packed_times(times, products, seen)
            products /= products + (1 - products) * seen
        weights = layer_weights(model, strategy.tp)
        share = self.memory.parameter_mib(layer_type) * MIB / FP32_BYTES / model.layer_parameters
        return _Split(
            mesh,
            mesh.degree(*SHARDING),
            samples,
            shares,
            self._setting(stage_size, micro_batch, layer_type),
            times,
            Room(activation, working, tables_mib=tables, begins=pipeline > 1),
            others,
            measured,
            products,
            weights,
            replace(weights, matrices=round(weights.matrices * share)),
            made_numbers(model, strategy.tp),
            frozenset(at.point for at in comm_ops(strategy.axes, sequence_parallel, block_points(model))),
            of_weights,
        )

    def _recomputing(
        self, strategy: LayerStrategy, split: _Split, layer_type: int, pipeline: int
    ) -> tuple[Messages, PassTimes, Room]:
        """Messages at points, times and room of a layer with the recompute that its strategy has."""
        model, seq, samples = self.models[layer_type], self.seqs[layer_type], split.samples
        sequence_parallel = self.assumed.sequence_parallel
        times, others = split.times, split.others_mib
        activation, working = split.room.activation_mib, split.room.working_mib
        recompute, again_ms = strategy.recompute, 0.0
        # A rank has one of so many parts of a sample's tokens.
        parts = split.mesh.degree(*token_axes(sequence_parallel)) // split.mesh.degree(Axis.DATA)
        # Recompute makes the layer's output, too, which is as large as its input.
        if recompute is Recompute.FULL:
            again_ms = times.recompute_ms or 0.0
            input_mib = self.memory.checkpoint_mib(layer_type, seq) * samples / parts
            working += activation + others + (input_mib if split.measured else 0.0)
            activation, others = input_mib, 0.0
        elif recompute:
            some = self._partly(recompute, strategy.tp, layer_type)
            again_ms = some.again_ms(times)
            output_mib = self._token_bytes(samples, layer_type) / parts / MIB if split.measured else 0.0
            at_once = some.spared * activation + output_mib
            if some.again_mib is None:  # all parts at once take no less
                working += at_once
            else:  # measured without a tp group's messages
                working += max(some.again_mib * samples / split.shares, at_once if strategy.tp > 1 else 0.0)
            activation *= 1 - some.spared
        activation += others  # attention's inputs, which no part makes anew
        made = 0.0
        if split.measured and self.assumed.async_grad_reduce and not self.task.frozen:
            made = split.made[bool(recompute & Recompute.ATTENTION)] * self.state_bytes.gradient / MIB
        again = repeated(recompute) & split.points
        if again not in split.at_points:
            calls = block_calls(model, strategy, split.setting)
            split.at_points[again] = self._modules.messages(calls, split.mesh, pipeline, split.weights)
        return (
            split.at_points[again],
            PassTimes(times.forward_ms, times.backward_ms, again_ms),
            split.room._replace(activation_mib=activation, working_mib=working, made_mib=made),
        )

    def _partly(self, parts: Recompute, tp: int, layer_type: int) -> Partly:
        key = (parts, tp, layer_type)
        if key not in self._parts:
            model, seq = self.models[layer_type], self.seqs[layer_type]
            self._parts[key] = partly(model, parts, tp, self.memory, layer_type, seq, self.assumed)
        return self._parts[key]


@dataclass(frozen=True, slots=True)
class _Split:
    """A layer's share of a rank by what splits it: the same whatever its data parallelism and recompute."""

    mesh: Mesh
    sharding: int  # ranks that share its weights
    samples: int  # of one dp index
    shares: int  # into which their tokens are split under whole weights
    setting: Setting
    times: PassTimes
    room: Room
    others_mib: float  # of other ranks' tokens
    measured: bool  # its working set
    products: float  # share of its operations
    weights: Weights
    held: Weights  # as its memory profile counts them
    made: tuple[int, int]  # numbers of gradients, without and with attention that is computed again
    points: frozenset[CommPoint]  # at which it has operations
    of_weights: dict[DataParallel, Messages]  # whatever the micro-batch, so that those of all share it
    at_points: dict[frozenset[CommPoint], Messages] = field(default_factory=dict)  # by those that backward repeats
    recomputing: dict[Recompute, tuple[Messages, PassTimes, Room]] = field(default_factory=dict)


def samples_of(strategy: Strategy, mesh: Mesh, stage_size: int, micro_batch: int) -> int:
    """Samples of one dp index. Raises UserError where they are no whole number."""
    if mesh.size != stage_size:
        raise UserError(f"degree {strategy.degree} does not divide the {stage_size} ranks of a stage; choose a divisor")
    dp = mesh.degree(Axis.DATA)
    if micro_batch % dp:
        raise UserError(
            f"{micro_batch} samples of a micro-batch do not split over the dp degree {dp}; "
            f"make the batch a multiple of {dp} x micro-batches or choose another degree"
        )
    return micro_batch // dp
