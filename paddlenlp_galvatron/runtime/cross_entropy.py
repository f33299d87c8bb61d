"""Cross entropy over a vocabulary that tp ranks may split, of all tokens at once or piece by piece.

In pieces, logits exist for one piece of tokens at a time. For a sum of losses, each token's gradient is known at once,
so forward also computes it: it adds the table's gradient to those of earlier micro-batches and keeps only the gradient
of the hidden states. Losses of pairs need all tokens of an answer first; backward computes logits again.

Shapes: U tokens, P of a piece, H hidden, v columns of the vocabulary that this rank holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import paddle
import paddle.distributed as dist
from paddle.autograd import PyLayer

from ..plan.precision import NumberTypes
from . import device
from .batch import IGNORED_LABEL
from .collectives import all_reduce, count, within
from .paddle_private import fused_loss, softmax_and_loss
from .placement import Placement
from .precision import add, cast
from .weights import ShardedParameter


class VocabularyShard:
    """The part of the vocabulary that this rank holds."""

    def __init__(self, vocab_size: int, placement: Placement):
        self.padded = -(-vocab_size // placement.tp) * placement.tp
        self.columns = self.padded // placement.tp
        self.start = placement.index * self.columns
        self.real = min(max(vocab_size - self.start, 0), self.columns)  # columns without padding

    def localise(self, ids: Any) -> tuple[Any, Any]:
        """Ids relative to this rank's columns, clipped into them, and whether they lie inside."""
        local = ids - self.start
        inside = paddle.logical_and(local >= 0, local < self.columns)
        return paddle.clip(local, 0, self.columns - 1), inside


class Scores(NamedTuple):
    """Losses from logits [U, v] and labels [U], and values for their gradient."""

    losses: Any  # [U] fp32; 0 of tokens without a label
    hits: Any  # [U]: whether the label is the likeliest token; None: not computed
    exponentials: Any  # [U, v] fp32
    total: Any  # [U], their sum over the whole vocabulary; 1.0: they are probabilities


class CrossEntropy:
    """Losses of tokens and their gradients. `group`: ranks that split the vocabulary; None: this rank has all of it.
    `fused`: Paddle's fused kernel computes losses of a split vocabulary without padding."""

    def __init__(self, shard: VocabularyShard, group: Any, fused: bool):
        self._shard, self._group, self._fused = shard, group, fused

    def losses(self, logits: Any, labels: Any) -> Any:
        """Losses of tokens, [U] in fp32; differentiable."""
        return _Losses.apply(logits, labels, self)

    def scores_for_gradient(self, logits: Any, labels: Any) -> Scores:
        """Losses and the values that `gradient` needs, in the memory of fp32 logits."""
        if self._group is None and device.on_gpu():  # one fused kernel; the CPU's hides NaN and losses above 64
            probabilities, losses = softmax_and_loss(cast(logits, "float32"), labels, IGNORED_LABEL)
        elif self._fused:
            probabilities, losses = self._fused_scores(logits, labels)
        else:
            return self.scores(logits, labels)
        return Scores(losses.flatten(), None, probabilities, 1.0)

    def _fused_scores(self, logits: Any, labels: Any) -> tuple[Any, Any]:
        """(probabilities, losses [U, 1])"""
        scores, group = cast(logits, "float32"), self._group
        losses_and_scores: tuple[Any, Any] = within(
            "cross entropy", group, lambda: fused_loss(scores, labels, group, IGNORED_LABEL)
        )
        for _ in range(3):  # largest score, the label's score, sum of exponentials: messages of the kernel
            count("all_reduce", losses_and_scores[1])
        return losses_and_scores

    def scores(self, logits: Any, labels: Any) -> Scores:
        """Ranks exchange only three vectors of length U; no rank has full logits. Exponentials overwrite fp32 logits,
        which the product that computed them does not need."""
        columns, real, group = self._shard.columns, self._shard.real, self._group
        scores = cast(logits, "float32")
        if real < columns:
            scores[:, real:] = float("-inf")
            # A rank whose columns are all padding must not make inf - inf below.
            largest = scores.max(-1) if real else paddle.full([scores.shape[0]], -3e38, "float32")
        else:
            largest = scores.max(-1)
        largest = all_reduce(largest, group, dist.ReduceOp.MAX)
        local, inside = self._shard.localise(labels)
        of_labels = paddle.take_along_axis(scores, local.unsqueeze(-1), -1, broadcast=False).squeeze(-1) - largest
        exponentials = scores.subtract_(largest.unsqueeze(-1)).exp_()
        total = all_reduce(exponentials.sum(-1), group)
        target = all_reduce(paddle.where(inside, of_labels, paddle.zeros_like(of_labels)), group)
        counted = labels != IGNORED_LABEL
        losses = paddle.where(counted, paddle.log(total) - target, paddle.zeros_like(total))
        return Scores(losses, paddle.logical_and(counted, target == 0), exponentials, total)

    def gradient(self, scores: Scores, labels: Any, weights: Any) -> Any:
        """Gradient of the logits, [U, v] in fp32, if that of each loss is `weights` [U] or a number. It overwrites
        `scores.exponentials`."""
        per_token = (labels != IGNORED_LABEL).astype("float32") * weights
        local, inside = self._shard.localise(labels)
        hit = inside.astype("float32") * per_token
        step = scores.exponentials.multiply_((per_token / scores.total).unsqueeze(-1))
        return step.put_along_axis_(local.unsqueeze(-1), -hit.unsqueeze(-1), -1, reduce="add")


