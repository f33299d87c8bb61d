"""The cost of one module on its busiest rank: its passes, collectives and weights.

Between micro-batches a module holds its states; a micro-batch in flight adds its activations. The module's backward
needs transient memory: recomputed activations, gathered weights, gradients before they are scattered, and the buffer in
which they are joined. By then the kept activations have been freed, so transients up to their size cost nothing.
Recomputed activations are in the working set and take no memory between micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from ..base import FP32_BYTES, GB_PER_S, MIB, UserError, once
from ..model import LayerKind, ModelShape, Split
from ..plan import Assumptions, ByKind, DataParallel, Mesh
from ..plan.precision import NumberTypes
from ..plan.strategy import JOINED_NUMBERS, PART, PLACES, STATES
from ..profiles.computation import PassTimes
from .collectives import Calls, CallTimes, Setting
from .costs import CostOptions, LayerCost, PartMemory, PassTerms, Profiles, StageSetting, States, Task, Terms, Workspace
from .stage_memory import constants_mib
from .weights import MOMENT_BYTES, StateBytes, Weights

# A product with a factor is memory-bound: the first takes as long as reading its input; the second as writing its
# output, reading it with the projection's, and writing their sum. Reading in 16 bits takes as long as a product with
# this rank: peak / bandwidth, each times its efficiency, 153 (A100) to 255 (H100) in the shipped data sheets.
LEAST_RANK = 200


class Room(NamedTuple):
    """Memory of one micro-batch in a module, in MiB."""

    activation_mib: float  # kept while the micro-batch is in flight
    working_mib: float  # backward's own peak above the memory held
    made_mib: float = 0.0  # gradients already produced when the first backward reaches its peak
    tables_mib: float = 0.0  # shared by all layers that split a sample equally: positions of a rank's tokens
    begins: bool = False  # may be first in a stage's backward, when no activations have been freed yet
    sent: float = 1.0  # share of its gradients in flight during the next module's backward
    late: float = 0.0  # share of its gradients that are reduced separately at the end of the step
    away_mib: float = 0.0  # activations in host memory while the micro-batch is in flight

    def offloaded(self, percent: int) -> Room:
        """The same with this percentage of the activations in host memory until backward."""
        away = percent / 100 * self.activation_mib
        return self._replace(
            activation_mib=self.activation_mib - away, working_mib=self.working_mib + away, away_mib=away
        )


class ModulePrices:
    """Costs of modules of one model on one cluster; `models` has one shape for each layer type.

    Raises UserError without a sequence length, and for offloading without a known host link.
    """

    def __init__(
        self, models: Sequence[ModelShape], profiles: Profiles, assumed: Assumptions, options: CostOptions
    ) -> None:
        if assumed.seq_length is None:
            raise UserError("seq_length: missing; say how many tokens a sample has")
        self.models = tuple(models)
        self.profiles = profiles
        self.assumed = assumed
        self.options = options
        self.network, self.times, self.memory = profiles.network, profiles.times, profiles.memory
        self.seqs = tuple(shape.seq_length or assumed.seq_length for shape in self.models)
        self.state_bytes = StateBytes.of(assumed.number_types)  # bytes of a weight's states
        # Speed to and from host memory, for offloaded optimizer states; else None.
        self.states_mib_per_ms = self.host_mib_per_ms("offload_optimizer") if assumed.offload_optimizer else None

    def host_mib_per_ms(self, option: str) -> float:
        """Speed of a GPU's copies to or from host memory while all GPUs of a node copy; `option`: the option that needs
        it, for the error."""
        if self.profiles.device.host_link_gb_per_s is None:
            raise UserError(
                f"{option}: no profile names a GPU whose data sheet has the speed of its host's memory; "
                "leave it out, or galvatron profile all --analytic"
            )
        return self.profiles.device.host_link_gb_per_s * GB_PER_S

    @property
    def task(self) -> Task:
        """The trained weights and their rows."""
        return self.options.task

    @cached_property
    def constants_mib(self) -> float:
        """Masks and positions of a stage, in MiB."""
        return constants_mib(self.models, self.seqs, self.memory)

    def measured_type(self, layer_type: int) -> int:
        """The layer type whose measurements price this type: for an MTP layer that of the layers before it."""
        return layer_type - bool(self.models[layer_type].mtp_layers)

    def token_bytes(self, micro_batch: int, layer_type: int) -> int:
        """Bytes of the hidden states of `micro_batch` samples."""
        width = self.models[layer_type].hidden_size * self.assumed.number_types.sent.bytes
        return micro_batch * self.seqs[layer_type] * width

    @once
    def setting(self, stage: StageSetting, layer_type: int) -> Setting:
        """The setting of a module; the same object for equal prices, which are cached by it."""
        if stage.micro_batches > 2:
            return self.setting(stage._replace(micro_batches=2), layer_type)
        states = self.state_bytes.frozen if self.task.frozen else self.state_bytes
        size, micro_batch, count, pipeline = stage
        return Setting(size, micro_batch, count > 1, pipeline, self.seqs[layer_type], self.assumed, states, layer_type)

    def others_mib(self, tp: int, tokens_mib: float) -> float:
        """Memory of the tokens that Megatron-SP gathers from other ranks for products."""
        return tokens_mib * (1 - 1 / tp) if self.assumed.sequence_parallel else 0.0

    def call_times(
        self, calls: Calls, mesh: Mesh, pipeline: int, weights: Weights, sharding: int | None = None
    ) -> CallTimes:
        """The times of a module's collectives."""
        calls = calls.alone if self.options.keeps_gathered else calls
        calls = calls if self.options.overlaps else calls.in_turn
        return CallTimes.of(calls, mesh, pipeline, weights.copies, sharding, self.network)

    def module_cost(
        self,
        dp_type: DataParallel,
        sharding: int,
        setting: Setting,
        calls: CallTimes,
        passes: PassTimes,
        weights: Weights,
        room: Room,
        several_matrices: bool = True,
    ) -> LayerCost:
        """Cost of a module with one or several matrices that `sharding` ranks hold equally or shard. `passes`: with the
        strategy's recompute."""
        again_ms = passes.recompute_ms or 0.0
        compute_ms = passes.backward_ms + again_ms
        gathers, reductions = calls.gather_backward, calls.reduce
        forward = calls.gather_forward.with_compute(passes.forward_ms)
        backward = gathers.with_compute(compute_ms)
        reduce_ms = (gathers + reductions).with_compute(compute_ms) - backward
        all_ms = (gathers + reductions + calls.across).with_compute(compute_ms)
        across_ms = all_ms - reduce_ms - backward
        sharded = dp_type is not DataParallel.DDP and sharding > 1
        learns = setting.states.optimizer > 0
        updated = (weights.matrices / (sharding if sharded else 1) + weights.vectors) if learns else 0.0
        held = dp_type, sharding, room, several_matrices, self.options
        states, workspace, memory = module_memory(weights, setting, *held)
        optimizer_ms = updated / 1e6 * self.times.profile.optimizer_ms_per_million
        if self.states_mib_per_ms:  # both ways share host memory with the node's other GPUs
            optimizer_ms += 2 * memory.host_mib / self.states_mib_per_ms
        shown_ms, each = (forward - passes.forward_ms, backward - compute_ms), not self.assumed.async_grad_reduce
        terms = Terms(
            states,
            ByKind(
                PassTerms(passes.forward_ms, gather_ms=shown_ms[0], tensor_ms=calls.forward_ms),
                PassTerms(passes.backward_ms, again_ms, shown_ms[1], reduce_ms if each else 0.0, calls.backward_ms),
            ),
            tensor_hidden_ms=calls.hidden_ms,
            gather_hidden_ms=calls.gather_forward.ms + gathers.ms - sum(shown_ms),
            reduce_ms=0.0 if each else reduce_ms,
            reduce_hidden_ms=reductions.ms - reduce_ms,
            reduced_each=each,
            finish_ms=calls.finish_ms + across_ms,
            publish_ms=calls.publish_ms,
            optimizer_ms=optimizer_ms,
        )
        return LayerCost.of(terms, room.activation_mib, workspace, memory)

    @property
    def places_mib(self) -> float:
        """Memory of a rank through which an offloaded optimizer's states pass."""
        passes = self.assumed.offload_optimizer and not self.options.masters_first
        return PLACES * STATES * PART * FP32_BYTES / MIB if passes else 0.0


