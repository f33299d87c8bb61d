"""The communicators of a launch: ranks of a plan that communicate, by use.

Uses that must not share a communicator have names; other uses have the name "".
"""

from collections import Counter
from collections.abc import Iterable
from functools import reduce
from itertools import pairwise
from operator import or_

from ..model import ModelShape, Split
from .comm_points import Collective, comm_ops, summed_over
from .layout import TokenLayout, moves, token_layout
from .mesh import EXCHANGE, SAMPLE_AXES, Axis, Mesh
from .strategy import LayerStrategy, Plan

Ranks = tuple[int, ...]
Group = tuple[Ranks, str]  # ranks and use

DOWN, UP = "down", "up"  # messages between two neighbouring stages
ON, BACK = "on", "back"  # from a chunk of the last stage to the next chunk of the first, and the gradient back
DIRECTIONS = (DOWN, UP, ON, BACK)
REDISTRIBUTE = "redistribute"


def chunk_edges(plan: Plan, stage: int, chunk: int) -> list[TokenLayout]:
    """Token layouts in a chunk of a stage: embedding or boundary, layers, head or boundary."""
    sharded = plan.assumed.sequence_parallel
    return [token_layout(strategy, plan.stage_size, sharded) for strategy in plan.chunk_chain(stage, chunk)]


