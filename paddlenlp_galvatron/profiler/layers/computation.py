"""Measures how long the parts of a model compute, by batch, sequence length and degree; communication is left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import paddle

from ...model.layer import APART
from ...plan import LayerStrategy, ModelShape, Precision, Recompute
from ...plan.layout import chunks_of_a_sample
from ...plan.mesh import Axis
from ...profiles import EMBEDDING, HEAD, PassKey, SeamKey, Shape, layer_part
from ...runtime.adapter import Adapter
from ...runtime.device import on_gpu
from ...runtime.gradients import global_norm, update_in_turns
from ..journal import Journal
from ..refine import coarse, uncertain
from ..stopwatch import Stopwatch, Timing
from .part import FEW_AND_MANY, MeasuredPart, of_one_layer
from .summary import LAUNCH, OPTIMIZER, PassPoint, PassTurn, SeamPoint, SeamTurn, SharePoint, doubtful, measured

TURNS, MOST_TURNS = 2, 5  # everything is measured twice, what spreads widely or cannot be more often
PINNED_TURNS = 4  # where CPU processes are pinned: a small part took up to 8 % longer than at best for 5 to 10 s
SMALL_MS = 20.0  # what takes less is measured in all turns: some took half as long again, as memory happened to lie
TOLERANCE = 0.05  # of a time: points in between are measured where a line through the others misses by more
# A layer that a GPU computes in less time than its host takes to launch it: as many kernels, few tokens and weights.
NARROW: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "heads": 2, "kv_heads": 2, "own_head_dim": 128}
NARROW_TOKENS = 16
# Two ranks that share samples: what each does at the seams is by its tokens, hardly by how many others there are.
SHARED = {Axis.ULYSSES: LayerStrategy(2, ulysses=True), Axis.CONTEXT: LayerStrategy(context=2)}
ENDS: dict[str, dict[str, Any]] = {EMBEDDING: {"embedding": True}, HEAD: {"head": True}}


@dataclass
class ComputationProfiler:
    """Measures one model, all ranks at once, into a journal. Every rank builds one and calls `measure`."""

    shapes: Sequence[ModelShape]  # one a layer type
    family: Adapter
    stopwatch: Stopwatch
    journal: Journal
    precision: Precision = Precision.FP32
    sequence_parallel: bool = False
    layers: tuple[int, int] = FEW_AND_MANY
    adaptive: bool = True
    flash_attention: bool = False
    turns: int | None = None  # of every number; None: as it needs

    def measure(self, points: Sequence[Shape], degrees: Sequence[int], tick: Callable[[int], None]) -> None:
        """Measure all that the journal does not know; `tick` gets the number of points times degrees settled so far."""
        settled = 0
        tick(settled)
        for line in _lines(points):
            for tp in degrees:
                for part in [*map(layer_part, range(len(self.shapes))), *ENDS]:
                    self._measure_line(part, line, tp)
                settled += len(line)
                tick(settled)
        for line in _lines(points):
            for tp in degrees:
                for number in range(len(self.shapes)):
                    self._measure_shares(self._key(layer_part(number), line[0], tp))
        if max(degrees) > 1:
            self._measure_seams(points)
        self.journal.get(OPTIMIZER, lambda: self._optimizer_ms_per_million(points[0]))
        if on_gpu():
            self.journal.get(LAUNCH, self._launch)
        for turn in range(1, self.turns or MOST_TURNS):
            if not self.stopwatch.is_late():
                doubted = doubtful(self.journal)
                for key, found in measured(self.journal).items():
                    if turn < (self.turns or self._usual_turns(found.whole.ms, key in doubted)):
                        self._measure(PassPoint(key, turn))

    def _usual_turns(self, ms: float, doubted: bool) -> int:
        if ms < SMALL_MS or doubted:
            return MOST_TURNS
        return PINNED_TURNS if self.stopwatch.pinned else TURNS

    def _measure_line(self, part: str, line: Sequence[Shape], tp: int) -> None:
        """Points along one line: where it is adaptive, those in between only if the others do not tell them."""
        varied = 0 if len({point.seq for point in line}) == 1 else 1  # of (batch, sequence length)
        keys = {float(point[varied]): self._key(part, point, tp) for point in line}
        grid = sorted(keys)
        wanted = coarse(grid) if self.adaptive else grid
        while wanted:
            for x in wanted:
                self._measure(PassPoint(keys[x], 0))
            known = measured(self.journal)
            # Over the batch the search interpolates times, over the sequence length times of a token.
            times = {x: known[key].whole.ms / (x if varied else 1) for x, key in keys.items() if key in known}
            wanted = [] if self.stopwatch.is_late() else uncertain(grid, times, TOLERANCE)

    def _key(self, part: str, point: Shape, tp: int) -> PassKey:
        return PassKey(part, point.batch, self._shape(part).seq_length or point.seq, tp)

    def _shape(self, part: str) -> ModelShape:
        if part in ENDS:
            return self.shapes[0 if part == EMBEDDING else -1]
        return self.shapes[int(part.rpartition("_")[2])]

    def _measure(self, point: PassPoint) -> None:
        self.journal.get(point.name, lambda: self._end(point.key) if point.key.part in ENDS else self._layer(point.key))

    def _part(self, key: PassKey, strategy: LayerStrategy | None = None, **what: Any) -> MeasuredPart:
        return MeasuredPart(
            self._shape(key.part),
            self.family,
            samples=key.batch,
            seq_length=key.seq,
            strategy=strategy or LayerStrategy(key.tp),
            sequence_parallel=self.sequence_parallel,
            precision=self.precision,
            flash_attention=self.flash_attention,
            **what,
        )

    def _layer(self, key: PassKey) -> PassTurn:
        few, many = self.layers
        parts = [
            self._part(key, layers=few),
            self._part(key, layers=many),
            self._part(key, layers=few, strategy=LayerStrategy(key.tp, recompute=Recompute.FULL)),
        ]
        steps = [step for part in parts for step in (part.forward, part.backward)]
        few_f, few_b, many_f, many_b, _, again_b = self.stopwatch.apart(*steps).T
        recompute_ms = max(0.0, float(np.median(again_b - few_b)) / few)
        forward, backward = of_one_layer(few_f, many_f, self.layers), of_one_layer(few_b, many_b, self.layers)
        return PassTurn(forward.tolist(), backward.tolist(), recompute_ms)

    def _launch(self) -> PassTurn:
        """What the host takes to launch a layer."""
        narrow = replace(self, shapes=[replace(self.shapes[0], **NARROW)])
        return narrow._layer(PassKey(layer_part(), 1, NARROW_TOKENS))

    def _measure_shares(self, key: PassKey) -> None:
        """Of the time of recomputing a whole layer, what its parts take: at one batch, as they grow alike."""
        if not self.stopwatch.is_late():
            self.journal.get(SharePoint.of(key).name, lambda: self._shares(key))

    def _shares(self, key: PassKey) -> dict[str, float]:
        how = (Recompute.NONE, Recompute.FULL, *APART)
        parts = [self._part(key, layers=1, strategy=LayerStrategy(key.tp, recompute=each)) for each in how]
        laps = self.stopwatch.apart(*(step for part in parts for step in (part.forward, part.backward)))
        plain, whole, *others = laps[:, 1::2].T  # backward
        most = float(np.median(whole - plain))
        if most <= 0:  # noise swallows it: the model's arithmetic tells
            return {}
        ms = [float(np.median(each - plain)) for each in others]
        return {each.words: min(max(found / most, 0.0), 1.0) for each, found in zip(APART, ms, strict=True)}

    def _measure_seams(self, points: Sequence[Shape]) -> None:
        """Of few tokens and of many, at each length."""
        ends = [line[end] for line in _lines(points) for end in (0, -1)]
        for turn in range(self.turns or TURNS):
            for key in dict.fromkeys(self._key(layer_part(n), end, 1) for n in range(len(self.shapes)) for end in ends):
                for axis, shared in SHARED.items():
                    if not self.stopwatch.is_late() and _can_share(self._shape(key.part), key.seq, axis):
                        point = SeamPoint(SeamKey(key.part, key.batch, key.seq, axis), turn)
                        self.journal.get(point.name, partial(self._seams, key, shared))

    def _seams(self, key: PassKey, shared: LayerStrategy) -> SeamTurn:
        """In one series of laps, so that whatever slows the one down slows the other."""
        ranks, (few, many) = shared.ranks, self.layers
        each = [
            self._part(of, layers=layers, strategy=strategy)
            for strategy, of in ((LayerStrategy(), key), (shared, key._replace(batch=ranks * key.batch)))
            for layers in (few, many)
        ]
        laps = self.stopwatch.apart(*(step for part in each for step in (part.forward, part.backward))).T
        alone, together = (
            [of_one_layer(few_ms, many_ms, self.layers) for few_ms, many_ms in zip(*halves, strict=True)]
            for halves in ((laps[:2], laps[2:4]), (laps[4:6], laps[6:]))
        )
        forward, backward = (more - less for less, more in zip(alone, together, strict=True))
        return SeamTurn(forward.tolist(), backward.tolist())

    def _end(self, key: PassKey) -> PassTurn:
        part = self._part(key, **ENDS[key.part])
        forward, backward = self.stopwatch.apart(part.forward, part.backward).T.tolist()
        return PassTurn(forward, backward, None)

    def _optimizer_ms_per_million(self, point: Shape) -> float:
        """Clipping and AdamW's update."""
        part = self._part(self._key(layer_part(), point, 1), layers=self.layers[1])
        optimizer = paddle.optimizer.AdamW(parameters=[trainable.tensor for trainable in part.trainables])

        def update() -> None:
            global_norm(part.trainables, None)
            update_in_turns(optimizer, part.trainables, factor=0.5)

        ms = Timing.of(
            self.stopwatch.apart(part.forward, part.backward, update)[:, 2]
        ).ms  # an update uses gradients up
        return ms / (part.weights / 1e6)


def _can_share(shape: ModelShape, seq: int, axis: Axis) -> bool:
    degree = SHARED[axis].ranks
    return (shape.heads if axis is Axis.ULYSSES else seq) % chunks_of_a_sample(axis, degree) == 0


def _lines(points: Sequence[Shape]) -> list[list[Shape]]:
    """Points over the batch at each length, or all over the length where each has one batch size."""
    by_length: dict[int, list[Shape]] = {}
    for point in points:
        by_length.setdefault(point.seq, []).append(point)
    return [list(points)] if len(by_length) == len(points) else list(by_length.values())
