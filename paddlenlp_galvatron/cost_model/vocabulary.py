"""Costs of embedding and LM head, and of the input of a stage that has neither.

The LM head and its loss may process tokens in pieces. Prices are derived from those of all tokens at once: forward
computes losses and gradients of each piece and keeps only the gradient of the hidden states, so that only the logits
are no longer kept. A piece takes as long as its tokens alone, including its launches and its sum of the table's
gradient, or as its host needs to launch it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..base import FP32_BYTES, MIB, once
from ..plan.comm_points import CommPoint
from ..plan.mesh import OF_A_SAMPLE
from ..plan.strategy import Assumptions, VocabStrategy
from ..profiles.computation import PassTimes
from ..profiles.memory import STATE_BYTES, Role
from .collectives import Calls, Setting, vocab_calls
from .costs import LayerCost, PartMemory, StageSetting, States, Terms, Workspace
from .layers import samples_of
from .module import ModulePrices, Room
from .stage_memory import batch_mib
from .weights import StateBytes, Weights, weights_of

# Messages that a pipeline rank holds besides activations, with one micro-batch and with several. From the next stage:
# the gradient in use and a posted receive; from the previous stage: a posted activation and an outgoing gradient.
NEXT, BEFORE = (1, 2), (0, 2)


class VocabPrices:
    """Costs of the vocabulary layers of a stage. Raises UserError as `LayerPrices` does."""

    def __init__(self, modules: ModulePrices):
        self._modules, self._models, self._seqs = modules, modules.models, modules.seqs
        self._times, self._memory = modules.times, modules.memory
        self._assumed, self._task = modules.assumed, modules.task
        self._mtp = self._models[-1].mtp_layers

    @once
    def cost(self, vocab: VocabStrategy, stage: StageSetting, role: Role) -> LayerCost:
        """Embedding and LM head as a stage of this role has them. With MTP the last stage also holds the embedding."""
        stage_size, micro_batch, micro_batches, pipeline = stage
        first, last = 0, len(self._models) - 1
        mesh = vocab.mesh(stage_size)
        samples = samples_of(vocab, mesh, stage_size, micro_batch)
        settings = [self._modules.setting(stage, layer_type) for layer_type in (first, last)]
        table = weights_of(self._models[first if role == "first" else last].embedding, vocab.tp)
        both = role == "last" and self._mtp and not self._models[-1].tied_embeddings
        states_mib = self._memory.vocab_states_mib("only" if both else role, vocab.tp)
        held = Weights(round(states_mib * MIB / STATE_BYTES), largest=table.largest)
        timed = self._modules.call_times(
            self._vocab_calls(vocab, role, *settings), mesh, pipeline, held, vocab.sharding
        )
        rank_samples = samples / mesh.degree(*OF_A_SAMPLE)
        pieces = self._head_share(vocab, rank_samples) if role != "first" and vocab.pieces > 1 else None
        passes, head_ms = self._passes(vocab, role, rank_samples, pieces, timed.forward_ms + timed.backward_ms)
        passes = passes.slowed(self._modules.network.receive_slowdown(pipeline))
        if self._task.frozen:  # the embedding is frozen and first, so no gradient passes it
            passes = PassTimes(passes.forward_ms, 0.0 if role == "first" or pieces else head_ms)
        late = self._late(role)
        tokens_mib = self._modules.token_bytes(samples, last) / mesh.degree(*OF_A_SAMPLE) / MIB
        room = self._room(vocab, role, rank_samples, tokens_mib, pieces)
        room = room._replace(begins=pipeline > 1, sent=0.0 if role == "first" else 1 - late, late=late)
        timed = timed.behind({CommPoint.INTO_HEAD: head_ms})
        how = vocab.dp_type, vocab.as_layer().shards(stage_size), settings[0]
        cost = self._modules.module_cost(*how, timed, passes, held, room, several_matrices=False)
        fixed_mib = self._fixed_mib(stage, role, samples)
        gradients_mib, memory = cost.terms.states.gradients_mib, cost.memory
        if memory and not self._assumed.async_grad_reduce and micro_batches > 1:
            gradients_mib += late * (memory.gradient_mib - memory.kept_mib)  # unreduced until the step ends
        states = cost.terms.states._replace(gradients_mib=gradients_mib, masks_mib=fixed_mib)
        if memory:
            late_mib = late * memory.gradient_mib
            memory = memory._replace(fixed_mib=memory.fixed_mib + fixed_mib, late_mib=late_mib)
        workspace = cost.workspace  # backward begins with the LM head and ends with the embedding
        if role == "first":  # no prefetch during its backward
            workspace = workspace._replace(own_mib=workspace.own_mib - workspace.fetched_mib)
        else:
            workspace = workspace._replace(fetched_mib=0.0)
        return LayerCost.of(cost.terms._replace(states=states), cost.activation_mib, workspace, memory)

    def _passes(
        self, vocab: VocabStrategy, role: Role, samples: float, pieces: HeadShare | None, messages_ms: float
    ) -> tuple[PassTimes, float]:
        """Times of a rank's `samples` samples, and the last module's forward time."""
        every, losses = [], 1 + self._mtp  # the passes of embedding and LM head
        for _ in range((role != "last") + (role != "first") * self._mtp):
            every.append(self._times.embedding(samples, self._seqs[0], vocab.tp))

        def head(share: float = 1.0) -> PassTimes:
            return self._times.head(share * samples, self._seqs[-1], vocab.tp)

        if pieces:
            passes = piece_passes(head, pieces, self._times.profile.launch, messages_ms / losses, self._task.frozen)
            every += [passes] * losses
        elif role != "first":
            every += [head()] * losses
        passes = PassTimes(sum(times.forward_ms for times in every), sum(times.backward_ms for times in every))
        return passes, every[-1].forward_ms

    def _room(
        self, vocab: VocabStrategy, role: Role, samples: float, tokens_mib: float, pieces: HeadShare | None
    ) -> Room:
        """Memory of a rank's `samples` samples; `tokens_mib`: their hidden states, as the LM head has them."""
        seq = self._seqs[0 if role == "first" else -1]  # most activations are the logits
        peak, kept = self._memory.vocab_activation_mib(role, vocab.tp, seq, self._assumed.sequence_parallel, samples)
        others = self._modules.others_mib(vocab.tp, tokens_mib)
        if role != "first" and self._modules.options.keeps_gathered:
            peak, kept = peak + others, kept + others
        if pieces:
            whole = peak + others, kept + others  # keeps the gradient of all tokens of the tp group
            room = piece_room(whole, pieces, self._assumed, self._modules.state_bytes, learns=not self._task.frozen)
            return room._replace(activation_mib=room.activation_mib * (1 + self._mtp))
        if self._modules.options.fused_gradients:
            peak += 2 * others  # also their gradient
        elif kept < peak:  # with few tokens, less is kept than the head's gradient takes, which is computed again
            made_mib = weights_of(self._models[-1].head, vocab.tp).matrices * self._modules.state_bytes.gradient / MIB
            peak = max(peak, kept + made_mib + tokens_mib)
        if role == "first" or not self._mtp:
            return Room(kept, peak - kept)
        # The second loss keeps as much; the lookup's gradient has the size of the whole table.
        table_mib = weights_of(self._models[-1].embedding, vocab.tp).matrices * self._modules.state_bytes.gradient / MIB
        return Room(2 * kept, peak - kept + table_mib)

    def _fixed_mib(self, stage: StageSetting, role: Role, samples: int) -> float:
        """Masks, ids of a rank's rows of the batch, and messages between stages."""
        end = 0 if role == "first" else len(self._models) - 1
        rows = samples * stage.micro_batches
        fixed_mib = self._modules.constants_mib + self._modules.places_mib
        fixed_mib += batch_mib(self._memory, rows, self._seqs[end], stage.micro_batches) * (1 + 2 * self._mtp)
        if role != "only":
            messages = (NEXT if role == "first" else BEFORE)[stage.micro_batches > 1]
            fixed_mib += messages * self._modules.token_bytes(stage.micro_batch, end) / stage.stage_size / MIB
        return fixed_mib

    @once
    def middle_cost(self, stage: StageSetting, later: bool) -> LayerCost:
        """The input of a stage without embedding and LM head; see `CostModel.middle_cost`."""
        widest = max(self._modules.token_bytes(stage.micro_batch, kind) for kind in range(len(self._models)))
        input_mib = widest / stage.stage_size / MIB
        several = stage.micro_batches > 1
        messages = NEXT[several] + (2 if later else BEFORE[several])  # two more gradients may be outgoing
        constants_mib = self._modules.constants_mib + self._modules.places_mib
        fixed_mib = messages * input_mib + (0.0 if later else constants_mib)
        memory = PartMemory(fixed_mib=fixed_mib, activation_mib=input_mib)
        return LayerCost.of(Terms(States(masks_mib=fixed_mib)), input_mib, Workspace(), memory)

    def _head_share(self, vocab: VocabStrategy, samples: float) -> HeadShare:
        """A rank's share of the LM head, with the tokens of `samples` samples."""
        model, tokens = self._models[-1], samples * self._seqs[-1]
        columns = model.padded_vocab_size(vocab.tp) // vocab.tp
        sizes = tuple(vocab.piece_sizes(round(tokens)))
        return HeadShare(tokens, columns, model.hidden_size, vocab.tp > 1, sizes)

    def _late(self, role: Role) -> float:
        """Share of the vocabulary layers' gradients that are reduced at the end of a step: an embedding's, as token ids
        have no gradient that marks the end of its backward, and those of tied weights, which two modules use."""
        tied, each = self._models[0].tied_embeddings, not self._assumed.async_grad_reduce
        if role == "only" or (role == "last" and self._mtp and not tied):
            return float(each) if tied else 0.5
        return float(each and (tied or role == "first"))

    def _vocab_calls(self, vocab: VocabStrategy, role: Role, embedding: Setting, head: Setting) -> Calls:
        """The embedding has the width and length of the first layer type, the LM head those of the last."""
        first, last = self._models[0], self._models[-1]
        if role == "only" and not last.tied_embeddings:
            return vocab_calls(first, vocab, "first", embedding) + vocab_calls(last, vocab, "last", head)
        if role == "first":
            return vocab_calls(first, vocab, role, embedding)
        return vocab_calls(last, vocab, role, head)


