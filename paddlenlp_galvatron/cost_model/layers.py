"""Costs of decoder layers, by strategy.

A layer is priced in one pass: a rank's share (`_share`), recompute in backward (`_recomputed`), the collectives of its
weights (`_weight_times`), and their sum (`cost`), with its experts or adapters.

Times and memory under partial recompute, LoRA and packed rows are derived from measured plain layers. Figures of
partial recompute that the profiles lack come from the model's arithmetic: bytes as a share of a layer's measured
activations, times as a share of the measured time of full recompute. Frozen weights have no gradients, optimizer states
and reductions, and backward computes one product instead of two for each of forward's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import sub
from typing import NamedTuple

from ..base import FP32_BYTES, MIB, UserError, once
from ..model import Fused, ModelShape, Recompute, Split
from ..model.layer import apart
from ..plan.comm_points import CORE, GATHERS, CommPoint, block_points, comm_ops, repeated
from ..plan.layout import token_axes
from ..plan.mesh import OF_A_SAMPLE, SHARDING, Axis, Mesh
from ..plan.strategy import LayerStrategy, Strategy
from ..profiles.analytic import layer_numbers_per_token, recompute_saving_per_token, recompute_shares
from ..profiles.computation import PassTimes
from .collectives import CallTimes, Setting, point_calls, weight_calls
from .costs import LayerCost, StageSetting
from .experts import OF_EXPERTS, ExpertPrices
from .module import ModulePrices, Room, adapter_share, frozen_times
from .stage_memory import positions_mib
from .weights import Weights, adapter_weights, weights_of

# Operations of matrix products in the time of moving one byte: A100 144, H100 277, in 16 bits and with the efficiencies
# of their data sheets.
FLOPS_PER_BYTE = 200.0
# The points that gather MLA's latents for these products.
GATHERED_AT = {"self_attn.q_b_proj.weight": CommPoint.LATENT_QUERY, "self_attn.kv_b_proj.weight": CommPoint.LATENT}


class Partly(NamedTuple):
    """Partial recompute of a layer, for any number of samples."""

    parts: tuple[Recompute, ...]  # single parts
    shares: Mapping[Recompute, float]  # of the time of full recompute, where parts were not measured
    spared: float  # share of the layer's activations that is freed
    again_mib: float | None  # per sample; see `MemoryUse.recompute_peak_mib`

    def again_ms(self, times: PassTimes) -> float:
        """Time of the recompute, from the times of the layer's passes and of full recompute."""
        shares = {**self.shares, **(times.shares or {})}
        whole_ms = times.forward_ms if times.recompute_ms is None else times.recompute_ms
        return whole_ms * sum([shares[member] for member in self.parts])


def made_numbers(model: ModelShape, tp: int) -> tuple[int, int]:
    """Gradient elements at the memory peak of a step's first backward: of the MLP's last matrix; with recomputed
    attention, of the whole MLP."""
    mlp = [weight for sublayer in model.block.sublayers if not sublayer.attends for weight in sublayer.weights]
    sizes = [weight.numbers_on(tp) for weight in mlp if weight.sharded]
    return sum(sizes[-1:]), sum(sizes)


def product_share(model: ModelShape, seq: int) -> float:
    """Share of a layer's operations in products with weights; the rest is attention."""
    weights = 2 * model.layer_parameters
    return weights / (weights + model.core_flops(seq))


@lru_cache(maxsize=100)
def products_behind(model: ModelShape, seq: int) -> dict[CommPoint, float]:
    """Share of a layer's operations in the products after each communication point that gathers their tokens."""
    all_flops = 2 * model.layer_parameters + model.core_flops(seq)
    read = dict.fromkeys(GATHERS, 0)
    for sublayer in model.block.sublayers:
        into = CommPoint.INTO_ATTENTION if sublayer.attends else CommPoint.INTO_MLP
        for weight in sublayer.weights:
            if weight.linear and weight.split is Split.COLUMN:
                read[GATHERED_AT.get(weight.name, into)] += weight.numbers
    return {point: 2 * numbers / all_flops for point, numbers in read.items()}


def packed_times(times: PassTimes, products: float, seen: float) -> PassTimes:
    """The times where attention computes a share `seen` of a causal row's pairs of tokens; `products`: share of the
    operations outside attention."""
    share = products + (1 - products) * seen
    return replace(times, forward_ms=share * times.forward_ms, backward_ms=share * times.backward_ms)


