"""Parts of a model as one rank of a plan runs them, without its peers."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import paddle
from numpy.typing import NDArray

from ..base.units import MIB
from ..plan import Assumptions, LayerStrategy, ModelShape, Plan, Precision, VocabStrategy
from ..plan.precision import NumberTypes
from ..profiles import PassKey
from ..runtime.device import on_gpu
from ..runtime.experts import PRODUCTS, OwnExperts
from ..runtime.groups import Groups, RankGroups
from ..runtime.kernels import Kernels
from ..runtime.precision import on_device
from ..runtime.setup import ModelSetup
from ..runtime.stage import Stage
from ..runtime.units import Trainable
from ..runtime.weights import WHOLE, ShardedParameter, Slice, compute_weights, fill_whole, zero_parameter
from .stopwatch import Array

EXPERTS = "experts"  # first word of a part that is some experts; their number follows
LAYERS = 1, 3  # layers of the two models whose difference gives a layer


def of_one_layer(few: Array, many: Array) -> Array:
    """Per-layer times, [samples]: the difference of models with LAYERS layers."""
    layer: Array = (many - few) / (LAYERS[1] - LAYERS[0])
    return layer if np.mean(layer) > 0 else many / LAYERS[1]  # noise may hide the difference


_DONE = SimpleNamespace(wait=lambda: True, is_completed=lambda: True)


class _FakeProcessGroup:
    """Collectives that write zeros in place of the peers' part; zeros compute as fast as other numbers."""

    def all_reduce(self, tensor: Any, *_: Any) -> Any:
        return _DONE

    def all_gather_into_tensor(self, out: Any, tensor: Any, *_: Any) -> Any:
        if out.ndim > 1:  # tokens
            return self.fill(out)
        paddle.assign(paddle.concat([tensor] * (out.shape[0] // tensor.shape[0])), output=out)  # initial weights
        return _DONE

    def fill(self, out: Any, *_: Any) -> Any:
        out.zero_()
        return _DONE

    reduce_scatter_tensor = all_to_all_single = fill
    all_reduce_on_calc_stream = broadcast = all_reduce
    all_gather_into_tensor_on_calc_stream = reduce_scatter_tensor_on_calc_stream = fill
    all_to_all_single_on_calc_stream = fill


class _FakeGroup:
    """Stands for `paddle.distributed`'s Group on its first rank."""

    def __init__(self, ranks: tuple[int, ...]):
        self.nranks, self.rank, self.id, self.ranks = len(ranks), 0, -1, list(ranks)
        self.process_group = _FakeProcessGroup()

    def is_member(self) -> bool:
        return True

    def get_group_rank(self, rank: int) -> int:
        return self.ranks.index(rank)


class FakeGroups(Groups):
    """Communicators without peers: one rank's share of a split layer runs alone."""

    def __init__(self) -> None:
        super().__init__(rank=0)

    def get(self, ranks: tuple[int, ...], use: str = "") -> Any:
        return _FakeGroup(ranks) if len(ranks) > 1 else None


class CheapWeights:
    """Weights of ordinary size without drawing each number: one short random row, repeated."""

    def __init__(self, deviation: float):
        self._row = deviation * np.random.default_rng(0).standard_normal(4099, np.float32)  # a prime: rows differ

    def __call__(self, name: str, shape: tuple[int, ...], rank_slice: Slice = WHOLE) -> NDArray[np.float32]:
        return np.resize(self._row, tuple(rank_slice.size(shape)))


class Extent(NamedTuple):
    """A part of a model."""

    layers: int = 0
    embedding: bool = False
    head: bool = False


class MeasuredPart:
    """Some layers, embedding or head of a model, split by a strategy; this rank is the first of those that share them.

    Layers include the router but not the routed experts, which are measured separately (`ExpertsPart`). The peers' part
    of every collective is skipped. `forward` and `backward` alternate; gradients accumulate as over the micro-batches
    of a step.
    """

    def __init__(
        self,
        shape: ModelShape,
        assumed: Assumptions,
        samples: int,
        extent: Extent,
        strategy: LayerStrategy = LayerStrategy(),
    ):
        layers, embedding, head = extent
        shape = replace(shape, expert_size=0, layers=max(layers, 1))
        stages = (*(() if embedding else (0,)), layers, *(() if head else (0,)))
        vocab = VocabStrategy(strategy.tp)
        plan = Plan(strategy.ranks * len(stages), samples, 1, stages, (strategy,) * layers, vocab, assumed=assumed)
        rank = 0 if embedding else strategy.ranks
        seq_length, fused = assumed.seq_length or 0, on_gpu()  # training's defaults
        # A split vocabulary uses the runtime's loss, as in training by default; no peer would answer a fused kernel's
        # messages.
        kernels = Kernels(bool(assumed.flash_attention), fused_rope=fused, fused_rms_norm=fused)
        weights = CheapWeights(shape.initializer_range)
        setup = ModelSetup.of(plan, shape, seq_length, source=weights, kernels=kernels)
        self._stage = Stage(setup, RankGroups(plan, rank, FakeGroups()))
        tokens = np.random.default_rng(0).integers(shape.vocab_size, size=(1, samples * seq_length))
        self._tokens: Any = self._stage.take(tokens)[0] if embedding or head else None
        self._received = None if embedding else self._boundary()
        self._returned = None if head else self._boundary()
        self._x: Any = None
        self._out: Any = None

    def _boundary(self) -> Any:
        """The input from the previous stage, or its gradient from the next stage."""
        return paddle.randn(self._stage.boundary_shape).astype(self._stage.numbers.stored.dtype)

    @property
    def trainables(self) -> list[Trainable]:
        """The trained weights."""
        return self._stage.trainables

    @property
    def weights(self) -> int:
        """Number of weights that the part holds on this rank."""
        return sum(int(trainable.tensor.size) for trainable in self.trainables)

    @property
    def mask_mib(self) -> float:
        """The attention mask that a stage keeps for all its layers."""
        mask = self._stage.mask
        return 0.0 if mask is None else float(mask.size * mask.element_size()) / MIB

    def forward(self) -> None:
        """One micro-batch; the input from the previous stage is a separate tensor, as in a pipeline."""
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
        self._stage.accumulate_gradients()
        self._x = self._out = None


def is_of_experts(module: str) -> bool:
    """Whether the part of a key is a set of experts."""
    return module.startswith(EXPERTS)


def expert_count(module: str) -> int:
    """How many experts such a part has."""
    return int(module.removeprefix(EXPERTS))


class ExpertsPart:
    """Some experts of a layer on one of the ranks that split each, with equally many rows each. It does all work after
    the router without messages: ordering and copying rows, the products, and the sum of each token. `forward` and
    `backward` alternate; gradients accumulate as over the micro-batches of a step."""

    def __init__(self, shape: ModelShape, key: PassKey, precision: Precision):
        """`key`: one of `expert_keys`."""
        count, inner = expert_count(key.part), shape.expert_size // key.tp
        self._numbers = numbers = on_device(NumberTypes.of(precision))
        load: Any = None  # counts a router's choices
        some_experts = replace(shape, experts=count, expert_size=inner)
        self._experts = OwnExperts(some_experts, LayerStrategy().experts, None, numbers, load)
        self._slots = []
        source = CheapWeights(shape.initializer_range)
        for name in PRODUCTS:
            size = (inner, shape.hidden_size) if name == "down" else (shape.hidden_size, inner)
            whole, tensor = (count, *size), zero_parameter([count, *size], numbers.stored.dtype)
            setattr(self._experts.layer, name, tensor)
            record = ShardedParameter(
                name, whole, WHOLE, tensor, None, 1, gradient_dtype=numbers.gradients.dtype, source=source
            )
            fill_whole(record)
            self._slots.append((self._experts.layer, name, record))
        rows = [key.batch * key.seq, shape.experts_per_token]
        self._chosen = (paddle.arange(rows[0] * rows[1]) % count).reshape(rows)
        self._scores = paddle.full(rows, 1 / rows[1])
        self._x, self._returned = (
            paddle.randn([rows[0], shape.hidden_size]).astype(numbers.computed.dtype) for _ in range(2)
        )
        self._out: Any = None

    def forward(self) -> None:
        """One micro-batch."""
        x, scores = self._x.detach(), self._scores.detach()
        x.stop_gradient = scores.stop_gradient = False
        memo = {"chosen": self._chosen}
        with compute_weights(self._slots, self._numbers):
            with paddle.no_grad():
                self._experts.route(x, memo)
            self._out = self._experts.weighted(x, scores, memo)

    def backward(self) -> None:
        paddle.autograd.backward([self._out], [self._returned])
        for *_, weight in self._slots:
            weight.accumulate_autograd()
        self._out = None
