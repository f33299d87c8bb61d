"""The vocabulary layers: embedding, final norm, LM head and loss, with the vocabulary split over tp ranks.

The vocabulary is padded to a multiple of the degree with rows of zeros. No token uses them and the loss excludes their
logits, so they never get a gradient.

Shapes: T tokens held between layers, U tokens of the dp share (U = T·t under Megatron-SP, else T), H hidden, V the
padded vocabulary, v = V / t the columns held here.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import paddle
from paddle.nn.functional import log_sigmoid, relu

from ..model.preference import BY_TOKEN, Preference
from ..plan.comm_points import CommPoint, Op
from ..plan.communicators import fuses_loss
from ..plan.mesh import Axis
from .cross_entropy import CrossEntropy, Pieces, VocabularyShard
from .mappings import Crossing
from .placement import Placement
from .precision import cast
from .weights import ShardedParameter, compute_weight, compute_weights, shard_layer


def pair_losses(preference: Preference, policy: Any, reference: Any) -> Any:
    """Losses of pairs [...]; log-probabilities [..., 2] of the chosen and the rejected answer, means of BY_TOKEN's."""
    beta, smoothing = preference.beta, preference.label_smoothing
    chosen, rejected = policy.unbind(-1)
    gained, lost = (policy - reference).unbind(-1)
    margin = gained - lost
    match preference.loss:
        case "hinge":
            return relu(1 - beta * margin)
        case "ipo":
            return (margin - 1 / (2 * beta)) ** 2
        case "dpop":
            return -log_sigmoid(beta * margin) + preference.dpop_lambda * relu(-gained)
        case "sppo_hard":
            return (gained - 0.5 / beta) ** 2 + (lost + 0.5 / beta) ** 2
        case "nca_pair":
            return -log_sigmoid(beta * gained) - 0.5 * (log_sigmoid(-beta * gained) + log_sigmoid(-beta * lost))
        case "or":
            odds = paddle.log1p(-paddle.exp(chosen)) - paddle.log1p(-paddle.exp(rejected))
            return -log_sigmoid(chosen - rejected - odds)
        case "simpo":
            margin = margin - preference.simpo_gamma / beta
    return -log_sigmoid(beta * margin) * (1 - smoothing) - log_sigmoid(-beta * margin) * smoothing


class PairLoss:
    """Sums log-probabilities of pairs over a loss layer's tokens. `group`: ranks that may have other tokens of the same
    answers; None: each rank has all tokens of its rows."""

    def __init__(self, preference: Preference, group: Any):
        self._preference, self._group = preference, group
        self.sums: list[Any] = []  # of each pass without gradients since the last `clear`: [R, P, 2]

    @property
    def is_shared(self) -> bool:
        """Whether sums are over a group, whose ranks must number answers equally."""
        return self._group is not None

    def __call__(self, losses: Any, answers: Any, pairs: Any) -> tuple[Any, Any]:
        """Scalar: sum over the existing pairs, and the sums of METRICS.

        `losses` [U]: fp32, of tokens; `answers` [U]: index of each token's answer among 2·R·P. `pairs` [R, P, 5]: as in
        `Samples`, and the weight of a chosen answer's token.
        """
        rows, most, _ = pairs.shape
        # Not a product, which TF32 would round, nor a scatter, whose order of addition changes from run to run.
        of_answer = answers.unsqueeze(-1) == paddle.arange(rows * most * 2, dtype=answers.dtype)
        sums = -paddle.where(of_answer, losses.unsqueeze(-1), paddle.zeros([], losses.dtype)).sum(0)
        if self._group is not None:
            sums = Crossing.apply(sums, Op.REDUCE, self._group)
        policy = sums.reshape([rows, most, 2])
        if not paddle.is_grad_enabled():
            self.sums.append(policy)
        reference, counts, wanted = pairs[..., :2], pairs[..., 2:4], self._preference
        exists = counts[..., 0] > 0
        policy = paddle.where(exists.unsqueeze(-1), policy, paddle.full([], -1.0))  # missing pairs have no gradient
        chosen_sums = policy[..., 0]
        if wanted.loss in BY_TOKEN:
            policy, reference = policy / counts.clip(1), reference / counts.clip(1)
        each = wanted.ratio * pair_losses(wanted, policy, reference)
        if wanted.sft_ratio:
            each = each - wanted.sft_ratio * pairs[..., 4] * chosen_sums
        rewards = wanted.beta * (policy - reference).detach()
        chosen, rejected = rewards.unbind(-1)
        right = (chosen > rejected).astype("float32")
        shown = [chosen, rejected, right, chosen - rejected, *policy.detach().unbind(-1)]
        weight = exists.astype("float32")
        return (each * weight).sum(), paddle.stack([(figure * weight).sum() for figure in shown])


def embedding_table(placement: Placement, twin: Any) -> ShardedParameter:
    """This rank's rows [v, H] of the embedding. `twin`: the group of two ranks that hold them when a model ties the
    embedding to the LM head of another stage."""
    shape = placement.setup.shape
    table = placement.parameter(shape.embedding.weights[0], f"{shape.traits.prefix}.")
    if twin is None:
        return table
    first_copy = table.first_copy and twin.rank == 0
    return replace(
        table, presum_group=twin, presum_across_stages=True, replicas=2 * table.replicas, first_copy=first_copy
    )


