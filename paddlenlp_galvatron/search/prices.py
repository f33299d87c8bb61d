"""What a search asks of a cost model. `cost_model.CostModel` answers it, and so may any other: nothing here is its."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..cost_model.costs import Prediction, Task
from ..model import ModelShape
from ..plan import LayerStrategy, Plan, VocabStrategy
from ..plan.strategy import Assumptions, Strategy
from ..profiles.files import ProfileFile
from ..profiles.memory import Role


class Price(Protocol):
    """Of a layer, or of the vocabulary layers of a stage, on the rank that has most of it."""

    @property
    def forward_ms(self) -> float:
        """Of one micro-batch, as backward."""

    @property
    def backward_ms(self) -> float: ...

    @property
    def sync_ms(self) -> float:
        """Once a step, after the last backward."""

    @property
    def states_mib(self) -> float:
        """Held all the time."""

    @property
    def activation_mib(self) -> float:
        """Held by every micro-batch in flight."""

    @property
    def working_mib(self) -> float:
        """A stage needs the most of its parts' once."""


class Prices(Protocol):
    """What a search is made of: layers, vocabulary, switches, hand-overs, and what stages hold beside them."""

    @property
    def assumed(self) -> Assumptions: ...

    @property
    def layer_types(self) -> tuple[int, ...]:
        """Of each layer; types rise."""

    def layer_cost(
        self,
        strategy: LayerStrategy,
        *,
        stage_size: int,
        micro_batch: int,
        micro_batches: int,
        pipeline: int,
        layer_type: int = 0,
    ) -> Price: ...

    def vocab_cost(
        self, vocab: VocabStrategy, *, stage_size: int, micro_batch: int, micro_batches: int, pipeline: int, role: Role
    ) -> Price: ...

    def middle_cost(self, *, stage_size: int, micro_batch: int, micro_batches: int, later: bool = False) -> Price:
        """What a chunk of a stage without vocabulary layers has beside its layers; `later`: not its stage's first."""

    def switch_cost(
        self, before: Strategy | None, after: Strategy | None, *, stage_size: int, micro_batch: int, layer_type: int = 0
    ) -> tuple[float, float]:
        """(forward, backward) ms of handing a micro-batch's tokens of a layer type on; None is the stage's edge."""

    def boundary_cost(self, *, stage_size: int, micro_batch: int, pipeline: int, layer_type: int = 0) -> float:
        """ms of a micro-batch's hand-over to the next stage, and of its gradient's back."""

    def crossing_type(self, layer: int) -> int:
        """Layer type whose tokens are handed on in front of a layer."""


class PricedPlans(Prices, Protocol):
    """Prices of a model on a cluster, and of whole plans: what a search says of its answer."""

    @property
    def models(self) -> tuple[ModelShape, ...]:
        """Of each layer type."""

    @property
    def seqs(self) -> tuple[int, ...]:
        """Tokens of a sample, of each layer type."""

    @property
    def num_nodes(self) -> int: ...

    @property
    def gpus_per_node(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def context_mib(self) -> float:
        """The reserve on every device."""

    @property
    def task(self) -> Task:
        """Which weights learn, and whether a reference model runs beside them."""

    @property
    def profile_files(self) -> tuple[ProfileFile, ...]:
        """That the prices come from."""

    def predict(self, plan: Plan) -> Prediction: ...

    def in_flight(self, plan: Plan, stage: int) -> tuple[int, ...]:
        """Micro-batches of each chunk whose activations a stage holds when they take most."""

    def stage_parts(self, plan: Plan, stage: int) -> Sequence[Price]:
        """Of a stage, chunk by chunk."""

    def chunk_parts(self, plan: Plan, stage: int, chunk: int) -> Sequence[Price]: ...
