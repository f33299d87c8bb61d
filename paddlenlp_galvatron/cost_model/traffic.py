"""Logical bytes that one training step of a plan sends through collectives, by kind, as the runtime counts them."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise

from ..base.errors import UserError
from ..model import ModelShape
from ..plan.comm_points import Collective
from ..plan.layout import redistribution, token_layout
from ..plan.strategy import Plan
from ..profiles.memory import Role
from .collectives import MTP_CHANGES, Call, Calls, Setting, layer_calls, vocab_calls, weight_calls
from .experts import expert_adapter_calls, expert_calls
from .weights import StateBytes, adapter_weights

# The runtime's names. Message sizes are defined by `Collective`: the whole tensor, as one rank sees it.
NAMES = {kind: kind.name.lower() for kind in Collective} | {Collective.SEND: "p2p"}


def step_traffic_bytes(plan: Plan, model: ModelShape, adapter_rank: int | None = None) -> dict[str, int]:
    """Bytes by kind, summed over all ranks, of one step; scalars (loss, gradient norm) are excluded. `adapter_rank`:
    LoRA rank, where only adapters are trained.

    Resharding between layers counts as all-to-all. Raises UserError without a seq_length.
    """
    seq = plan.assumed.seq_length
    if seq is None:
        raise UserError("galvatron.assumed.seq_length: missing; say how many tokens a sample has")
    states = StateBytes.of(plan.assumed.number_types)
    several = plan.micro_batches > 1
    setting = Setting(plan.stage_size, plan.micro_batch, several, plan.pipeline, seq, plan.assumed, states)
    each, once = plan.micro_batches * plan.stage_size, plan.stage_size
    token = model.hidden_size * plan.assumed.number_types.sent.bytes
    total: Counter[str] = Counter()
    for stage in range(plan.pipeline):
        for calls in _stage_calls(plan, stage, model, setting, adapter_rank):
            for group in (calls.points, calls.gather_forward, calls.gather_backward):
                _add(total, group, each)
            _add(total, calls.reduce, once if plan.assumed.async_grad_reduce else each)
            _add(total, calls.across + calls.finish + calls.vectors + calls.publish, once)
        sharded = plan.assumed.sequence_parallel
        for chunk in range(plan.chunks):
            layouts = [token_layout(strategy, plan.stage_size, sharded) for strategy in plan.chunk_chain(stage, chunk)]
            if model.mtp_layers and plan.is_last(stage, chunk):
                layouts += layouts[-2:] * (MTP_CHANGES // 2)
                del layouts[-1]
            for source, target in pairwise(layouts):
                ways = ((source, target), (target, source))
                moved = sum(redistribution(*way, plan.micro_batch * seq, plan.micro_batch).all_tokens for way in ways)
                total[NAMES[Collective.ALL_TO_ALL]] += plan.micro_batches * moved * token
    hops = 2 * plan.micro_batches * (len(plan.stages) - 1)  # messages between chunks, both ways
    total[NAMES[Collective.SEND]] += hops * plan.micro_batch * seq * token
    return {kind: count for kind, count in total.items() if count}


def _stage_calls(
    plan: Plan, stage: int, model: ModelShape, setting: Setting, adapter_rank: int | None
) -> Iterator[Calls]:
    """`setting`: with the states of the trained weights."""
    last, frozen = plan.pipeline - 1, adapter_rank is not None
    base = replace(setting, states=setting.states.frozen) if frozen else setting
    for index in plan.stage_layers(stage):
        strategy, kind = plan.layers[index], model.of(index)
        yield layer_calls(kind, strategy, base)
        if kind.experts:
            yield expert_calls(kind, strategy.experts, strategy.recompute, base)
        if adapter_rank is not None:
            yield weight_calls(adapter_weights(kind, strategy.tp, adapter_rank), strategy, setting)
            if kind.experts:
                yield expert_adapter_calls(kind, strategy.experts, adapter_rank, setting)
    if stage in (0, last):
        role: Role = "only" if last == 0 else "first" if stage == 0 else "last"
        calls = vocab_calls(model, plan.vocab, role, base)
        if frozen:  # no gradient passes the embedding
            head = vocab_calls(model, plan.vocab, "last", base) if role != "first" else Calls()
            calls = calls._replace(backward=head.backward, beside=head.beside)
        yield calls


def _add(total: Counter[str], calls: Iterable[Call], times: int) -> None:
    for call in calls:
        total[NAMES[call.kind]] += call.bytes * call.times * times