def module_memory(
    weights: Weights,
    setting: Setting,
    dp_type: DataParallel,
    sharding: int,
    room: Room,
    several_matrices: bool = True,
    options: CostOptions = CostOptions(),
) -> tuple[States, Workspace, PartMemory]:
    """(states, workspace, memory for a walk) of a module whose matrices are shared by `sharding` ranks.

    With `async_grad_reduce` gradients of several micro-batches are summed before they are reduced. With one micro-batch
    gradients replace freed activations, so that only their excess is added to the states. With `masters_first` the
    first update of an offloaded optimizer has the fp32 weights of all modules on the device; each matrix in turn gets
    its moments, which leave with its fp32 weight. Freed activations make room for most of this. If a share of freed
    memory is known, the allocator does not reuse that room, nor for the 16-bit weights that are then gathered.
    """
    per_weight, several, async_reduce = setting.states, setting.several, setting.assumed.async_grad_reduce
    matrices_mib = weights.matrices / MIB
    sharded = dp_type is not DataParallel.DDP and sharding > 1
    vectors_mib = weights.vectors / MIB
    shards = sharding if sharded else 1
    gradient_mib = matrices_mib * per_weight.gradient
    whole_gradients, single = async_reduce and several, async_reduce and not several
    kept_mib = gradient_mib / (1 if whole_gradients else shards)
    moments_mib = matrices_mib * per_weight.optimizer / shards + vectors_mib * per_weight.optimizer
    master_mib = moments_mib * max(per_weight.optimizer - MOMENT_BYTES, 0) / max(per_weight.optimizer, 1)
    offload, host_mib = setting.assumed.offload_optimizer, moments_mib
    if offload and options.masters_first and options.freed is not None:
        gathers = sharded and dp_type is not DataParallel.ZERO3
        moments_mib = master_mib + max(gathers * matrices_mib * per_weight.weight - room.activation_mib, 0.0)
    elif offload:
        moments_mib = max(master_mib - room.activation_mib, 0.0) if options.masters_first else 0.0
    states = States(
        matrices_mib * per_weight.weight / (shards if dp_type is DataParallel.ZERO3 else 1)
        + vectors_mib * per_weight.weight,
        (max(kept_mib - room.activation_mib, 0.0) if single else kept_mib) + vectors_mib * per_weight.gradient,
        moments_mib,
    )
    gathered_mib = matrices_mib * per_weight.weight if sharded and dp_type is DataParallel.ZERO3 else 0.0
    # Sharded gradients are made whole before they are reduced.
    made_mib = gradient_mib if sharding > 1 and ((sharded and not whole_gradients) or not async_reduce) else 0.0
    joins = sharded or not async_reduce or (several_matrices and weights.matrices <= JOINED_NUMBERS)
    joined_mib = gradient_mib if sharding > 1 and joins else 0.0
    memory = PartMemory(
        fixed_mib=states.parameters_mib + (0.0 if offload else moments_mib),
        gradient_mib=gradient_mib + vectors_mib * per_weight.gradient,
        kept_mib=gradient_mib / shards + vectors_mib * per_weight.gradient,
        activation_mib=room.activation_mib,
        working_mib=room.working_mib,
        made_mib=room.made_mib,
        gathered_mib=gathered_mib,
        joined_mib=joined_mib,
        away_mib=room.away_mib,
        host_mib=host_mib if offload else 0.0,
    )
    if offload and options.masters_first:
        memory = memory._replace(master_mib=master_mib, matrix_mib=weights.largest / MIB * MOMENT_BYTES / shards)
    return states, _workspace(memory, room, made_mib, setting, sharded), memory


