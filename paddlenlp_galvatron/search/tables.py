"""From the cost model to the arrays that the C++ core searches, for one family of plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import galvatron_dp_core
import numpy as np
from numpy.typing import NDArray

from ..cost_model import CostModel, LayerCost
from ..plan import LayerStrategy, Plan, Schedule, VocabStrategy
from ..plan.layout import Grid, TokenLayout
from ..plan.schedule import in_flight
from ..profiles.memory import Role
from .space import Family

Strategy = LayerStrategy | VocabStrategy
NOTHING = LayerCost(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Tables:
    """A family's search problem: the core's object, and what its numbers stand for."""

    family: Family
    layers: Sequence[LayerStrategy]
    vocabularies: Sequence[VocabStrategy]
    core: galvatron_dp_core.Pipeline

    def plan(self, vocab: int, division: Sequence[int], choice: Sequence[int], bare: Plan) -> Plan:
        """The plan that numbers of the core stand for; `bare` gives what is the same for all plans of a search."""
        return replace(
            bare,
            global_batch=self.family.global_batch,
            micro_batches=self.family.micro_batches,
            stages=tuple(division),
            layers=tuple(self.layers[k] for k in choice),
            vocab=self.vocabularies[vocab],
            schedule=self.family.schedule,
        )


def build(
    family: Family,
    layers: Sequence[LayerStrategy],
    vocabularies: Sequence[VocabStrategy],
    cost: CostModel,
    budget_mib: float,
) -> Tables:
    """Price every strategy in the family and hand the tables to the core.

    `budget_mib` is what a plan may use on a device, the cost model's reserve already taken off. Raises UserError where
    a profile lacks what a strategy needs.
    """
    stages, stage_size, micro_batch = family.stages, family.stage_size, family.micro_batch
    layer_rows = [
        _numbers(
            cost.layer_cost(
                layer,
                stage_size=stage_size,
                micro_batch=micro_batch,
                micro_batches=family.micro_batches,
                pipeline=stages,
            )
        )
        for layer in layers
    ]

    def vocab_row(vocab: VocabStrategy, role: Role) -> tuple[float, ...]:
        return _numbers(
            cost.vocab_cost(
                vocab,
                stage_size=stage_size,
                micro_batch=micro_batch,
                micro_batches=family.micro_batches,
                pipeline=stages,
                role=role,
            )
        )

    def switch(before: Strategy | None, after: Strategy | None) -> tuple[float, float]:
        return cost.switch_cost(before, after, stage_size=stage_size, micro_batch=micro_batch)

    layouts = [_layout(layer, stage_size, cost) for layer in layers]
    one_of_each = dict(zip(layouts, layers, strict=True))
    numbers = {layout: number for number, layout in enumerate(one_of_each)}
    samples, kinds, vocabs = list(one_of_each.values()), len(one_of_each), len(vocabularies)
    change = _shortest(_array([[switch(a, b) for b in samples] for a in samples], kinds, kinds, 2))
    enter = _array([switch(None, sample) for sample in samples], kinds, 2)
    leave = _array([switch(sample, None) for sample in samples], kinds, 2)
    vocab_enter = _array([[switch(v, sample) for sample in samples] for v in vocabularies], vocabs, kinds, 2)
    vocab_leave = _array([[switch(sample, v) for sample in samples] for v in vocabularies], vocabs, kinds, 2)
    send = 0.0
    if stages > 1:
        send = cost.boundary_cost(stage_size=stage_size, micro_batch=micro_batch, pipeline=stages)
    core = galvatron_dp_core.Pipeline(
        layers=len(cost.layer_types),
        micro_batches=family.micro_batches,
        gpipe=family.schedule is Schedule.GPIPE,
        strategies=_array(layer_rows, len(layers), 6),
        groups=np.array([numbers[layout] for layout in layouts], dtype=np.int32),
        change=change,
        enter=_through_start(enter, change),
        leave=_through_end(change, leave),
        vocabs=_array(
            [
                (vocab_row(vocab, "first"), vocab_row(vocab, "last"))
                if stages > 1
                else (vocab_row(vocab, "only"), _numbers(NOTHING))
                for vocab in vocabularies
            ],
            vocabs,
            2,
            6,
        ),
        vocab_enter=_through_start(vocab_enter, change),
        vocab_leave=_through_end(change, vocab_leave),
        in_flight=_in_flight(family),
        send=np.full(stages - 1, send),
        budget_mib=budget_mib,
    )
    return Tables(family, layers, vocabularies, core)


# The core takes prices of change that obey the triangle inequality. Measured ones may not; then the core is given the
# shortest ways, and the gap between its time and the predicted one stays in the certificate.


def _shortest(change: NDArray[np.float64]) -> NDArray[np.float64]:
    """Cheapest ways between layouts through others, forward and backward apart; [layouts, layouts, 2]."""
    for via in range(len(change)):
        change = np.minimum(change, change[:, via, None] + change[None, via])
    return change


def _through_start(enter: NDArray[np.float64], change: NDArray[np.float64]) -> NDArray[np.float64]:
    """Cheapest ways into each layout; [..., layouts, 2]."""
    return np.asarray((enter[..., :, None, :] + change).min(axis=-3))


def _through_end(change: NDArray[np.float64], leave: NDArray[np.float64]) -> NDArray[np.float64]:
    """Cheapest ways out of each layout; [..., layouts, 2]."""
    return np.asarray((change + leave[..., None, :, :]).min(axis=-2))


def sketch_ms(family: Family, layers: Sequence[LayerStrategy], cost: CostModel) -> float:
    """A lower bound, in ms, of the step time of every plan of the family, for a few prices.

    Memory, vocabulary, gradient sums and switches are free. Recompute only adds to a layer's passes, so it is left out,
    and so is ZeRO-3, unless gradients are reduced within the passes: then it reduces them cheaper.
    """
    stages = family.stages
    plain = [layer for layer in layers if not layer.recompute] or list(layers)
    if cost.assumed.async_grad_reduce:  # of each degree the first, which has the default dp type
        plain = list({(layer.degree, layer.ulysses, layer.consecutive): layer for layer in reversed(plain)}.values())
    rows = []
    for layer in plain:
        price = cost.layer_cost(
            layer,
            stage_size=family.stage_size,
            micro_batch=family.micro_batch,
            micro_batches=family.micro_batches,
            pipeline=stages,
        )
        rows.append((price.forward_ms, price.backward_ms, 0.0, 0.0, 0.0, 0.0))
    nothing = np.zeros((1, 2))
    core = galvatron_dp_core.Pipeline(
        layers=len(cost.layer_types),
        micro_batches=family.micro_batches,
        gpipe=family.schedule is Schedule.GPIPE,
        strategies=_array(rows, len(rows), 6),
        groups=np.zeros(len(rows), dtype=np.int32),
        change=nothing.reshape(1, 1, 2),
        enter=nothing,
        leave=nothing,
        vocabs=np.zeros((1, 2, 6)),
        vocab_enter=nothing.reshape(1, 1, 2),
        vocab_leave=nothing.reshape(1, 1, 2),
        in_flight=_in_flight(family),
        send=np.zeros(stages - 1),
        budget_mib=0.0,
    )
    return float(core.bound())


def _in_flight(family: Family) -> NDArray[np.int32]:
    held = (in_flight(family.schedule, s, family.stages, family.micro_batches) for s in range(family.stages))
    return np.fromiter(held, dtype=np.int32)


def _numbers(cost: LayerCost) -> tuple[float, ...]:
    """In the core's order."""
    return (
        cost.forward_ms,
        cost.backward_ms,
        cost.sync_ms,
        cost.states_mib,
        cost.activation_mib,
        cost.working_mib,
    )


def _array(rows: object, *shape: int) -> NDArray[np.float64]:
    return np.array(rows, dtype=np.float64).reshape(shape)


def _layout(layer: LayerStrategy, stage_size: int, cost: CostModel) -> TokenLayout | None:
    """Token layout of a layer; None: the plain one, where rank r holds the r-th of equal slices. Layers of one layout
    follow each other at no cost."""
    sharded = layer.ulysses or cost.assumed.sequence_parallel
    if layer.degree == 1 or (sharded and layer.consecutive):
        return None
    return TokenLayout(Grid(stage_size, layer.degree, layer.consecutive), sharded)
