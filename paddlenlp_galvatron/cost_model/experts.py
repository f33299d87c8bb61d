"""Cost of a layer's experts on the rank that receives most rows: the expert half of a layer's price.

The t tokens of a rank are t * k rows, which an all-to-all dispatches to the ranks of their experts and another returns.
Every rank of a stage has equally many tokens under any strategy of the dense half, so the expert half depends only on
its own strategy. The imbalance is the rows of the busiest rank over the mean. A rank that holds all experts computes
only its own rows, at any imbalance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..base import FP32_BYTES, MIB, once
from ..model import Fused, ModelShape, Recompute
from ..plan.comm_points import Collective
from ..plan.mesh import EXCHANGE, Axis
from ..plan.schedule import ByKind
from ..plan.strategy import Experts, padded_rows
from ..profiles.computation import PassTimes
from .collectives import Call, Calls, Setting, matrix_calls
from .costs import LayerCost, Workspace
from .module import ModulePrices, Room, adapter_share, frozen_times, module_memory
from .weights import expert_adapter_weights, expert_factors, expert_weights

OF_EXPERTS = Recompute.FULL | Recompute.SUBLAYER | Recompute.GATE_UP  # kinds of recompute that include experts
COUNT_BYTES = 8  # an int64 row count
# Transient copies of the rows in addition to saved activations: sorted by rank, as received, and sorted by expert.
ROW_BUFFERS = 3


class ExpertPrices:
    """Costs of the experts of decoder layers."""

    def __init__(self, modules: ModulePrices):
        self._modules = modules
        self._options = modules.options

    @once
    def cost(self, experts: Experts, recompute: Recompute, setting: Setting, offload: int = 0) -> LayerCost:
        """The bound of the imbalance sets activations and workspace; the expected imbalance sets times and the memory
        estimate. `recompute`: a kind of OF_EXPERTS, as others exclude experts; `offload`: percent of the
        activations."""
        likely = self._expected(experts, recompute, setting, offload)
        room = self._room(experts, recompute, setting, self._options.imbalance_bound).offloaded(offload)
        sharding = experts.shards(setting.stage_size)
        weights = expert_weights(self._modules.models[setting.layer_type], experts)
        _, workspace, _ = module_memory(weights, setting, experts.dp_type, sharding, room, options=self._options)
        workspace = Workspace.of((likely.workspace, workspace))
        cost = LayerCost.of(likely.terms, room.activation_mib, workspace, likely.memory)
        rank = self._modules.task.adapter_rank
        if rank is not None:
            cost += self._adapters(rank, experts, setting, likely.terms.passes.forward.compute_ms)
        return cost

    def _adapters(self, rank: int, experts: Experts, setting: Setting, forward_ms: float) -> LayerCost:
        """Cost of the experts' adapters without activations, which `_room` adds; `forward_ms`: the experts' forward
        time."""
        model, setting = self._modules.models[setting.layer_type], replace(setting, states=self._modules.state_bytes)
        own_ms = forward_ms * adapter_share(model.routed, experts.etp, rank, setting.assumed.number_types)
        weights, mesh = expert_adapter_weights(model, experts, rank), experts.mesh(setting.stage_size)
        calls = expert_adapter_calls(model, experts, rank, setting)
        timed = self._modules.call_times(calls, mesh, setting.pipeline, weights, experts.sharding)
        sharding, passes = experts.shards(setting.stage_size), PassTimes(own_ms, 2 * own_ms)
        return self._modules.module_cost(experts.dp_type, sharding, setting, timed, passes, weights, Room(0.0, 0.0))

    def _expected(self, experts: Experts, recompute: Recompute, setting: Setting, offload: int) -> LayerCost:
        """The cost at the expected imbalance."""
        model, mesh = self._modules.models[setting.layer_type], experts.mesh(setting.stage_size)
        stretch = min(self._options.imbalance, experts.ep)
        rows = stretch * rows_of(model, experts, setting)
        passes, launch = self._modules.times.experts(model.experts // experts.ep, rows, experts.etp)
        passes = passes.slowed(self._modules.network.receive_slowdown(setting.pipeline))
        if self._modules.task.frozen:
            passes = frozen_times(passes, products=1.0)
        if recompute in (Recompute.NONE, Recompute.GATE_UP):  # gate and up are two of the three products
            again_ms = 2 / 3 * (passes.recompute_ms or 0.0) if recompute else 0.0
            passes = replace(passes, recompute_ms=again_ms)
        weights = expert_weights(model, experts)
        calls = expert_calls(model, experts, recompute, setting, stretch * self._crossing(model, experts))
        timed = self._modules.call_times(calls, mesh, setting.pipeline, weights, experts.sharding)
        passes = passes.launched(launch, timed.forward_ms + timed.backward_ms)
        room = self._room(experts, recompute, setting, stretch).offloaded(offload)
        sharding = experts.shards(setting.stage_size)
        cost = self._modules.module_cost(experts.dp_type, sharding, setting, timed, passes, weights, room)
        moved = ByKind(*(each._replace(tensor_ms=0.0, expert_ms=each.tensor_ms) for each in cost.terms.passes))
        return replace(cost, terms=cost.terms._replace(passes=moved))

    def _room(self, experts: Experts, recompute: Recompute, setting: Setting, imbalance: float) -> Room:
        """Activations and working memory at an imbalance."""
        model = self._modules.models[setting.layer_type]
        rows = min(imbalance, experts.ep) * rows_of(model, experts, setting)
        if self._options.padded and setting.pipeline > 1 and self._modules.profiles.device.is_gpu:
            rows = padded_rows(rows, model.experts // experts.ep)
        kept = model.routed.kept(Fused.NONE)
        row_mib = setting.assumed.number_types.stored.bytes / MIB
        copies = self._options.kernels.copies * model.hidden_size
        # Adapters keep the outputs of their first factors and compute one more gradient of the rows.
        between, buffers = 3 * (self._modules.task.adapter_rank or 0), ROW_BUFFERS + self._modules.task.frozen
        held_mib = rows * (kept.tokens + copies + between + kept.split / experts.etp) * row_mib
        if setting.assumed.products:
            spared = model.routed.spared_bytes(setting.assumed.number_types.stored.bytes)
            held_mib -= rows * spared.on(experts.etp, False) / MIB
        gate_up_mib = rows * 2 * model.expert_size / experts.etp * row_mib
        working_mib = rows * buffers * model.hidden_size * row_mib + gate_up_mib
        again_mib = gate_up_mib if recompute is Recompute.GATE_UP else held_mib if recompute else 0.0
        return Room(held_mib - again_mib, working_mib + again_mib)

    def _crossing(self, model: ModelShape, experts: Experts) -> float:
        """Share of a token's rows that the all-to-all sends: one row per expert, or per rank or node with several of
        the token's experts."""
        if not self._options.kernels.once:
            return 1.0
        nodes, chosen = -(-experts.ranks // self._modules.profiles.gpus_per_node), model.experts_per_token
        places = nodes if nodes > 1 else experts.ep
        return places * (1 - (1 - 1 / places) ** chosen) / chosen


def rows_of(model: ModelShape, experts: Experts, setting: Setting) -> float:
    """Mean rows of a micro-batch that a rank receives. All etp ranks of an expert receive its rows."""
    return setting.micro_batch * setting.seq / setting.stage_size * model.experts_per_token * experts.etp


def expert_adapter_calls(model: ModelShape, experts: Experts, rank: int, setting: Setting) -> Calls:
    """Collectives of the adapters of one layer's experts; first and second factors are reduced separately."""
    sharing, calls = experts.mesh(setting.stage_size).degree(Axis.EXPERT_DATA), Calls()
    for numbers in expert_factors(model, experts, rank):
        calls += matrix_calls(numbers, experts.dp_type, (Axis.EXPERT_DATA,), sharing, experts.sharding, setting)
    if experts.etp == 1:
        return calls
    whole = rank * model.hidden_size * model.experts // experts.ep  # the factors that etp does not split
    sums = (Call(Collective.ALL_REDUCE, (Axis.EXPERT_TENSOR,), whole * setting.states.gradient, 3),)
    at_its_end = sharing == 1 and not setting.assumed.async_grad_reduce
    return calls + (Calls(across=sums) if at_its_end else Calls(reduce=sums))


def expert_calls(
    model: ModelShape, experts: Experts, recompute: Recompute, setting: Setting, stretch: float = 1.0
) -> Calls:
    """Collectives of one layer's experts. `stretch`: rows of the busiest rank over the mean."""
    weights = matrix_calls(
        expert_weights(model, experts).matrices,
        experts.dp_type,
        (Axis.EXPERT_DATA,),
        experts.mesh(setting.stage_size).degree(Axis.EXPERT_DATA),
        experts.sharding,
        setting,
    )
    if experts.ranks == 1:
        return weights
    rows = stretch * rows_of(model, experts, setting)
    width = model.hidden_size * setting.assumed.number_types.sent.bytes
    counts = COUNT_BYTES * model.experts * experts.etp * experts.ranks

    def exchange(forward: bool) -> Iterator[Call]:
        """Dispatch and combine of rows, and the dispatch of their scores."""
        yield Call(Collective.ALL_TO_ALL, EXCHANGE, int(rows * width), 2)
        yield Call(Collective.ALL_TO_ALL, EXCHANGE, int(rows * FP32_BYTES))
        if forward:
            yield Call(Collective.ALL_GATHER, EXCHANGE, counts)

    again = tuple(exchange(False)) if recompute & (Recompute.FULL | Recompute.SUBLAYER) else ()
    return Calls(tuple(exchange(True)), (*exchange(False), *again)) + weights
