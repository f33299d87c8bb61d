"""Parts of a model as one rank of a plan runs them, alone and ready to be measured."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

from ...plan import Assumptions, LayerStrategy, ModelShape, Plan, Precision, VocabStrategy
from ...runtime.adapter import Adapter, Kernels
from ...runtime.device import on_gpu
from ...runtime.stage import Stage
from ...runtime.units import Trainable
from ..clock import Array
from .silent import PatternWeights, SilentGroups

FEW_AND_MANY = 1, 3  # layers: their difference leaves out what does not belong to a layer


def of_one_layer(few: Array, many: Array, layers: tuple[int, int] = FEW_AND_MANY) -> Array:
    """Laps of one layer [n] from those of few and of many."""
    one: Array = (many - few) / (layers[1] - layers[0])
    return one if np.mean(one) > 0 else many / layers[1]  # noise may swallow the difference


class MeasuredPart:
    """Some layers, embedding or head of a model, split as a strategy says; this rank is the first that share them.

    The peers' part of every collective is left out. `forward` and `backward` alternate; gradients are added up, as
    those of the micro-batches of a step.
    """

    def __init__(
        self,
        shape: ModelShape,
        family: Adapter,
        *,
        layers: int = 0,
        embedding: bool = False,
        head: bool = False,
        samples: int,
        seq_length: int,
        strategy: LayerStrategy = LayerStrategy(),
        sequence_parallel: bool = False,
        precision: Precision = Precision.FP32,
        flash_attention: bool = False,
    ):
        stages = (*(() if embedding else (0,)), layers, *(() if head else (0,)))
        plan = Plan(
            world_size=strategy.ranks * len(stages),
            global_batch=samples,
            micro_batches=1,
            stages=stages,
            layers=(strategy,) * layers,
            vocab=VocabStrategy(strategy.tp),
            assumed=Assumptions(sequence_parallel, precision, seq_length=seq_length),
        )
        rank = 0 if embedding else strategy.ranks
        weights = PatternWeights(shape.initializer_range)
        fused = on_gpu()  # as training has it by default
        # A split vocabulary's loss is the runtime's own, as in training by default; nobody answers a kernel's messages.
        kernels = Kernels(flash_attention, fused_rope=fused, fused_rms_norm=fused)
        self._stage = Stage(plan, shape, family, seq_length, rank, SilentGroups(), weights, None, kernels)
        tokens = np.random.default_rng(0).integers(shape.vocab_size, size=(1, samples * seq_length))
        self._tokens: Any = self._stage.take(tokens)[0] if embedding or head else None
        self._received = None if embedding else self._boundary()
        self._returned = None if head else self._boundary()
        self._x: Any = None
        self._out: Any = None

    def _boundary(self) -> Any:
        """What comes from the stage before, or its gradient from the stage behind."""
        return paddle.randn(self._stage.boundary_shape).astype(self._stage.numbers.stored)

    @property
    def trainables(self) -> list[Trainable]:
        """What an optimizer updates."""
        return self._stage.trainables

    @property
    def weights(self) -> int:
        """Number of weights that the part holds on this rank."""
        return sum(int(trainable.tensor.size) for trainable in self.trainables)

    @property
    def mask_mib(self) -> float:
        """The attention mask that a stage keeps, whatever its layers."""
        mask = self._stage.mask
        return 0.0 if mask is None else float(mask.size * mask.element_size()) / 2**20

    def forward(self) -> None:
        """One micro-batch; what arrives from the stage before is a tensor of its own, as in a pipeline."""
        if self._received is not None:
            self._x = self._received.clone()
            self._x.stop_gradient = False
        self._out = self._stage.forward(self._x, self._tokens, self._tokens)

    def backward(self) -> None:
        out = self._out
        if self._returned is None:
            out.backward()
        else:
            paddle.autograd.backward([out], [self._returned])
        self._stage.settle()
        self._x = self._out = None
