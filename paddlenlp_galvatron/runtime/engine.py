"""The engine: one object that trains a model by a plan on this rank."""

from collections.abc import Sequence
from functools import cached_property
from math import isfinite
from typing import Any, NamedTuple

import numpy as np
import paddle
import paddle.distributed as dist

from ..base.errors import UserError
from ..launch import gpus, status
from ..launch.status import waiting
from ..model.preference import METRICS
from ..plan import Precision, require_valid
from ..plan.communicators import all_to_alls, exchanging, fused_loss_groups, stage_groups
from . import device
from .batch import IGNORED_LABEL, Batch, Facts, Samples, samples_of
from .collectives import KINDS, all_gather, all_reduce, traffic_bytes, traffic_calls
from .gradients import HostStates, global_norm, reduce_gradients, update_in_turns
from .groups import Groups, RankGroups, require_world, start_world
from .pipeline import Pipeline
from .precision import LossScaler
from .setup import ModelSetup
from .stage import Stage
from .trace import span
from .units import Trainable

LOSS_SCALE = 2.0**15  # PaddleNLP's scale_loss
MTP_LOSS = "mtp_loss"  # name of the unweighted metric
TINY = 1e-12  # norms below this are treated as this


class Share(NamedTuple):
    """A rank's share of a global batch."""

    samples: Samples  # parts of its rows [micro-batches, r·S]; `pairs` [micro-batches, r, P, 5]
    labelled: int  # tokens with a label in the whole batch
    pairs: int = 0  # pairs in the whole batch

    @property
    def over(self) -> int:
        """Number of tokens, or pairs, that the loss is a mean over."""
        return self.pairs or self.labelled