@dataclass(frozen=True, slots=True)
class _Share:
    """A rank's share of a layer by its split: the same for any data parallelism and recompute."""

    mesh: Mesh
    samples: int  # samples of one dp rank
    parts: int  # number of ranks that split their tokens under whole weights
    passes: PassTimes
    room: Room
    gathered_mib: float  # keys and values of other ranks' tokens
    measured: bool  # whether its working set was measured
    products: float  # share of its operations in products with weights
    weights: Weights  # the weights that the memory profile counts
    made: tuple[int, int]  # gradient elements, without and with recomputed attention
    points: frozenset[CommPoint]  # points with communication
    others_mib: float  # other ranks' tokens gathered for products, if not in the activations
    mtp_mib: float  # kept before an MTP layer and after it


class LayerPrices:
    """Costs of decoder layers, over all ranks of a stage.

    Raises UserError if samples do not split over the dp degree or a profile lacks an entry for a strategy.
    """

    def __init__(self, modules: ModulePrices, experts: ExpertPrices):
        self._modules, self._experts = modules, experts
        self._models, self._memory = modules.models, modules.memory
        self._assumed, self._task = modules.assumed, modules.task

    @once
    def cost(self, strategy: LayerStrategy, setting: Setting) -> LayerCost:
        placed = _placed(strategy)
        share = self._share(placed, setting)
        points, passes, room = self._recomputed(placed, strategy.recompute & ~Recompute.GATE_UP, setting)
        room = room.offloaded(strategy.offload)
        where = setting.stage_size, setting.pipeline, setting.layer_type
        weights = self._weight_times(replace(placed, dp_type=strategy.dp_type, sharding=strategy.sharding), *where)
        shares = products_behind(self._models[setting.layer_type], setting.seq)
        points = points.behind({point: share * passes.forward_ms for point, share in shares.items()})
        timed = weights._replace(
            forward_ms=points.forward_ms, backward_ms=points.backward_ms, hidden_ms=points.hidden_ms
        )
        passes = passes.launched(self._modules.times.profile.launch, timed.forward_ms + timed.backward_ms)
        sharding = strategy.shards(setting.stage_size)
        cost = self._modules.module_cost(strategy.dp_type, sharding, setting, timed, passes, share.weights, room)
        if self._task.adapter_rank is not None:
            cost += self._adapters(self._task.adapter_rank, strategy, share, setting, passes.forward_ms)
        if self._models[setting.layer_type].experts:
            again = strategy.recompute & OF_EXPERTS
            cost += self._experts.cost(strategy.experts, again, setting, strategy.offload)
        return cost.behind_copies(self._modules.host_mib_per_ms("offload_enc")) if strategy.offload else cost

    def _adapters(
        self, rank: int, strategy: LayerStrategy, share: _Share, setting: Setting, forward_ms: float
    ) -> LayerCost:
        """Cost of a layer's adapters; `forward_ms`: the layer's forward time."""
        model, setting = self._models[setting.layer_type], replace(setting, states=self._modules.state_bytes)
        weights = adapter_weights(model, strategy.tp, rank)
        own_ms = forward_ms * share.products
        own_ms *= adapter_share(model.block, strategy.tp, rank, self._assumed.number_types)
        tokens = share.samples * setting.seq / share.parts
        between_mib = len(model.block.projections) * rank * tokens * setting.states.weight / MIB
        room = Room(0.0, between_mib) if strategy.recompute is Recompute.FULL else Room(between_mib, 0.0)
        room = room.offloaded(strategy.offload)
        timed = self._modules.call_times(
            weight_calls(weights, strategy, setting), share.mesh, setting.pipeline, weights
        )
        sharding, passes = share.mesh.degree(*SHARDING), PassTimes(own_ms, 2 * own_ms)
        return self._modules.module_cost(strategy.dp_type, sharding, setting, timed, passes, weights, room)

    @once
    def _weight_times(self, sharded: LayerStrategy, stage_size: int, pipeline: int, layer_type: int) -> CallTimes:
        """Times of the collectives of a layer's weights, for any micro-batch and recompute."""
        setting = self._modules.setting(StageSetting(stage_size, 0, 1, pipeline), layer_type)
        weights = weights_of(self._models[layer_type].block, sharded.tp)
        calls = weight_calls(weights, sharded, setting)
        return self._modules.call_times(calls, sharded.mesh(stage_size), pipeline, weights, sharded.sharding)

    @once
    def _share(self, placed: LayerStrategy, setting: Setting) -> _Share:
        layer_type, seq = setting.layer_type, setting.seq
        model, mesh = self._models[layer_type], placed.mesh(setting.stage_size)
        samples = samples_of(placed, mesh, setting.stage_size, setting.micro_batch)
        parts = mesh.degree(*OF_A_SAMPLE)  # each rank computes its share of whole weights
        measured_type = self._modules.measured_type(layer_type)
        plain = self._models[measured_type]
        passes = self._modules.times.layer(measured_type, samples / parts, seq, placed.tp)
        for axis in OF_A_SAMPLE:
            if mesh.degree(axis) > 1:
                passes = passes.with_points(self._modules.times.points(measured_type, axis, samples / parts, seq))
        passes = passes.slowed(self._modules.network.receive_slowdown(setting.pipeline))
        sequence_parallel = self._assumed.sequence_parallel
        activation = self._memory.activation_mib(measured_type, placed.tp, seq, sequence_parallel) * samples / parts
        points = frozenset(at.point for at in comm_ops(placed.axes, sequence_parallel, block_points(model)))
        tokens_mib = self._modules.token_bytes(samples, layer_type) / parts / MIB
        others = len(points & GATHERS) * self._modules.others_mib(placed.tp, tokens_mib)
        activation += others if self._modules.options.keeps_gathered else 0.0
        working = self._memory.working_mib(measured_type, placed.tp, seq, sequence_parallel, samples / parts)
        measured = working > 0
        # A measured working set includes Megatron-SP's gathered tokens.
        if sequence_parallel and placed.tp > 1 and self._modules.options.global_memory_buffer and not measured:
            working += tokens_mib
        gathered = samples * self._gathered_mib(placed, mesh, layer_type)
        working += gathered  # also their gradients
        tables = 0.0
        if (context := mesh.degree(Axis.CONTEXT)) > 1:  # rows of masks and positions for its own tokens
            working += self._modules.constants_mib / context
            tables = positions_mib(model, seq, self._memory, self._assumed)
        mtp_mib = 0.0
        if model.mtp_layers:  # its projection, of all tokens of a rank, and the activations kept for it
            more = (model.layer_parameters / plain.layer_parameters - 1) * product_share(plain, seq)
            passes = passes.slowed(1 + more * (1 if sequence_parallel else placed.tp))
            how = seq, placed.tp, sequence_parallel, self._assumed.fused
            numbers, scalars = map(sub, *(layer_numbers_per_token(each, *how) for each in (model, plain)))
            mtp_mib = numbers * tokens_mib / model.hidden_size + scalars * seq * samples / parts * FP32_BYTES / MIB
        products = product_share(model, seq)
        if self._task.frozen:
            passes = frozen_times(passes, products)
        if (seen := self._task.seen(seq)) < 1 and Fused.ATTENTION in self._assumed.fused:  # a dense mask saves no time
            seen = model.core_flops(seen * seq) / model.core_flops(seq)
            passes = packed_times(passes, products, seen)
            products /= products + (1 - products) * seen
        weights = weights_of(model.block, placed.tp)
        counted = self._memory.parameter_mib(measured_type) * MIB / FP32_BYTES / plain.layer_parameters
        return _Share(
            mesh,
            samples,
            parts,
            passes,
            Room(activation, working, tables_mib=tables, begins=setting.pipeline > 1),
            gathered,
            measured,
            products,
            replace(weights, matrices=round(weights.matrices * counted)),
            made_numbers(model, placed.tp),
            points,
            0.0 if self._modules.options.keeps_gathered else others,
            mtp_mib,
        )

    @once
    def _recomputed(
        self, placed: LayerStrategy, recompute: Recompute, setting: Setting
    ) -> tuple[CallTimes, PassTimes, Room]:
        """Collectives at communication points, passes and memory of a layer with this recompute."""
        share, layer_type = self._share(placed, setting), setting.layer_type
        passes, gathered, samples = share.passes, share.gathered_mib, share.samples
        activation, working = share.room.activation_mib, share.room.working_mib
        again_ms, points = 0.0, repeated(recompute) & share.points
        # Number of ranks that split a sample's tokens.
        parts = share.mesh.degree(*token_axes(self._assumed.sequence_parallel)) // share.mesh.degree(Axis.DATA)
        # Recompute also makes the layer's output, which is as large as its input, and keeps Megatron-SP's gathered
        # tokens.
        if recompute is Recompute.FULL:
            working += share.others_mib
            again_ms = passes.recompute_ms or 0.0
            inputs = samples / parts * (1 + self._models[layer_type].mtp_layers)
            input_mib = inputs * self._memory.checkpoint_mib(self._modules.measured_type(layer_type), setting.seq)
            working += activation + share.mtp_mib + gathered + (input_mib if share.measured else 0.0)
            activation, gathered = input_mib - share.mtp_mib, 0.0
        elif recompute:
            partial = self._partly(recompute, placed.tp, layer_type)
            again_ms = partial.again_ms(passes)
            output_mib = self._modules.token_bytes(samples, layer_type) / parts / MIB if share.measured else 0.0
            at_once = partial.spared * activation + output_mib
            if partial.again_mib is None:  # an upper bound: recomputing all parts at once
                working += at_once
            else:  # measured without tp communication
                working += max(partial.again_mib * samples / share.parts, at_once if placed.tp > 1 else 0.0)
            activation *= 1 - partial.spared
        activation += gathered + share.mtp_mib  # attention's inputs, which no part recomputes
        made = 0.0
        if share.measured and self._assumed.async_grad_reduce and not self._task.frozen:
            made = share.made[bool(recompute & Recompute.ATTENTION)] * self._modules.state_bytes.gradient / MIB
        return (
            self._point_times(placed, points, setting),
            PassTimes(passes.forward_ms, passes.backward_ms, again_ms),
            share.room._replace(activation_mib=activation, working_mib=working, made_mib=made),
        )

    @once
    def _point_times(self, placed: LayerStrategy, again: frozenset[CommPoint], setting: Setting) -> CallTimes:
        """Times of the collectives at a layer's communication points; backward repeats some of them."""
        model = self._models[setting.layer_type]
        calls = point_calls(model, placed, setting, block_points(model), again)
        weights = weights_of(model.block, placed.tp)
        times = self._modules.call_times(calls, placed.mesh(setting.stage_size), setting.pipeline, weights)
        return times.slowed(self._modules.network.tensor_share(setting.pipeline) if placed.tp > 1 else 1.0)

    @once
    def _partly(self, parts: Recompute, tp: int, layer_type: int) -> Partly:
        """The effect of recomputing these parts of a layer."""
        assumed, seq = self._assumed, self._modules.seqs[layer_type]
        measured_type, sequence_parallel = self._modules.measured_type(layer_type), assumed.sequence_parallel
        model, precision = self._models[measured_type], assumed.number_types.stored
        spared_mib = self._memory.recompute_saving_mib(measured_type, parts, tp, seq, sequence_parallel)
        if spared_mib is None:
            how = model, seq, tp, sequence_parallel, assumed.fused
            numbers = recompute_saving_per_token(*how, parts), layer_numbers_per_token(*how)
            saved, kept = (precision.bytes * stored + FP32_BYTES * scalars for stored, scalars in numbers)
            spared = saved / kept
        else:
            spared = min(spared_mib / self._memory.activation_mib(measured_type, tp, seq, sequence_parallel), 1.0)
        shares = recompute_shares(model, seq, precision, assumed.fused, FLOPS_PER_BYTE)
        again_mib = self._memory.recompute_peak_mib(measured_type, parts, tp, seq, sequence_parallel)
        return Partly(apart(parts), shares, spared, again_mib)

    def _gathered_mib(self, placed: LayerStrategy, mesh: Mesh, layer_type: int) -> float:
        """MiB of other ranks' keys and values that a rank gathers, and keeps per sample. Plain attention keeps them for
        each head, flash attention once for all heads that share them."""
        model, assumed = self._models[layer_type], self._assumed
        heads_split = mesh.degree(Axis.ULYSSES, Axis.TENSOR)
        context = mesh.degree(*(at.axis for at in comm_ops(placed.axes, assumed.sequence_parallel, CORE)))
        both = model.q_width + model.context_width
        if assumed.flash_attention:
            both = (model.k_width + model.v_width) * max(heads_split // model.kv_heads, 1)
        others = (1 - 1 / context) * self._modules.options.keeps_keys
        numbers = both / heads_split * self._modules.seqs[layer_type] * others
        return numbers * assumed.number_types.stored.bytes / MIB


@lru_cache(maxsize=100_000)
def _placed(strategy: LayerStrategy) -> LayerStrategy:
    """The strategy that stands for all strategies with the same split of a layer."""
    return LayerStrategy(**strategy.named, consecutive=strategy.consecutive)


def samples_of(strategy: Strategy, mesh: Mesh, stage_size: int, micro_batch: int) -> int:
    """Samples of one dp rank. Raises UserError if that is no whole number."""
    if mesh.size != stage_size:
        raise UserError(f"degree {strategy.degree} does not divide the {stage_size} ranks of a stage; choose a divisor")
    dp = mesh.degree(Axis.DATA)
    if micro_batch % dp:
        raise UserError(
            f"{micro_batch} samples of a micro-batch do not split over the dp degree {dp}; "
            f"make the batch a multiple of {dp} x micro-batches or choose another degree"
        )
    return micro_batch // dp
