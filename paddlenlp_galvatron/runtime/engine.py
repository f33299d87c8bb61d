"""The runtime's front door: one object that trains a model by a plan on this rank."""

from __future__ import annotations

from typing import Any

import paddle
import paddle.distributed as dist

from ..plan import ModelShape, Plan
from ..plan.check import require_valid
from .collectives import all_gather, all_reduce
from .family import Family
from .gradients import clip_gradients, global_norm, reduce_gradients
from .groups import Groups, require_world, start_world
from .pipeline import Pipeline
from .stage import Stage, Tokens, stage_groups
from .support import require_supported
from .units import whole
from .vocabulary import IGNORED_LABEL
from .weights import SeededWeights, WeightSource


class Engine:
    """This rank's share of a model under a plan. Every rank of the world builds one, with equal arguments.

    A step is `forward_backward`, then `clip`, then an optimizer over `tensors`, then `updated`.
    """

    def __init__(
        self,
        plan: Plan,
        shape: ModelShape,
        family: Family,
        seq_length: int,
        source: WeightSource | None = None,
        seed: int = 0,
    ):
        """Without a `source`, weights are drawn from `seed`. Raises UserError for a plan that cannot run."""
        require_valid(plan, shape)
        require_supported(plan, shape)
        self.rank, world_size = start_world()
        require_world(plan.world_size, world_size)
        self.plan, self.shape, self.seq_length = plan, shape, seq_length
        self.groups = Groups(self.rank)
        self.groups.create(stage_groups(plan, shape, seq_length))
        source = source or SeededWeights(seed, shape.initializer_range)
        self.stage = Stage(plan, shape, family, seq_length, self.rank, self.groups, source)
        self._pipeline = Pipeline(plan, self.stage, self.rank, self.groups)
        self._world = dist.get_group(0) if world_size > 1 else None

        self.trainables = [trainable for unit in self.stage.units for trainable in unit.trainables]
        self.trainables += [whole(vector) for vector in self.stage.vectors]

    def forward_backward(self, batch: Tokens) -> float:
        """Run one global batch [G, S + 1] and leave the gradients of its mean loss, summed over ranks.

        Returns the loss averaged over all tokens with a label; it is the same on every rank.
        """
        ids, labels = batch[:, :-1], batch[:, 1:]
        tokens = int((labels != IGNORED_LABEL).sum())
        shape = (self.plan.micro_batches, -1)
        total = self._pipeline.run(ids.reshape(shape), labels.reshape(shape), 1.0 / tokens)
        for unit in self.stage.units:
            unit.finish()
        reduce_gradients(self.stage.vectors)
        loss = all_reduce(total.reshape([1]) / (tokens * self.stage.loss_replicas), self._world)
        return float(loss)

    def clip(self, max_norm: float) -> float:
        """Clip the gradients by their global norm; returns the norm before."""
        norm: float = global_norm(self.trainables, self._world)
        clip_gradients(self.trainables, norm, max_norm)
        return norm

    def updated(self) -> None:
        """The optimizer has run: bring gathered copies of weights up to date and drop the gradients."""
        for unit in self.stage.units:
            unit.publish()
        for trainable in self.trainables:
            trainable.tensor.clear_gradient(False)

    @property
    def tensors(self) -> list[Any]:
        """What an optimizer updates on this rank."""
        return [trainable.tensor for trainable in self.trainables]

    @property
    def decaying(self) -> list[str]:
        """Paddle's names of the tensors under weight decay."""
        return [trainable.tensor.name for trainable in self.trainables if trainable.decays]

    def gather(self, value: float) -> list[float]:
        """A number of every rank, in rank order, on every rank."""
        mine = paddle.to_tensor([value], "float32")
        return [float(v) for v in all_gather(mine, self._world)]