def stage_groups(plan: Plan, shape: ModelShape, seq_length: int, adapts: bool = False) -> set[Group]:
    """Every communicator of the plan, over all stages: the same set on every rank. `adapts`: only adapters are
    trained."""
    size, tokens = plan.stage_size, plan.micro_batch * seq_length
    local: set[Group] = {(tuple(range(size)), "")}
    sharded = plan.assumed.sequence_parallel
    with_experts = _with_experts(plan, shape)
    for strategy in {plan.vocab.as_layer(), *plan.layers}:
        mesh = strategy.mesh(size)
        used = {summed_over(split, sharded) for split in Split} | {
            (at.axis,) for at in comm_ops(strategy.axes, sharded)
        }
        groups = [mesh.groups(*axes) for axes in used]
        parted = [mesh.parted(strategy.sharding)] if strategy.sharding else []
        if strategy in with_experts and strategy.experts_sharding:
            parted.append(strategy.experts.mesh(size).parted(strategy.experts_sharding))
        groups += [parted_mesh.groups(axis) for parted_mesh in parted for axis in (Axis.SHARDS, Axis.REPLICAS)]
        if strategy in with_experts:
            used = {EXCHANGE, (Axis.EXPERT_DATA,)} | ({(Axis.EXPERT_TENSOR,)} if adapts else set())
            groups += [strategy.experts.mesh(size).groups(*axes) for axes in used]
            groups.append(mesh.groups(*SAMPLE_AXES))
        if strategy.tp > shape.kv_heads:
            groups.append(mesh.sharing(strategy.tp // shape.kv_heads).groups(Axis.COPIES))
        local |= {(tuple(ranks), "") for group in groups for ranks in group.tolist()}
    wanted: set[Group] = set()
    for stage in range(plan.pipeline):
        boundaries = {edge for chunk in range(plan.chunks) for edge in pairwise(chunk_edges(plan, stage, chunk))}
        exchanges = {
            (ranks, REDISTRIBUTE)
            for source, target in boundaries
            for ranks in redistribution_groups(source, target, tokens, plan.micro_batch)
        }
        wanted |= {(tuple(stage * size + r for r in ranks), use) for ranks, use in local | exchanges}
        if stage:
            pairs = [(rank - size, rank) for rank in range(stage * size, (stage + 1) * size)]
            wanted |= {(pair, use) for pair in pairs for use in (DOWN, UP)}
    if plan.chunks > 1:
        wanted |= {(twins(plan, rank), use) for rank in range(size) for use in (ON, BACK)}
    if (shape.tied_embeddings or shape.mtp_layers) and plan.pipeline > 1:
        wanted |= {(twins(plan, rank), "tied") for rank in range(size)}
    return {(ranks, use) for ranks, use in wanted if len(ranks) > 1}


def _with_experts(plan: Plan, shape: ModelShape) -> set[LayerStrategy]:
    """Strategies of the layers that have experts."""
    return {strategy for index, strategy in enumerate(plan.layers) if shape.of(index).experts}


def exchanging(plan: Plan, shape: ModelShape) -> set[Ranks]:
    """Groups whose ranks run an all-to-all of Ulysses or of experts. Resharding groups are not among them."""
    exchanges: set[tuple[Mesh, tuple[Axis, ...]]] = {
        (strategy.mesh(plan.stage_size), (at.axis,))
        for strategy in set(plan.layers)
        for at in comm_ops(strategy.axes, plan.assumed.sequence_parallel)
        if at.op.forward is Collective.ALL_TO_ALL
    }
    exchanges |= {(strategy.experts.mesh(plan.stage_size), EXCHANGE) for strategy in _with_experts(plan, shape)}
    local = [ranks for mesh, axes in exchanges for ranks in mesh.groups(*axes).tolist()]
    firsts = range(0, plan.world_size, plan.stage_size)
    return {tuple(first + rank for rank in ranks) for ranks in local for first in firsts}


def all_to_alls(plan: Plan, shape: ModelShape, seq_length: int) -> bool:
    """Whether ranks of a stage exchange tokens: for heads, experts, or resharding between layers."""
    uses = (use for _, use in stage_groups(plan, shape, seq_length))
    return REDISTRIBUTE in uses or any(len(ranks) > 1 for ranks in exchanging(plan, shape))


def fuses_loss(vocab_size: int, tp: int) -> bool:
    """Whether Paddle's fused loss can be used: tp splits the vocabulary without padding."""
    return tp > 1 and vocab_size % tp == 0


def fused_loss_groups(plan: Plan, shape: ModelShape) -> set[Ranks]:
    """Groups on which the fused loss communicates by itself, in the last stage."""
    if not fuses_loss(shape.vocab_size, plan.vocab.tp):
        return set()
    first = plan.world_size - plan.stage_size
    mesh = plan.vocab.as_layer().mesh(plan.stage_size)
    return {tuple(first + rank for rank in ranks) for ranks in mesh.groups(Axis.TENSOR).tolist()}


def in_rounds(groups: Iterable[Group]) -> list[Group]:
    """Groups in an order that is the same on every rank and in which few ranks wait: consecutive groups often share no
    rank. Groups of neighbouring stages, which share ranks, take two rounds."""
    rounds: dict[int, int] = {}  # rank -> rounds in which it has a group, as bits
    turns: list[tuple[int, Group]] = []
    for group in sorted(groups):
        taken = reduce(or_, (rounds.get(rank, 0) for rank in group[0]), 0)
        free = ~taken & (taken + 1)  # the lowest free bit
        rounds.update((rank, rounds.get(rank, 0) | free) for rank in group[0])
        turns.append((free.bit_length(), group))
    return [group for _, group in sorted(turns)]


def most_communicators(groups: Iterable[Group]) -> int:
    """The largest number of groups on a rank."""
    return max(Counter(rank for ranks, _ in groups for rank in ranks).values(), default=0)


def communicators(plan: Plan, shape: ModelShape, seq_length: int, adapts: bool = False) -> int:
    """The largest number of communicators on a rank, including the world's."""
    groups = stage_groups(plan, shape, seq_length, adapts) | {(tuple(range(plan.world_size)), "world")}
    return most_communicators(groups) if plan.world_size > 1 else 0


def twins(plan: Plan, rank: int) -> Ranks:
    """A rank of the first stage and its peer in the last: they hold the same rows of an embedding that is tied or also
    used by MTP."""
    local = rank % plan.stage_size
    return local, plan.world_size - plan.stage_size + local


def redistribution_groups(source: TokenLayout, target: TokenLayout, tokens: int, samples: int) -> list[Ranks]:
    """Local ranks that exchange tokens in either direction, without ranks that keep theirs."""
    held, wanted = source.intervals(tokens, samples), target.intervals(tokens, samples)
    exchanges = [*moves(held, wanted), *moves(wanted, held)]
    return _components((move.source, move.target) for move in exchanges if move.source != move.target)


def _components(edges: Iterable[tuple[int, int]]) -> list[Ranks]:
    component: dict[int, set[int]] = {}
    for edge in edges:
        small, large = sorted((component.setdefault(rank, {rank}) for rank in edge), key=len)
        if small is not large:
            large |= small
            component.update(dict.fromkeys(small, large))
    return sorted(tuple(sorted(ranks)) for ranks in {id(ranks): ranks for ranks in component.values()}.values())