def _workspace(memory: PartMemory, room: Room, made_mib: float, setting: Setting, sharded: bool) -> Workspace:
    """Transients of a module's backward; `made_mib`: gradients that are made whole before they are reduced."""
    async_reduce, several = setting.assumed.async_grad_reduce, setting.several
    single = async_reduce and not several
    # A message is in flight during the next module's backward: after each micro-batch, or after the last, when the
    # module's activations and its gradients' memory have been freed.
    message_mib = memory.joined_mib + (memory.shard_mib if several else 0.0)
    if async_reduce and several:
        message_mib = max(memory.shard_mib - room.activation_mib, 0.0)
    elif single:
        message_mib = max(memory.joined_mib - max(room.activation_mib - memory.kept_mib, 0.0), 0.0) if sharded else 0.0
        message_mib *= room.begins
    message_mib *= room.sent
    working_mib = room.working_mib + (room.made_mib if single else 0.0)
    at_its_end = made_mib + memory.joined_mib * max(room.late, 1 - room.late) - room.activation_mib - message_mib
    if async_reduce and not (single and room.begins):  # weights fetched by then fit into freed activations
        at_its_end -= memory.gathered_mib
    own_mib = memory.gathered_mib + max(working_mib, made_mib - room.activation_mib, at_its_end)
    # Before a pass of a pipeline ends, activations for the next pass are in flight.
    fetched_mib = memory.gathered_mib + room.away_mib * (2 if setting.pipeline > 1 else 1)
    return Workspace(max(own_mib, memory.matrix_mib), message_mib, fetched_mib, room.tables_mib)


def frozen_times(times: PassTimes, products: float) -> PassTimes:
    """The times without gradients of weights; `products`: share of forward in products with weights."""
    return replace(times, backward_ms=max(times.backward_ms - products * times.forward_ms, 0.0))


def adapter_share(kind: LayerKind, tp: int, rank: int, numbers: NumberTypes) -> float:
    """Time of products with adapters, as a share of those with the base weights, on one of `tp` ranks."""
    least = LEAST_RANK if numbers.computed.mixed else 0
    adapters = weights = 0.0
    for weight in kind.weights:
        if weight.adapts:
            into, out = (
                each / (tp if split is weight.split else 1)
                for each, split in zip(weight.shape, (Split.ROW, Split.COLUMN), strict=True)
            )
            adapters += max(rank, least) * into + max(rank, 4 * least) * out
            weights += into * out
    return adapters / weights