@dataclass(frozen=True, slots=True)
class HeadShare:
    """A rank's share of the LM head and its loss."""

    tokens: float
    columns: int  # columns of the vocabulary on this rank
    hidden_size: int
    split: bool  # the vocabulary, over ranks
    sizes: tuple[int, ...]  # tokens of each piece


def piece_passes(
    times: Callable[[float], PassTimes], share: HeadShare, launch: PassTimes, messages_ms: float, frozen: bool
) -> PassTimes:
    """Times of a chunked head; `times` by the share of the tokens; `launch`: of a layer's forward, which has as many
    calls as a piece."""
    pieces = len(share.sizes)
    piece = times(1 / pieces)
    backward_ms = piece.forward_ms if frozen else piece.backward_ms
    each = PassTimes(pieces * (piece.forward_ms + backward_ms), 0.0)
    return each.launched(PassTimes(pieces * launch.forward_ms, 0.0), messages_ms)


def piece_room(
    whole: tuple[float, float], share: HeadShare, assumed: Assumptions, states: StateBytes, learns: bool
) -> Room:
    """Memory of a chunked head. `whole`: MiB at the peak and kept, for all tokens at once; equal if only the peak is
    known."""
    number = assumed.number_types.stored.bytes
    hidden_mib = share.tokens * share.hidden_size * number / MIB
    peak_mib, kept_mib = whole
    if kept_mib < peak_mib:
        kept_mib = max(kept_mib - share.tokens * share.columns * FP32_BYTES / MIB, hidden_mib)
    else:  # the norm's input and output, and the gradient
        kept_mib = min(kept_mib, 3 * hidden_mib)
    numbers = share.columns * share.hidden_size if learns else 0
    piece_mib = max(share.sizes) * share.columns * FP32_BYTES / MIB
    half_mib = piece_mib / 2 if number < FP32_BYTES else 0.0  # 16-bit copy
    scoring_mib = piece_mib + half_mib
    if assumed.fused_cross_entropy and share.split:  # this kernel does not compute in place
        scoring_mib = 2 * piece_mib
    adding_mib = (half_mib or piece_mib) + numbers * number / MIB  # the table's gradient before its sum
    gradient_mib = numbers * states.gradient / MIB
    if not assumed.async_grad_reduce:  # one for each micro-batch in flight
        kept_mib += gradient_mib
    working_mib = hidden_mib + max(scoring_mib, adding_mib, hidden_mib)  # gradients of the pieces, and joined
    return Room(kept_mib, working_mib, gradient_mib if assumed.async_grad_reduce else 0.0)
