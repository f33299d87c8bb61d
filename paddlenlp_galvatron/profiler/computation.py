"""Measures how long the parts of a model compute, by batch, sequence length and degree; communication is left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle

from ..plan import ModelShape
from ..profiles import EMBEDDING, HEAD, ComputationProfile, Meta, PassKey, PassTimes, Shape, layer_part
from ..runtime.family import Family
from ..runtime.gradients import clip_gradients, global_norm
from .part import Part
from .stopwatch import Array, Stopwatch, Timing

FEW, MANY = 1, 3  # layers; the difference of the two leaves out what does not belong to a layer


class ComputationProfiler:
    """Measures one model on all ranks at once. Every rank builds one and calls `measure`."""

    def __init__(self, shape: ModelShape, family: Family, stopwatch: Stopwatch, sequence_parallel: bool):
        self._shape, self._family, self._stopwatch = shape, family, stopwatch
        self._sequence_parallel = sequence_parallel
        self._passes: dict[PassKey, PassTimes] = {}
        self._spread: dict[str, float] = {}

    def measure(
        self, points: Sequence[Shape], degrees: Sequence[int], meta: Meta, tick: Callable[[], None]
    ) -> ComputationProfile:
        """The profile over all points and degrees; `tick` is called after each of these. The same on every rank."""
        for point in points:
            for tp in degrees:
                self._measure_layer(point, tp)
                self._measure_ends(point, tp)
                tick()
        forward = {(key.part, Shape(key.batch, key.seq)): times.forward_ms for key, times in self._alone()}
        layer = layer_part(0)
        return ComputationProfile(
            "fp32",
            self._shape.hidden_size,
            self._shape.heads,
            {0: {point: forward[layer, point] / point.batch for point in points}},
            {point: (forward[EMBEDDING, point] + forward[HEAD, point]) / point.batch for point in points},
            self._passes,
            self._optimizer_ms_per_million(points[0]),
            meta=meta.model_copy(update={"spread": self._spread}),
        )

    def _alone(self) -> list[tuple[PassKey, PassTimes]]:
        return [(key, times) for key, times in self._passes.items() if key.tp == 1]

    def _part(self, point: Shape, tp: int, **what: Any) -> Part:
        sequence_parallel = self._sequence_parallel
        settings: dict[str, Any] = {
            "samples": point.batch,
            "seq_length": point.seq,
            "tp": tp,
            "sequence_parallel": sequence_parallel,
        }
        return Part(self._shape, self._family, **settings, **what)

    def _measure_layer(self, point: Shape, tp: int) -> None:
        few, many = self._part(point, tp, layers=FEW), self._part(point, tp, layers=MANY)
        again = self._part(point, tp, layers=FEW, recompute=True)
        steps = [step for part in (few, many, again) for step in (part.forward, part.backward)]
        few_f, few_b, many_f, many_b, _, again_b = self._stopwatch.apart(*steps).T
        forward, backward = _of_one(few_f, many_f), _of_one(few_b, many_b)
        recompute = max(0.0, float(np.median(again_b - few_b)) / FEW)
        self._record(PassKey(layer_part(0), *point, tp), forward, backward, recompute)

    def _measure_ends(self, point: Shape, tp: int) -> None:
        for part, what in ((EMBEDDING, {"embedding": True}), (HEAD, {"head": True})):
            measured = self._part(point, tp, **what)
            forward, backward = self._stopwatch.apart(measured.forward, measured.backward).T
            self._record(PassKey(part, *point, tp), Timing.of(forward), Timing.of(backward), None)

    def _record(self, key: PassKey, forward: Timing, backward: Timing, recompute_ms: float | None) -> None:
        self._passes[key] = PassTimes(forward.ms, backward.ms, recompute_ms)
        name = f"{key.part}_bsz{key.batch}_seq{key.seq}_tp{key.tp}"
        self._spread |= {f"{name}.forward": forward.spread, f"{name}.backward": backward.spread}

    def _optimizer_ms_per_million(self, point: Shape) -> float:
        """Clipping and AdamW's update."""
        part = self._part(point, 1, layers=MANY)
        part.forward()
        part.backward()
        trainables = part.trainables
        optimizer = paddle.optimizer.AdamW(parameters=[trainable.tensor for trainable in trainables])

        def update() -> None:
            norm = global_norm(trainables, None)
            clip_gradients(trainables, norm, norm / 2)
            optimizer.step()

        ms = Timing.of(self._stopwatch.apart(update)[:, 0]).ms
        return ms / (part.weights / 1e6)


def _of_one(few: Array, many: Array) -> Timing:
    """Time of one layer from laps of few and of many."""
    timing = Timing.of((many - few) / (MANY - FEW))
    return timing if timing.ms > 0 else Timing.of(many / MANY)  # noise swallows the difference
