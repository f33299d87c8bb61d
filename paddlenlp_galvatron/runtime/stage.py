"""One pipeline stage of a plan on this rank: its layers and the redistributions between them.

Shapes: M samples of a micro-batch over the whole stage, S sequence, H hidden, T tokens that this rank holds.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import paddle

from ..plan import Axis, Plan
from ..plan.communicators import chunk_edges, twins
from ..plan.layout import token_layout
from . import device
from .activations import Window
from .batch import Facts, Tokens, documents_of
from .block import Block
from .chain import Chain, LastReduced, UnitMaker, Units
from .gradients import offload
from .groups import RankGroups
from .lora import FrozenUnits
from .mappings import Redistribution
from .placement import Placement
from .precision import cast
from .router import ExpertLoad
from .setup import ModelSetup
from .units import Trainable, Unit, whole
from .vocabulary import Embedding, Head, embedding_table
from .weights import ShardedParameter


class _Chunk(NamedTuple):
    """Layers of a stage that follow each other, with the resharding between them."""

    embedding: Embedding | None
    blocks: Sequence[Block]
    head: Head | None
    chain: Chain
    redistributions: Sequence[Redistribution | None]  # before each block, after the last, and for MTP back


class Stage:
    """The part of the model that this rank runs."""

    def __init__(self, setup: ModelSetup, here: RankGroups):
        plan, shape = setup.plan, setup.shape
        self.numbers, self.config = setup.numbers, setup.config
        self.index = here.stage
        self.is_first, self.is_last = self.index == 0, self.index == plan.pipeline - 1
        self.seq_length, self._packed = setup.seq_length, setup.packed or setup.preference is not None
        self._tokens = plan.micro_batch * setup.seq_length
        self._local = here.local
        self._causal_itself = setup.kernels.flash_attention
        vocab = plan.vocab.as_layer()
        placement = Placement(setup, here, vocab)
        # Ids go in, and labels to the loss, on all ranks that split the vocabulary.
        inside = token_layout(plan.vocab, plan.stage_size, sequence_parallel=False)
        intervals = inside.intervals(self._tokens, plan.micro_batch)[self._local].tolist()
        self._taken = [(start, stop) for start, stop in intervals if start < stop]
        tied, self.has_mtp = shape.tied_embeddings, self.is_last and shape.mtp_layers > 0
        table: ShardedParameter | None = None
        if self.is_first or self.has_mtp or (tied and self.is_last):
            shared = (tied or shape.mtp_layers) and plan.pipeline > 1
            table = embedding_table(placement, here.groups.get(twins(plan, here.rank), "tied") if shared else None)
        maker = FrozenUnits if setup.adapters else UnitMaker
        units = maker(every_micro_batch=not plan.assumed.async_grad_reduce)
        self._frozen = setup.adapters is not None
        self._embedding = Embedding(placement, table) if (self.is_first or self.has_mtp) and table else None
        self.load = ExpertLoad(plan, shape, setup.seq_length)
        self.window = Window(plan.chunks)
        self._blocks: list[Block] = []
        for chunk in range(plan.chunks):
            if self._embedding and self._embeds(plan, chunk):
                units.adopt(self._embedding.parameters, plan.vocab.dp_type)
            for index in plan.chunk_layers(self.index, chunk):
                strategy = plan.layers[index]
                block = Block(setup, here, index, self.load, self.window, chunk)
                units.adopt(block.parameters, strategy.dp_type, strategy.experts.dp_type)
                if self._blocks:
                    block.share_positions(self._blocks[0])
                self._blocks.append(block)
        self._head: Head | None = None
        if self.is_last:
            pieces = plan.vocab.piece_sizes(sum(stop - start for start, stop in self._taken))
            self._head = Head(placement, table if tied else None, pieces)
            units.adopt(self._head.parameters, plan.vocab.dp_type)
        self.vectors, self.frozen = units.vectors, units.frozen
        self._chunks = self._cut(plan, units.chain, here)
        self.trainables: list[Trainable] = []
        for made in self._make_trainables():
            if plan.assumed.offload_optimizer:  # moved before the next unit's states are made
                offload(made)
            self.trainables += made
        start, stop = token_layout(None, plan.stage_size).intervals(self._tokens)[self._local, 0].tolist()
        self.boundary_shape = [stop - start, shape.hidden_size]
        # The loss of tokens is equal on ranks that split the vocabulary, that of pairs on ranks that split answers.
        mesh = vocab.mesh(plan.stage_size)
        axes = (Axis.TENSOR, Axis.ULYSSES, Axis.CONTEXT)
        self.reports_first = not any(mesh.index(self._local, axis) for axis in axes)  # first rank with the same rows
        self.row_replicas = mesh.size // mesh.degree(Axis.DATA)
        # Each of them knows all pairs of its dp share, also of samples none of whose tokens are its own.
        self._paired = list(placement.samples) if setup.preference else []
        self.loss_replicas = self.row_replicas if setup.preference else plan.vocab.tp
        self.mask = self._mask()  # before the first step, in which messages are under way

    def _cut(self, plan: Plan, units: Sequence[Units], here: RankGroups) -> list[_Chunk]:
        """The stage's chunks, of its blocks and its units in the order of the forward pass."""
        tokens = self._tokens, plan.micro_batch
        blocks, rest, reducing, chunks = iter(self._blocks), iter(units), LastReduced(), []
        for chunk in range(plan.chunks):
            embedding = self._embedding if self._embeds(plan, chunk) else None
            head = self._head if plan.is_last(self.index, chunk) else None
            chunk_blocks = [*islice(blocks, len(plan.chunk_layers(self.index, chunk)))]
            modules = len(chunk_blocks) + (embedding is not None) + (head is not None)
            chain = Chain([*islice(rest, modules)], embedding is not None, reducing)
            edges = chunk_edges(plan, self.index, chunk)
            if head and self.has_mtp:
                edges.append(edges[-2])
            redistributions = [
                None if source == target else Redistribution(source, target, *tokens, here)
                for source, target in pairwise(edges)
            ]
            chunks.append(_Chunk(embedding, chunk_blocks, head, chain, redistributions))
        return chunks

    def _embeds(self, plan: Plan, chunk: int) -> bool:
        """Whether a chunk has the embedding: the very first, and with MTP the very last."""
        return plan.is_first(self.index, chunk) or (self.has_mtp and plan.is_last(self.index, chunk))

    def _make_trainables(self) -> Iterator[list[Trainable]]:
        for unit in self.units:
            yield unit.make_trainables()
        yield [whole(vector) for vector in self.vectors]

    @property
    def chains(self) -> list[Chain]:
        """Chain of units of each chunk."""
        return [chunk.chain for chunk in self._chunks]

    @property
    def units(self) -> list[Unit]:
        """Each unit once."""
        return list(dict.fromkeys(unit for chain in self.chains for module in chain.units for unit in module))

    def forward(
        self, x: Any, ids: Any, labels: Any, chunk: int = 0, ends: Any = None, pairs: Any = None, mtp: Any = None
    ) -> Any:
        """One micro-batch through a chunk of the stage.

        `x` [T, H]: from the previous chunk (None for the first), `ids` and `labels` [U]: a row of `take`, `ends` [r,
        S]: of `take_ends`, `pairs`: of `take_pairs`; `mtp`: its ids and labels, [U] each. Returns [T, H] for the next
        chunk, or from the last the sum of this dp share's losses.
        """
        with self.window.forward(chunk):
            return self._forward(x, ids, labels, chunk, ends, pairs, mtp)

    def _forward(self, x: Any, ids: Any, labels: Any, chunk: int, ends: Any, pairs: Any, mtp: Any) -> Any:
        embedding, blocks, head, chain, redistributions = self._chunks[chunk]
        run, position = chain.run, 0
        if embedding is not None:
            embedded = run(position, embedding, *(each for each in (ids, mtp and mtp[0]) if each is not None))
            x = embedded[0] if x is None else x
            if self._frozen and paddle.is_grad_enabled():  # frozen embeddings give no gradient to start backward
                x.stop_gradient = False
            position += 1
        for redistribution, block in zip(redistributions, blocks, strict=False):
            x = redistribution(x) if redistribution else x
            if block.is_mtp and head is not None:
                into_head, back = redistributions[-2:]
                normed = cast(head.normed(into_head(x) if into_head else x), self.numbers.stored.dtype)
                x = paddle.concat([embedded[-1], normed], -1)
                x = back(x) if back else x
            x = run(position, block, x, self.mask if ends is None else _rows_of(ends, block.samples, self.samples))
            position += 1
        if (last := redistributions[len(blocks)]) is not None:
            x = last(x)
        if head is not None and self.has_mtp:
            return run(position, head.losses_with_mtp, paddle.concat([normed, x]), labels, mtp[1])
        return x if head is None else run(position, head.loss, x, labels, *(pairs or ()))

    @contextmanager
    def evaluating(self, adapters: bool = True) -> Iterator[None]:
        """Inside the context, switch off dropout, and adapters unless wanted."""
        self._switch(training=False, adapters=adapters)
        try:
            yield
        finally:
            self._switch(training=True, adapters=True)

    def _switch(self, training: bool, adapters: bool) -> None:
        for block in self._blocks:
            block.switch(training, adapters)

    def expect_gradient(self, scale: float) -> None:
        """Set the loss layer's gradient of the sum of losses for the following passes."""
        if self._head:
            self._head.scale = scale

    def forget_metrics(self) -> None:
        """Reset the sums of metrics."""
        self.load.forget()
        if self._head:
            self._head.metrics = None
            if self._head.pairs:
                self._head.pairs.sums.clear()

    @property
    def metrics(self) -> Any:
        """Sums over this rank's share of the metrics since `forget_metrics`; None: no loss layer."""
        return self._head and self._head.metrics

    @property
    def answer_sums(self) -> list[Any]:
        """Log-probabilities [R, P, 2] of answers, of each micro-batch that was evaluated since `forget_metrics`."""
        return self._head.pairs.sums if self._head and self._head.pairs else []

    def accumulate_gradients(self) -> None:
        """Accumulates a micro-batch's gradients that no unit has accumulated."""
        for weights in (*(unit.weights for unit in self.units), self.vectors):
            for weight in weights:
                weight.accumulate_autograd()

    @cached_property
    def samples(self) -> list[int]:
        """Samples of a micro-batch whose tokens this rank embeds or predicts; empty between the first and the last
        stage. Packed rows add the samples that its layers compute."""
        wanted = set(self.rows_of_loss if self.is_first or self.is_last else ())
        if self._packed:
            wanted.update(*(block.samples for block in self._blocks))
        return sorted(wanted)

    def take(self, tokens: Tokens) -> list[Any]:
        """This rank's tokens [U] of each micro-batch, of a step's [micro-batches, r·S] of its r `samples`, on the
        device.

        Called once a step before the first message: on a GPU a copy waits for every posted receive, even one whose
        message depends on the pass that needs the copy."""
        return list(device.to_device(self.own(tokens)).unbind())

    def take_ends(self, ends: Tokens) -> list[Any]:
        """Ends of documents [r, S] of each micro-batch on the device, as `take` has tokens; all of each sample."""
        rows = ends.reshape([len(ends), -1, self.seq_length]).astype(np.int32)
        return list(device.to_device(rows).unbind())

    @cached_property
    def _answering(self) -> list[int]:
        """Indices of the samples of a micro-batch whose pairs the loss layer counts; all where ranks share pairs."""
        if self._head and self._head.pairs and self._head.pairs.is_shared:
            return list(range(self._tokens // self.seq_length))
        return self.rows_of_loss

    @cached_property
    def rows_of_loss(self) -> list[int]:
        """Samples of a micro-batch whose tokens this rank predicts, or whose pairs it counts."""
        length = self.seq_length
        taken = {n for start, stop in self._taken for n in range(start // length, -(-stop // length))}
        return sorted(taken.union(self._paired))

    def of_loss(self, sums: Any) -> Any:
        """Selects the `rows_of_loss` from numbers by answering sample [R, …]."""
        return _rows_of(sums, self.rows_of_loss, self._answering)

    def take_pairs(self, ends: Tokens, pairs: Facts) -> list[Any]:
        """The answers of this rank's tokens [U], and the pairs [R, P, 5], of each micro-batch, from a step's
        ends [micro-batches, r·S] and pairs [micro-batches, r, P, 5]."""
        places = {sample: column for column, sample in enumerate(self._answering)}
        most = pairs.shape[2]
        rows = ends.reshape([-1, self.seq_length])
        answers = documents_of(rows).reshape([len(ends), len(self.samples), self.seq_length])
        of_pairs = np.zeros([len(ends), len(places), *pairs.shape[2:]], np.float32)
        for column, sample in enumerate(self.samples):
            if sample not in self.rows_of_loss:
                continue
            padding = answers[:, column] >= 2 * most
            answers[:, column] += 2 * most * places[sample]
            answers[:, column][padding] = 2 * most * len(places)  # no answer's number
            of_pairs[:, places[sample]] = pairs[:, column]
        numbers = self.own(answers.reshape(ends.shape)).astype(np.int32)
        return list(zip(*(device.to_device(array).unbind() for array in (numbers, of_pairs)), strict=True))

    def own(self, tokens: Tokens) -> Tokens:
        """This rank's tokens [micro-batches, U], of those of its `samples`."""
        shifts = {sample: (place - sample) * self.seq_length for place, sample in enumerate(self.samples)}
        moved = [(start, stop, shifts[start // self.seq_length]) for start, stop in self._taken]
        return np.concatenate([tokens[:, start + shift : stop + shift] for start, stop, shift in moved], axis=1)

    def _mask(self) -> Any:
        """[1, 1, S, S] with the lowest number above the diagonal; None: attention is causal itself."""
        if self._causal_itself:
            return None
        length, dtype = self.seq_length, getattr(paddle, self.numbers.computed.dtype)
        lowest = paddle.full([1, 1, length, length], paddle.finfo(dtype).min, dtype)
        return paddle.triu(lowest, diagonal=1)


def _rows_of(tensor: Any, samples: Sequence[int], every: Sequence[int]) -> Any:
    """Rows of neighbouring samples, of a tensor that has one for each of `every`."""
    first = every.index(samples[0])
    return tensor.slice([0], [first], [first + len(samples)])