class Embedding:
    """Token ids [U] -> hidden states [T, H], for each argument."""

    def __init__(self, placement: Placement, table: ShardedParameter):
        self._place = placement
        self._shard = VocabularyShard(placement.setup.shape.vocab_size, placement)
        self._table = table
        self.parameters: list[ShardedParameter] = [table]

    def __call__(self, *several: Any) -> list[Any]:
        return [self._of(ids) for ids in several]

    def _of(self, ids: Any) -> Any:
        numbers = self._place.numbers
        table = compute_weight(self._table, numbers)
        if self._place.tp == 1:
            return cast(paddle.nn.functional.embedding(ids, table), numbers.stored.dtype)
        local, inside = self._shard.localise(ids)
        rows = paddle.nn.functional.embedding(local, table)
        rows = rows * inside.astype(rows.dtype).unsqueeze(-1)
        return cast(self._place.cross(CommPoint.OUT_OF_EMBEDDING, rows), numbers.stored.dtype)


class Head:
    """Hidden states [T, H] and labels [U] -> the sum of this dp share's losses."""

    def __init__(self, placement: Placement, table: ShardedParameter | None, pieces: Sequence[int]):
        """`table`: the embedding's, if tied. `pieces`: tokens of each piece, if logits are computed in pieces."""
        self._place, setup, shape = placement, placement.setup, placement.setup.shape
        with paddle.LazyGuard():
            self._norm = setup.family.final_norm(setup.config)
        norm, lm_head, *bias = shape.head.weights
        self._slots = shard_layer(self._norm, lambda _: placement.parameter(norm, f"{shape.traits.prefix}."))
        self._tied = table is not None
        self._weights = [table or placement.parameter(lm_head, ""), *(placement.parameter(each, "") for each in bias)]
        self.parameters: list[ShardedParameter] = [*(weight for _, _, weight in self._slots), *self._weights]
        # Paddle's fused loss of a split vocabulary does not support padding.
        fused = setup.kernels.fused_cross_entropy and fuses_loss(shape.vocab_size, placement.tp)
        shard = VocabularyShard(shape.vocab_size, placement)
        self._loss = CrossEntropy(shard, placement.group(Axis.TENSOR), fused)
        self._pieces = Pieces(pieces, self._loss, self._weights, self._tied, placement.numbers) if pieces[1:] else None
        self._reduced_each = not setup.plan.assumed.async_grad_reduce  # reduced after each micro-batch
        self._mtp_weight = setup.mtp_weight
        self.scale = 1.0  # the gradient of the sum of losses in the following passes
        # Ranks that have other tokens of the same answers are among those that have the same weights.
        apart = placement.mesh.degree(Axis.CONTEXT) * placement.mesh.degree(Axis.ULYSSES) > 1
        group = self._weights[0].sum_group if apart else None
        self.pairs = PairLoss(setup.preference, group) if setup.preference else None
        self.metrics: Any = None  # sums that a step reports with its loss, since `Stage.forget_metrics`

    def loss(self, x: Any, labels: Any, answers: Any = None, pairs: Any = None) -> Any:
        """Scalar fp32; the same on every rank of a tp group. `answers` and `pairs`: as `PairLoss` takes them."""
        normed = self.normed(x)
        if self.pairs is not None and pairs is not None:
            total, metrics = self.pairs(self._losses(normed, labels), answers, pairs)
        elif paddle.is_grad_enabled():
            return self._sum(normed, labels)
        else:
            losses, hits = self._scores(normed, labels)
            total, metrics = losses.sum(), hits.astype("float32").sum().unsqueeze(0)
        self._count(metrics)
        return total

    def normed(self, x: Any) -> Any:
        """[T, H] after the last norm."""
        with compute_weights(self._slots, self._place.numbers):
            return self._norm(cast(x, self._place.numbers.computed.dtype))

    def losses_with_mtp(self, both: Any, labels: Any, of_further: Any) -> Any:
        """The loss and MTP's, weighted. `both` [2T, H]: hidden states after the last norm, and those of MTP."""
        hidden, further = cast(both, self._place.numbers.computed.dtype).chunk(2)
        if paddle.is_grad_enabled():
            total, mtp = self._sum(hidden, labels), self._sum(further, of_further, self._mtp_weight)
            self._count(mtp.detach().unsqueeze(0))
        else:
            (losses, hits), (of_mtp, _) = self._scores(hidden, labels), self._scores(further, of_further)
            total, mtp = losses.sum(), of_mtp.sum()
            self._count(paddle.stack([hits.astype("float32").sum(), mtp]))
        return total + self._mtp_weight * mtp

    def _count(self, metrics: Any) -> None:
        self.metrics = metrics if self.metrics is None else self.metrics + metrics

    def _sum(self, normed: Any, labels: Any, weight: float = 1.0) -> Any:
        """The sum of losses, whose gradient is `weight` times that of all."""
        if not self._pieces:
            return self._losses(normed, labels).sum()
        hidden = self._place.gathered(CommPoint.INTO_HEAD, normed)
        return self._pieces.sum(hidden, labels, weight * self.scale, later=self._reduced_each)

    def _losses(self, normed: Any, labels: Any) -> Any:
        """Losses of tokens, [U] in fp32."""
        if self._pieces:
            return self._pieces.losses(self._place.gathered(CommPoint.INTO_HEAD, normed), labels)
        return self._loss.losses(self._logits(normed), labels)

    def _scores(self, normed: Any, labels: Any) -> tuple[Any, Any]:
        """Losses and hits of tokens, [U]; without gradients."""
        if self._pieces:
            return self._pieces.scores(self._place.gathered(CommPoint.INTO_HEAD, normed), labels)
        return self._loss.scores(self._logits(normed), labels)[:2]

    def _logits(self, normed: Any) -> Any:
        table, *bias = (compute_weight(weight, self._place.numbers) for weight in self._weights)
        [logits] = self._place.products(CommPoint.INTO_HEAD, False, normed, table, transposed=self._tied)
        return sum(bias, logits)
