"""Cost of a layer's experts on the rank that receives most rows: the expert half of a layer's price.

The t tokens of a rank are t * k rows, which an all-to-all dispatches to the ranks of their experts and another returns.
Every rank of a stage has equally many tokens under any strategy of the dense half, so the expert half depends on its
own strategy alone. The imbalance is the rows of the fullest rank over the mean. A rank that holds all experts computes
its own rows only, at any imbalance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..model import Fused, ModelShape, Recompute
from ..plan.comm_points import Collective
from ..plan.mesh import EXCHANGE, Axis
from ..plan.strategy import Experts, LayerStrategy
from ..profiles.compute_time import ComputeTimes
from ..profiles.network import Network
from .communication import Call, Calls, Setting, matrix_calls
from .costs import CostOptions, LayerCost, Workspace
from .module_cost import ModuleCosts
from .module_memory import Room
from .weights import FP32_BYTES, Weights

MIB = 2**20
COUNT_BYTES = 8  # an int64 row count
# Transient copies of the rows beside saved activations: in the order of ranks, as received, and by expert.
ROW_BUFFERS = 3

_Where = tuple[Experts, Recompute, int, int, bool, int]


class ExpertPrices:
    """Prices of one model's experts on one cluster."""

    def __init__(
        self,
        model: ModelShape,
        times: ComputeTimes,
        network: Network,
        modules: ModuleCosts,
        options: CostOptions,
        gpus_per_node: int,
    ):
        self._model, self._times, self._network, self._modules = model, times, network, modules
        self._options, self._gpus_per_node = options, gpus_per_node
        self._known: dict[_Where, LayerCost] = {}

    def cost(self, experts: Experts, recompute: Recompute, setting: Setting, several: bool, pipeline: int) -> LayerCost:
        """Cost of one layer's experts for one micro-batch; `several`: the step has more. The bound of the imbalance
        sets activations and workspace; the expected imbalance sets times and the memory estimate."""
        recompute &= Recompute.FULL  # partial recompute leaves experts out
        where = experts, recompute, setting.stage_size, setting.samples, several, pipeline
        if where not in self._known:
            likely = self._expected(experts, recompute, setting, several, pipeline)
            weights, own = expert_weights(self._model, experts), LayerStrategy(dp_type=experts.dp_type)
            room = self._room(experts, recompute, setting, self._options.imbalance_bound)
            sharding = experts.mesh(setting.stage_size).degree(Axis.EXPERT_DATA)
            _, workspace, _ = self._modules.memory(own, sharding, weights, several, room)
            workspace = Workspace.of((likely.workspace, workspace))
            self._known[where] = LayerCost.of(likely.terms, room.activation_mib, workspace, likely.memory)
        return self._known[where]

    def _expected(
        self, experts: Experts, recompute: Recompute, setting: Setting, several: bool, pipeline: int
    ) -> LayerCost:
        """The cost at the expected imbalance."""
        model, mesh = self._model, experts.mesh(setting.stage_size)
        stretch = min(self._options.imbalance, experts.ep)
        rows = stretch * rows_of(model, experts, setting)
        times, launch = self._times.experts(model.experts // experts.ep, rows, experts.etp)
        times = times.slowed(self._network.beside_receive(pipeline))
        times = times if recompute else replace(times, recompute_ms=0.0)
        weights = expert_weights(model, experts)
        calls = expert_calls(model, experts, recompute, setting, stretch * self._crossing(experts))
        messages = self._modules.messages(calls, mesh, pipeline, weights)
        times = times.launched(launch, messages.forward_ms + messages.backward_ms)
        own, room = LayerStrategy(dp_type=experts.dp_type), self._room(experts, recompute, setting, stretch)
        return self._modules.own(own, mesh.degree(Axis.EXPERT_DATA), messages, times, weights, several, room)

    def _room(self, experts: Experts, recompute: Recompute, setting: Setting, imbalance: float) -> Room:
        """Activations and working memory at an imbalance."""
        model = self._model
        rows = min(imbalance, experts.ep) * rows_of(model, experts, setting)
        kept = model.routed.kept(Fused.NONE)
        row_mib = setting.assumed.mixed_precision.bytes / MIB
        copies = self._options.kernels.copies * model.hidden_size
        held_mib = rows * (kept.gathered + copies + kept.split / experts.etp) * row_mib
        working_mib = rows * (ROW_BUFFERS * model.hidden_size + 2 * model.expert_size / experts.etp) * row_mib
        return Room(0.0, working_mib + held_mib) if recompute else Room(held_mib, working_mib)

    def _crossing(self, experts: Experts) -> float:
        """Share of a token's rows that the exchange sends: one for each of its experts, or of the ranks that have
        some, or of their nodes, where they are several."""
        if not self._options.kernels.once:
            return 1.0
        nodes, chosen = -(-experts.ranks // self._gpus_per_node), self._model.experts_per_token
        places = nodes if nodes > 1 else experts.ep
        return places * (1 - (1 - 1 / places) ** chosen) / chosen


def rows_of(model: ModelShape, experts: Experts, setting: Setting) -> float:
    """Mean rows of a micro-batch that a rank receives. All etp ranks of an expert receive its rows."""
    return setting.samples * setting.seq / setting.stage_size * model.experts_per_token * experts.etp


def expert_weights(model: ModelShape, experts: Experts) -> Weights:
    """Expert weights on one rank, priced as three stacked matrices."""
    numbers = model.routed.parameters // experts.ranks
    return Weights(matrices=numbers, largest=numbers // 3)


def expert_calls(
    model: ModelShape, experts: Experts, recompute: Recompute, setting: Setting, stretch: float = 1.0
) -> Calls:
    """Collectives of one layer's experts. `stretch`: rows of the fullest rank over the mean."""
    weights = matrix_calls(
        expert_weights(model, experts).matrices,
        experts.dp_type,
        experts.mesh(setting.stage_size).degree(Axis.EXPERT_DATA),
        (Axis.EXPERT_DATA,),
        setting,
    )
    if model.router_aux_loss_coef and setting.stage_size > 1:
        shares = setting.samples * model.experts * FP32_BYTES  # of each sample and expert, for the balance loss
        weights = Calls((Call(Collective.ALL_REDUCE, (Axis.EXPERT_DATA, *EXCHANGE), shares),)).also(weights)
    if experts.ranks == 1:
        return weights
    rows = stretch * rows_of(model, experts, setting)
    width = model.hidden_size * setting.assumed.mixed_precision.bytes
    counts = COUNT_BYTES * model.experts * experts.etp * experts.ranks

    def exchange(forward: bool) -> Iterator[Call]:
        """Dispatch and combine of rows, and the dispatch of their scores."""
        yield Call(Collective.ALL_TO_ALL, EXCHANGE, int(rows * width), 2)
        yield Call(Collective.ALL_TO_ALL, EXCHANGE, int(rows * FP32_BYTES))
        if forward:
            yield Call(Collective.ALL_GATHER, EXCHANGE, counts)

    again = tuple(exchange(False)) if recompute is Recompute.FULL else ()
    return Calls(tuple(exchange(True)), (*exchange(False), *again)).also(weights)