class _Losses(PyLayer):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, logits: Any, labels: Any, loss: CrossEntropy) -> Any:
        scores = loss.scores_for_gradient(logits, labels)
        ctx.scores, ctx.labels, ctx.loss, ctx.dtype = scores, labels, loss, logits.dtype
        return scores.losses

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        scores, ctx.scores = ctx.scores, None  # freed as soon as the gradient is of another type
        return cast(ctx.loss.gradient(scores, ctx.labels, grad), ctx.dtype)


class Pieces:
    """The LM head's product and losses in pieces of tokens."""

    def __init__(self, sizes: Sequence[int], loss: CrossEntropy, weights: list[Any], tied: bool, numbers: NumberTypes):
        """`sizes`: tokens of each piece. `weights`: table [H, v], or the embedding's [v, H] where it is `tied`; and the
        bias [v], if there is one; each a ShardedParameter."""
        self._sizes, self._loss, self._weights, self._tied, self._numbers = sizes, loss, weights, tied, numbers

    def scores(self, hidden: Any, labels: Any) -> tuple[Any, Any]:
        """Losses [U] and hits [U] of hidden states [U, H], without gradients."""
        weights = self._computed()
        scores = [
            self._loss.scores(self._logits(rows, *weights), labels_of_rows)[:2]
            for rows, labels_of_rows in self._cut(hidden, labels)
        ]
        losses, hits = zip(*scores, strict=True)
        return paddle.concat(losses), paddle.concat(hits)

    def sum(self, hidden: Any, labels: Any, scale: float, later: bool) -> Any:
        """The sum of losses, with gradient `scale` in this micro-batch's backward. `later`: only then may the table's
        gradient be added to those of earlier micro-batches."""
        return _Sum.apply(hidden, labels, self, scale, later)

    def losses(self, hidden: Any, labels: Any) -> Any:
        """Losses [U], whose gradients are known only in backward."""
        return _InPieces.apply(hidden, labels, self)

    def _computed(self) -> list[Any]:
        return [cast(weight.tensor, self._numbers.computed.dtype) for weight in self._weights]

    def _logits(self, hidden: Any, table: Any, *bias: Any) -> Any:
        """Logits [P, v] in fp32; 16-bit logits are freed on return."""
        return cast(sum(bias, paddle.matmul(hidden, table, transpose_y=self._tied)), "float32")

    def _cut(self, *of_tokens: Any) -> Iterator[tuple[Any, ...]]:
        start = 0
        for size in self._sizes:
            yield tuple(each[start : start + size] for each in of_tokens)
            start += size

    def with_gradients(self, hidden: Any, labels: Any, weights: Any, accumulate: Any) -> tuple[Any, Any]:
        """Losses [U] and the gradient of the hidden states [U, H], if that of each loss is `weights` [U]. `accumulate`
        receives each piece's gradient of a weight, with the weight."""
        table, *bias = self._computed()
        losses, gradients = [], []
        for rows, labels_of_rows, weight in self._cut(hidden, labels, weights):
            scores = self._loss.scores_for_gradient(self._logits(rows, table, *bias), labels_of_rows)
            losses.append(scores.losses)
            step = cast(self._loss.gradient(scores, labels_of_rows, weight), self._numbers.computed.dtype)
            del scores  # frees its memory for the next piece
            gradients.append(paddle.matmul(step, table, transpose_y=not self._tied))
            if not self._weights[0].tensor.stop_gradient:
                product = (step, rows) if self._tied else (rows, step)
                accumulate(self._weights[0], paddle.matmul(*product, transpose_x=True))
                del product
                for weight in self._weights[1:]:
                    accumulate(weight, step.sum(0))
            del step
        return paddle.concat(losses), paddle.concat(gradients)


class _Sum(PyLayer):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, hidden: Any, labels: Any, pieces: Pieces, scale: float, later: bool) -> Any:
        ctx.kept = {}

        def keep(weight: ShardedParameter, gradient: Any) -> None:
            ctx.kept[weight] = add(ctx.kept.get(weight), gradient, weight.gradient_dtype)

        weights = paddle.full(labels.shape, scale, "float32")
        accumulate = keep if later else ShardedParameter.accumulate
        losses, ctx.gradient = pieces.with_gradients(hidden, labels, weights, accumulate)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """`grad` is the scale that forward has already applied."""
        for weight, gradient in ctx.kept.items():
            weight.accumulate(gradient)
        ctx.kept = {}
        gradient, ctx.gradient = ctx.gradient, None
        return gradient


class _InPieces(PyLayer):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, hidden: Any, labels: Any, pieces: Pieces) -> Any:
        ctx.save_for_backward(hidden, labels)
        ctx.pieces = pieces
        return pieces.scores(hidden, labels)[0]

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        hidden, labels = ctx.saved_tensor()
        return ctx.pieces.with_gradients(hidden, labels, grad, ShardedParameter.accumulate)[1]