class Engine:
    """This rank's share of a model under a plan. Every rank of the world builds one, with equal arguments.

    A step is `forward_backward`, then `update` with a Paddle optimizer over `tensors`.
    """

    def __init__(self, setup: ModelSetup, groups: Groups | None = None, loss_scale: float = LOSS_SCALE):
        """`groups`: communicators of this rank's earlier engines, to reuse. `loss_scale`: fp16's at the
        start. Raises UserError for a plan that cannot run."""
        plan, shape, seq_length = setup.plan, setup.shape, setup.seq_length
        require_valid(plan, shape)
        self.rank, world_size = start_world()
        require_world(plan.world_size, world_size)
        self.plan, self.shape, self.seq_length, self.adapters = plan, shape, seq_length, setup.adapters
        self._preference, self._seed, self.mtp_weight = setup.preference, setup.seed, setup.mtp_weight
        self._of_mtp = (MTP_LOSS,) * shape.mtp_layers
        self.metrics: dict[str, float] = {}  # metrics of the last step or evaluation, without its loss
        self.steps_done = 0  # set by loading a checkpoint
        gpus.set_defaults(plan.pipeline > 1 and not all_to_alls(plan, shape, seq_length))
        self.groups = groups or Groups(self.rank)
        setup.kernels.require_version(plan, paddle.__version__)
        in_kernels = fused_loss_groups(plan, shape) if setup.kernels.fused_cross_entropy else ()
        wanted = stage_groups(plan, shape, seq_length, setup.adapters is not None)
        self.groups.create(wanted, exchanging(plan, shape), in_kernels)
        self.stage = Stage(setup, RankGroups(plan, self.rank, self.groups))
        self._pipeline = Pipeline(plan, self.stage, self.rank, self.groups)
        self._host_states = HostStates() if plan.assumed.offload_optimizer else None
        self._world = dist.get_group(0) if world_size > 1 else None
        self.scaler = LossScaler(loss_scale) if plan.assumed.mixed_precision is Precision.FP16 else None

    @property
    def trainables(self) -> list[Trainable]:
        """Tensors that the optimizer updates on this rank, each with its place in the model and its gradient."""
        return self.stage.trainables

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Rows of a global batch that this rank reads; empty between the first and the last stage."""
        firsts = range(0, self.plan.global_batch, self.plan.micro_batch)
        return tuple(first + sample for first in firsts for sample in self.stage.samples)

    def share(self, rows: Batch) -> Share:
        """This rank's share, cut from `rows`, its rows of a global batch. Every rank calls this.

        Raises UserError: no token has a label."""
        samples = self._by_micro_batch(samples_of(rows))
        labelled, pairs, chosen = self.plan.global_batch * self.seq_length, 0, 0
        if isinstance(rows, tuple):  # a pair has labels; plain tokens are their own labels
            learnt = int((self.stage.own(samples.labels) != IGNORED_LABEL).sum()) if self.stage.is_last else 0
            facts = self._pairs_of_loss(samples)
            sums = [int(sum(counts)) for counts in self.gather(learnt, (facts[..., 2] > 0).sum(), facts[..., 2].sum())]
            labelled = sums[0] // self.plan.vocab.tp
            pairs, chosen = (each // self.stage.row_replicas for each in sums[1:])
        if not labelled:
            raise UserError(
                f"labels: all of a batch are {IGNORED_LABEL}, which marks tokens without a loss; look at how "
                "samples are made"
            )
        return Share(_weighted(samples, pairs, chosen), labelled, pairs)

    def _share_of(self, batch: Batch | Share) -> Share:
        """This rank's share of a global batch."""
        if isinstance(batch, Share):
            return batch
        local_rows = list(self.rows)
        if not isinstance(batch, tuple):
            return self.share(batch[local_rows])
        rows: list[Any] = [field if field is None else field[local_rows] for field in samples_of(batch)]
        return self.share(Samples(*rows))

    def _by_micro_batch(self, rows: Samples) -> Samples:
        """Each part of this rank's rows, by micro-batch."""
        count, samples, pairs = self.plan.micro_batches, len(self.stage.samples), rows.pairs
        tokens: list[Any] = [
            field if field is None else field.reshape(count, samples * self.seq_length) for field in rows[:3]
        ]
        ids, labels, ends = tokens
        return Samples(ids, labels, ends, None if pairs is None else pairs.reshape(count, samples, *pairs.shape[1:]))

    def _pairs_of_loss(self, samples: Samples) -> Facts:
        """Pairs of the rows for which this rank computes a share of the loss."""
        if samples.pairs is None or not self.stage.is_last:
            return np.zeros((1, 1, 4), np.float32)
        return samples.pairs[:, [self.stage.samples.index(row) for row in self.stage.rows_of_loss]]

    def forward_backward(self, batch: Batch | Share) -> float:
        """Run one global batch, G samples of S tokens, or this rank's share of it, and leave the gradients of its mean
        loss, summed over ranks.

        Returns the loss averaged over all tokens with a label; it is the same on every rank. fp16's gradients are
        times `scaler.scale`.
        """
        # Dropout applies to attention probabilities only, which no two ranks share. Each rank draws its masks from a
        # seed of the step, so that a resumed run draws the same.
        status.enter(self.steps_done)
        mixed = np.random.SeedSequence((self._seed, self.steps_done, self.rank))  # the same under any version
        paddle.seed(int(mixed.generate_state(1)[0]))
        share = self._share_of(batch)
        self.stage.forget_metrics()
        self.stage.load.gradient_scale = self.gradient_scale
        total = self._pipeline.run(share.samples, self.gradient_scale / share.over)
        with span("reduce gradients", "sync"):
            for unit in self.stage.units:
                unit.finish()
            reduce_gradients(self.stage.vectors)
        return self._mean(total, share.over, METRICS if self._preference else self._of_mtp)

    def evaluate(self, batch: Batch | Share) -> float:
        """The loss of one global batch, without dropout; weights stay unchanged."""
        share = self._share_of(batch)
        self.stage.forget_metrics()
        with self.stage.evaluating():
            total = self._pipeline.evaluate(share.samples)
        return self._mean(total, share.over, METRICS if self._preference else ("accuracy", *self._of_mtp))

    def answers(self, batch: Batch | Share) -> Facts:
        """Log-probabilities [G, P, 2] of the answers of one global batch, on every rank; 0 where a row has no such
        pair. With adapters: of the base model."""
        share = self._share_of(batch)
        self.stage.forget_metrics()
        with self.stage.evaluating(adapters=False):
            self._pipeline.evaluate(share.samples)
        assert share.samples.pairs is not None
        local_sums = np.zeros(
            (self.plan.micro_batches, self.plan.micro_batch, share.samples.pairs.shape[2], 2), np.float32
        )
        for number, sums in enumerate(self.stage.answer_sums):
            local_sums[number, self.stage.rows_of_loss] = device.to_host(self.stage.of_loss(sums))
        if not self.stage.reports_first:
            local_sums[:] = 0  # a replica counts these numbers
        with waiting("all_reduce of log-probabilities over all ranks"):
            whole = device.to_host(all_reduce(device.to_device(local_sums), self._world))
        return np.asarray(whole).reshape(-1, *local_sums.shape[2:])

    def _mean(self, total: Any, count: int, names: Sequence[str]) -> float:
        """The mean loss per token or pair, from this rank's sum; further sums go to `metrics`."""
        sums = self.stage.metrics
        sums = paddle.zeros([len(names)]) if sums is None else sums
        local_sums = paddle.concat([total.reshape([1]), sums]) / (count * self.stage.loss_replicas)
        if self.stage.load.coefficient:  # on every stage, whether its layers have experts or not
            balance = self.stage.load.balance
            balance = paddle.zeros([1]) if balance is None else balance.reshape([1])
            local_sums, names = paddle.concat([local_sums, balance]), (*names, "aux_loss")
        with waiting("all_reduce of the loss over all ranks"):  # on a GPU this is where a rank waits
            loss, *means = device.to_host(all_reduce(local_sums, self._world)).tolist()
        self.metrics = dict(zip(names, means, strict=True))
        return float(loss) - self.mtp_weight * self.metrics.get(MTP_LOSS, 0.0)

    def update(self, optimizer: Any, max_norm: float) -> float:
        """Run Paddle's optimizer over `tensors` on the gradients, clipped to a global norm of `max_norm`.

        Returns the norm before clipping. If it is not finite, nothing is updated. The gradients are freed; values may
        be in flight to other ranks until `wait_for_updates` or the next pass.
        """
        self.steps_done += 1
        norm: float = global_norm(self.trainables, self._world) / self.gradient_scale
        finite = isfinite(norm)
        if finite:
            update = self._host_states.update if self._host_states else update_in_turns
            update(optimizer, self.trainables, min(1.0, max_norm / max(norm, TINY)) / self.gradient_scale)
        for trainable in self.trainables:
            trainable.drop_gradient()
        if self.scaler:
            self.scaler.update(overflow=not finite)
        return norm

    def wait_for_updates(self) -> None:
        """Wait until this rank has every updated value; the next step waits by itself."""
        for trainable in self.trainables:
            trainable.published()

    @property
    def gradient_scale(self) -> float:
        """Stored gradients / gradients of the loss."""
        return self.scaler.scale if self.scaler else 1.0

    @property
    def tensors(self) -> list[Any]:
        """Tensors that an optimizer updates on this rank."""
        return [trainable.tensor for trainable in self.trainables]

    @property
    def decaying(self) -> list[str]:
        """Paddle's names of the tensors under weight decay."""
        return [trainable.tensor.name for trainable in self.trainables if trainable.decays]

    def gather(self, *values: float) -> list[tuple[float, ...]]:
        """All-gather numbers: for each given number, those of all ranks in rank order."""
        local = device.to_device(np.array([values], np.float64))
        with waiting("all_gather of numbers over all ranks"):
            return list(zip(*device.to_host(all_gather(local, self._world)).tolist(), strict=True))

    def traffic(self) -> dict[str, Any]:
        """Communicators of each rank; calls and bytes of each collective, summed over all ranks, since
        `collectives.forget_traffic`."""
        calls, sizes = [traffic_calls[kind] for kind in KINDS], [traffic_bytes[kind] for kind in KINDS]
        groups, *counts = self.gather(len(self.groups.members), *calls, *sizes)
        totals = [int(sum(count)) for count in counts]
        return {
            "groups": [int(count) for count in groups],
            "calls": dict(zip(KINDS, totals, strict=False)),
            "bytes": dict(zip(KINDS, totals[len(KINDS) :], strict=True)),
        }


def _weighted(samples: Samples, pairs: int, chosen: int) -> Samples:
    """Adds to each pair the weight of a chosen token; the batch has `pairs` pairs and `chosen` such tokens."""
    if samples.pairs is None:
        return samples
    weight = np.full_like(samples.pairs[..., :1], pairs / max(chosen, 1))
    return samples._replace(pairs=np.concatenate([samples.pairs, weight], axis=-1))
