"""Peak memory of one module's states and transients on one rank.

Between micro-batches a module holds its states; a micro-batch in flight adds its activations. During the module's own
backward more is needed for a moment: recompute's activations, gathered weights, gradients before they are scattered,
the buffer in which they are joined. By then its activations are used up, and what takes their place costs nothing.
Those that recompute made are in its working set, and took no place between micro-batches.
"""

from __future__ import annotations

from typing import NamedTuple

from ..model import ModelShape
from ..plan.comm_points import CORE, comm_ops
from ..plan.mesh import Axis, Degrees, Mesh
from ..plan.strategy import JOINED_NUMBERS, Assumptions, DataParallel
from .costs import States, Workspace
from .peak import PartMemory, Update
from .weights import MOMENT_BYTES, StateBytes, Weights

MIB = 2**20


class Room(NamedTuple):
    """Memory of one micro-batch in a module, in MiB."""

    activation_mib: float  # held while it is in flight
    working_mib: float  # backward's own peak above what is held
    made_mib: float = 0.0  # of gradients, what a step's first backward has made by then
    tables_mib: float = 0.0  # kept for all layers that split a sample alike: positions of a rank's own tokens
    begins: bool = False  # a stage's backward may begin with it, before which no activations are given up
    sent: float = 1.0  # share of its gradients that are being reduced while a next module's backward runs


def module_memory(
    weights: Weights,
    per_weight: StateBytes,
    dp_type: DataParallel,
    sharding: int,
    several: bool,
    async_reduce: bool,
    room: Room,
    several_matrices: bool = True,
    offload: bool = False,
) -> tuple[States, Workspace, PartMemory]:
    """(states, workspace, all of it for a walk) of a module whose matrices are shared by `sharding` ranks.

    `several`: micro-batches. With `async_reduce` their gradients are summed before they are reduced. With one
    micro-batch alone gradients come as activations go, so that only what they take beyond these is added to the states.
    `offload`: the optimizer's states lie in the host's memory. In the first update the fp32 weights of all modules are
    still on the device, and one matrix after the other gets its moments, which leave with its fp32 weight.
    """
    matrices_mib = weights.matrices / MIB
    sharded = dp_type is not DataParallel.DDP and sharding > 1
    vectors_mib = weights.vectors / MIB
    shards = sharding if sharded else 1
    gradient_mib = matrices_mib * per_weight.gradient
    whole_gradients, single = async_reduce and several, async_reduce and not several
    kept_mib = gradient_mib / (1 if whole_gradients else shards)
    moments_mib = matrices_mib * per_weight.optimizer / shards + vectors_mib * per_weight.optimizer
    master_mib = moments_mib * max(per_weight.optimizer - MOMENT_BYTES, 0) / max(per_weight.optimizer, 1)
    update = Update(master_mib, weights.largest / MIB * MOMENT_BYTES / shards, moments_mib) if offload else Update()
    if offload:  # no activations are there by then: their place is enough for most of it
        moments_mib = max(master_mib - room.activation_mib, 0.0)
    states = States(
        matrices_mib * per_weight.weight / (shards if dp_type is DataParallel.ZERO3 else 1)
        + vectors_mib * per_weight.weight,
        (max(kept_mib - room.activation_mib, 0.0) if single else kept_mib) + vectors_mib * per_weight.gradient,
        moments_mib,
    )

    gathered_mib = matrices_mib * per_weight.weight if sharded and dp_type is DataParallel.ZERO3 else 0.0
    # Gradients that the states do not hold whole are made whole first.
    made_mib = gradient_mib if sharding > 1 and ((sharded and not whole_gradients) or not async_reduce) else 0.0
    joins = sharded or not async_reduce or (several_matrices and weights.matrices <= JOINED_NUMBERS)
    joined_mib = gradient_mib if sharding > 1 and joins else 0.0
    part = PartMemory(
        fixed_mib=states.parameters_mib + (0.0 if offload else moments_mib),
        gradient_mib=gradient_mib + vectors_mib * per_weight.gradient,
        kept_mib=gradient_mib / shards + vectors_mib * per_weight.gradient,
        activation_mib=room.activation_mib,
        working_mib=room.working_mib,
        made_mib=room.made_mib,
        gathered_mib=gathered_mib,
        joined_mib=joined_mib,
        update=update,
    )
    # A message is under way while the next module's backward runs, beside what arrives of it: after each micro-batch;
    # or after the last one, when the module's activations and its gradients' place have been given up.
    message_mib = joined_mib + (part.shard_mib if several else 0.0)
    if whole_gradients:
        message_mib = max(part.shard_mib - room.activation_mib, 0.0)
    elif single:
        message_mib = max(joined_mib - max(room.activation_mib - part.kept_mib, 0.0), 0.0) if sharded else 0.0
        message_mib *= room.begins
    message_mib *= room.sent
    working_mib = room.working_mib + (room.made_mib if single else 0.0)
    at_its_end = made_mib + joined_mib - room.activation_mib - message_mib
    if async_reduce and not (single and room.begins):  # weights that are fetched by then fit where activations were
        at_its_end -= gathered_mib
    own_mib = gathered_mib + max(working_mib, made_mib - room.activation_mib, at_its_end)
    return states, Workspace(max(own_mib, update.tensor_mib), message_mib, gathered_mib, room.tables_mib), part


def others_mib(model: ModelShape, degrees: Degrees, mesh: Mesh, seq: int, assumed: Assumptions) -> float:
    """Keys and values of other ranks' tokens that a rank gathers, and keeps of a sample, in MiB. Plain attention keeps
    them for each head; flash attention once, for all heads that share them."""
    heads_split = mesh.degree(Axis.ULYSSES, Axis.TENSOR)
    context = mesh.degree(*(at.axis for at in comm_ops(degrees.axes, assumed.sequence_parallel, CORE)))
    width = model.kv_width * max(heads_split // model.kv_heads, 1) if assumed.flash_attention else model.q_width
    return 2 * width / heads_split * seq * (1 - 1 / context) * assumed.mixed_precision.bytes / MIB
