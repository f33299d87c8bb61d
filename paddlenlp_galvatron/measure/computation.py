"""Measures the compute times of a model's parts by batch, sequence length and degree, without communication."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import paddle
from scipy.optimize import nnls

from ..model.layer import APART
from ..plan import Assumptions, Axis, LayerStrategy, ModelShape, Precision, Recompute
from ..plan.layout import chunks_of_a_sample
from ..profiles import EMBEDDING, HEAD, NOTHING, ComputationProfile, Meta, PassKey, PassTimes, Shape, layer_part
from ..profiles.computation import CommPointKey, CommPointTimes, ExpertPass, ExpertTimes
from ..runtime.device import on_gpu
from ..runtime.gradients import global_norm, update_in_turns
from .journal import Journal
from .options import thinned
from .part import EXPERTS, LAYERS, ExpertsPart, Extent, MeasuredPart, expert_count, is_of_experts, of_one_layer
from .stopwatch import MOST_ROUNDS, ROUNDS, Stopwatch, Timing, needs_round

# Factors between the batch sizes and the sequence lengths that are measured; times in between are interpolated. For a
# model of six layers on 4 ranks, batch sizes 1 and 4 led to the plans that 1 to 4 led to.
STEPS = 4, 2
OPTIMIZER, LAUNCH, EXPERT_LAUNCH = "optimizer", "launch", "expert_launch"  # keys in the journal
# A layer that a GPU computes faster than its host launches it: all kernels, few tokens and weights.
NARROW: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "heads": 2, "kv_heads": 2, "own_head_dim": 128}
NARROW_TOKENS = 16
# Two ranks share samples: the work of each at the communication points depends on its tokens, hardly on the number of
# ranks.
SHARED = {Axis.ULYSSES: LayerStrategy(2, ulysses=True), Axis.CONTEXT: LayerStrategy(context=2)}
ENDS: dict[str, dict[str, Any]] = {EMBEDDING: {"embedding": True}, HEAD: {"head": True}}

# Numbers of experts to measure: the time of many follows from a few, so a whole layer is never built.
COUNTS = 1, 2, 4
SHARES = 16, 4, 1  # divisors of a micro-batch's tokens: from few rows per expert to many


class PassRound(NamedTuple):
    """One round of a part at one point, as in the journal."""

    forward: Sequence[float]  # ms of each sample
    backward: Sequence[float]
    recompute_ms: float | None = None  # forward repeated inside backward

    @property
    def samples(self) -> list[float]:
        """Forward plus backward."""
        return [forward + backward for forward, backward in zip(self.forward, self.backward, strict=True)]


@dataclass
class ComputationProfiler:
    """Measures one model, all ranks at once, into a journal. Every rank builds one and calls `measure`."""

    shapes: Sequence[ModelShape]  # one a layer type
    stopwatch: Stopwatch
    journal: Journal
    precision: Precision = Precision.FP32
    sequence_parallel: bool = False
    adaptive: bool = True
    flash_attention: bool = False
    turns: int | None = None  # rounds per number; None: as needed

    def measure(self, points: Sequence[Shape], degrees: Sequence[int], tick: Callable[[int], None]) -> None:
        """Measure everything that is not in the journal; `tick` gets the number of measured points times degrees."""
        lines = _lines(points)
        chosen = [point for line in lines for point in (self._thinned(line) if self.adaptive else line)]
        parts = [*map(layer_part, range(len(self.shapes))), *ENDS]
        keys = [self._key(module, point, tp) for point in chosen for tp in degrees for module in parts]
        keys = list(dict.fromkeys(keys))
        if self._mixture.experts:
            keys += expert_keys(self._mixture, min(point.batch * point.seq for point in points), degrees)
        tick(0)
        for number in range(self.turns or MOST_ROUNDS):
            journalled = rounds_of(self.journal)
            for done, key in enumerate(keys, 1):
                rounds = journalled.get(key, [])
                if len(rounds) == number and self._wants(number, [each.samples for each in rounds]):
                    self.journal.get(round_key("time", key, number), partial(self._pass_round, key))
                share = (number + done / len(keys)) / (self.turns or ROUNDS)  # usually there are no more
                tick(int(min(share, 1.0) * len(points) * len(degrees)))
        for line in lines:
            for layer_type in range(len(self.shapes)):
                key = self._key(layer_part(layer_type), line[0], 1)
                if not self.stopwatch.is_late():
                    self.journal.get(shares_key(key), partial(self._shares, key))
        if max(degrees) > 1:
            self._measure_points(lines)
        self.journal.get(OPTIMIZER, lambda: self._optimizer_ms_per_million(points[0]))
        if on_gpu():
            self.journal.get(LAUNCH, self._launch)
            for module in dict.fromkeys(key.part for key in keys if is_of_experts(key.part)):
                name = round_key(EXPERT_LAUNCH, PassKey(module, 1, NARROW_TOKENS), 0)
                self.journal.get(name, partial(self._launch, module))

    def _wants(self, number: int, rounds: Sequence[Sequence[float]]) -> bool:
        if number and self.stopwatch.is_late():
            return False
        return number == 0 or self.turns is not None or needs_round(rounds)

    def _thinned(self, line: Sequence[Shape]) -> Sequence[Shape]:
        """The points of a line to measure; the search needs three lengths."""
        varied = 0 if len({point.seq for point in line}) == 1 else 1  # index into (batch, sequence length)
        by_size = {float(point[varied]): point for point in line}
        kept = [by_size[size] for size in thinned(sorted(by_size), STEPS[varied])]
        return kept if varied == 0 or len(kept) >= 3 else line

    def _key(self, module: str, point: Shape, tp: int) -> PassKey:
        return PassKey(module, point.batch, self._shape(module).seq_length or point.seq, tp)

    def _shape(self, module: str) -> ModelShape:
        if module in ENDS:
            return self.shapes[0 if module == EMBEDDING else -1]
        return self.shapes[int(module.rpartition("_")[2])]

    @property
    def _mixture(self) -> ModelShape:
        """The kind of layer with experts; None: no experts."""
        return mixture_of(self.shapes)

    def _part(self, key: PassKey, strategy: LayerStrategy | None = None, **extent: Any) -> MeasuredPart:
        flash = self.flash_attention
        assumed = Assumptions(self.sequence_parallel, self.precision, seq_length=key.seq, flash_attention=flash)
        shared = strategy or LayerStrategy(key.tp)
        return MeasuredPart(self._shape(key.part), assumed, key.batch, Extent(**extent), shared)

    def _time(self, parts: Sequence[MeasuredPart | ExpertsPart]) -> Any:
        """Times in ms of forward and backward of each part in turn, [2 · parts, samples]."""
        return self.stopwatch.time_independent(*(run for each in parts for run in (each.forward, each.backward))).T

    def _pass_round(self, key: PassKey) -> PassRound:
        if key.part in ENDS:
            return PassRound(*self._time([self._part(key, **ENDS[key.part])]).tolist())
        if is_of_experts(key.part):
            return PassRound(*self._time([ExpertsPart(self._mixture, key, self.precision)]).tolist())
        few, many = LAYERS
        recomputed = self._part(key, layers=few, strategy=LayerStrategy(key.tp, recompute=Recompute.FULL))
        parts = [self._part(key, layers=few), self._part(key, layers=many), recomputed]
        few_f, few_b, many_f, many_b, _, again_b = self._time(parts)
        recompute_ms = max(0.0, float(np.median(again_b - few_b)) / few)
        return PassRound(of_one_layer(few_f, many_f).tolist(), of_one_layer(few_b, many_b).tolist(), recompute_ms)

    def _launch(self, module: str = layer_part()) -> PassRound:
        """The host's time to launch a layer of the most frequent kind, or experts."""
        most_layers = max(self.shapes, key=lambda shape: shape.layers)
        shape, most = self._mixture if is_of_experts(module) else most_layers, NARROW["intermediate_size"]
        sizes = {name: min(getattr(shape, name), most) for name in ("expert_size", "shared_size")}
        narrow = replace(self, shapes=[replace(shape, **NARROW, **sizes)])
        return narrow._pass_round(PassKey(module, 1, NARROW_TOKENS))

    def _shares(self, key: PassKey) -> dict[str, float]:
        how = (Recompute.NONE, Recompute.FULL, *APART)
        times = self._time([self._part(key, layers=1, strategy=LayerStrategy(key.tp, recompute=each)) for each in how])
        plain, full, *others = times[1::2]  # backward
        most = float(np.median(full - plain))
        if most <= 0:  # below the noise: the model's arithmetic is used instead
            return {}
        ms = [float(np.median(each - plain)) for each in others]
        return {each.words: min(max(time / most, 0.0), 1.0) for each, time in zip(APART, ms, strict=True)}

    def _measure_points(self, lines: Sequence[Sequence[Shape]]) -> None:
        """Times are proportional to the tokens, so one batch at each length is enough."""
        least = [line[0] for line in lines]
        for key in dict.fromkeys(
            self._key(layer_part(n), point, 1) for n in range(len(self.shapes)) for point in least
        ):
            for axis, shared in SHARED.items():
                for number in range(self.turns or ROUNDS):
                    if not self.stopwatch.is_late() and _can_share(self._shape(key.part), key.seq, axis):
                        point = CommPointKey(key.part, key.batch, key.seq, axis)
                        self.journal.get(round_key("comm_points", point, number), partial(self._points, key, shared))

    def _points(self, key: PassKey, shared: LayerStrategy) -> PassRound:
        """How much longer a shared layer takes than an unshared one of as many tokens, sample by sample."""
        times = self._time(
            [
                self._part(key_of, layers=layers, strategy=strategy)
                for strategy, key_of in ((LayerStrategy(), key), (shared, key._replace(batch=shared.ranks * key.batch)))
                for layers in LAYERS
            ]
        )
        alone_f, alone_b, shared_f, shared_b = (of_one_layer(times[first], times[first + 2]) for first in (0, 1, 4, 5))
        return PassRound((shared_f - alone_f).tolist(), (shared_b - alone_b).tolist())

    def _optimizer_ms_per_million(self, point: Shape) -> float:
        """Clipping and AdamW's update."""
        layer = self._part(self._key(layer_part(), point, 1), layers=LAYERS[1])
        optimizer = paddle.optimizer.AdamW(parameters=[trainable.tensor for trainable in layer.trainables])

        def update() -> None:
            global_norm(layer.trainables, None)
            update_in_turns(optimizer, layer.trainables, factor=0.5)

        times = self.stopwatch.time_independent(layer.forward, layer.backward, update)  # an update consumes gradients
        return Timing.of_samples(times[:, 2]).ms / (layer.weights / 1e6)


def _can_share(shape: ModelShape, seq: int, axis: Axis) -> bool:
    degree = SHARED[axis].ranks
    return (shape.heads if axis is Axis.ULYSSES else seq) % chunks_of_a_sample(axis, degree) == 0


def _lines(points: Sequence[Shape]) -> list[list[Shape]]:
    """Points over the batch at each length, or all over the length where each has one batch size."""
    by_length: dict[int, list[Shape]] = {}
    for point in points:
        by_length.setdefault(point.seq, []).append(point)
    return [list(points)] if len(by_length) == len(points) else list(by_length.values())


def round_key(kind: str, key: PassKey | CommPointKey, number: int) -> str:
    """Key of a round in the journal."""
    return " ".join(map(str, [kind, *key, number]))


def shares_key(key: PassKey) -> str:
    return f"shares {key.part} {key.seq}"


def rounds_of(journal: Journal, kind: str = "time") -> dict[PassKey, list[PassRound]]:
    """Every part and point in the journal."""
    return {
        PassKey(module, *map(int, numbers)): [PassRound(*each) for each in rounds]
        for (module, *numbers), rounds in journal.rounds(kind).items()
    }


def _points_of(journal: Journal) -> dict[CommPointKey, CommPointTimes]:
    """Differences of times; noise may make them negative, which counts as 0."""
    points = {}
    for (module, batch, seq, axis), rounds in journal.rounds("comm_points").items():
        forward, backward = (np.concatenate([PassRound(*each)[which] for each in rounds]) for which in (0, 1))
        times = (max(float(np.median(samples)), 0.0) for samples in (forward, backward))
        points[CommPointKey(module, int(batch), int(seq), Axis(axis))] = CommPointTimes(*times)
    return points


def _times(rounds: Sequence[PassRound]) -> PassTimes:
    forward, backward = (
        Timing.of_rounds(each).ms for each in ([item.forward for item in rounds], [item.backward for item in rounds])
    )
    recompute = [each.recompute_ms for each in rounds if each.recompute_ms]
    return PassTimes(forward, backward, Timing.of_samples(recompute).ms if recompute else rounds[0].recompute_ms)


def computation_profile(
    journal: Journal, shapes: Sequence[ModelShape], precision: Precision, meta: Meta
) -> ComputationProfile:
    """The profile from the whole journal."""
    journalled = rounds_of(journal)
    times = {key: _times(rounds) for key, rounds in journalled.items()}
    passes = {key: ms for key, ms in times.items() if not is_of_experts(key.part)}
    experts = {key: ms for key, ms in times.items() if is_of_experts(key.part)}
    shares = {
        name: {Recompute.of(words): share for words, share in by_words.items()}
        for name, by_words in journal.items("shares ")
    }
    alone = {(key.part, Shape(key.batch, key.seq)): times.forward_ms for key, times in passes.items() if key.tp == 1}
    spread = {
        f"{key.part}_bsz{key.batch}_seq{key.seq}_tp{key.tp}": Timing.of_rounds([each.samples for each in rounds]).spread
        for key, rounds in journalled.items()
    }
    launch = [PassRound(*value) for _, value in journal.items(LAUNCH)]
    launched = {key: _times(rounds) for key, rounds in rounds_of(journal, EXPERT_LAUNCH).items()}
    [optimizer_ms] = [ms for _, ms in journal.items(OPTIMIZER)] or [0.0]
    return ComputationProfile(
        precision.value,
        shapes[0].hidden_size,
        shapes[0].heads,
        {
            number: {point: ms / point.batch for (module, point), ms in alone.items() if module == layer_part(number)}
            for number in range(len(shapes))
        },
        {
            point: (ms + alone[HEAD, point]) / point.batch
            for (module, point), ms in alone.items()
            if module == EMBEDDING and (HEAD, point) in alone
        },
        {key: replace(ms, shares=shares.get(shares_key(key), {})) for key, ms in passes.items()},
        _points_of(journal),
        _times(launch) if launch else NOTHING,
        optimizer_ms,
        meta=meta.model_copy(update={"spread": spread}),
        experts=expert_times(experts, launched, mixture_of(shapes).experts_per_token),
    )


def mixture_of(shapes: Sequence[ModelShape]) -> ModelShape:
    """The kind of layer that has experts; the first one where none has."""
    return next((shape for shape in shapes if shape.experts), shapes[0])


def expert_keys(shape: ModelShape, tokens: int, degrees: Sequence[int]) -> list[PassKey]:
    """Points at which to measure a layer's experts: a few experts, with one sample per length. The smallest and the
    largest tensor-parallel degree are enough, as the time of a split part falls with the degree."""
    splits = [degree for degree in degrees if shape.expert_size % degree == 0]
    return [
        PassKey(f"{EXPERTS}{count}", 1, length, degree)
        for degree in dict.fromkeys((splits[0], splits[-1]))
        for count in COUNTS
        for length in dict.fromkeys(max(tokens // share, 1) for share in SHARES)
        if count <= shape.experts
    ]


def expert_times(
    measured: Mapping[PassKey, PassTimes], launched: Mapping[PassKey, PassTimes], per_token: int
) -> dict[int, ExpertTimes]:
    """Times by the number of ranks that split each expert, from the measured times. `launched`: host time, for any
    rows. `per_token`: experts (rows) per token."""
    launch = fitted([(expert_count(key.part), 0, (ms.forward_ms + ms.backward_ms) / 2) for key, ms in launched.items()])

    def of(degree: int) -> ExpertTimes:
        points = [
            (expert_count(key.part), key.batch * key.seq * per_token, ms.forward_ms, ms.backward_ms)
            for key, ms in measured.items()
            if key.tp == degree
        ]
        forward = fitted([(count, rows, ms) for count, rows, ms, _ in points])
        return ExpertTimes(forward, fitted([(count, rows, ms) for count, rows, _, ms in points]), launch)

    return {degree: of(degree) for degree in sorted({key.tp for key in measured})}


def fitted(points: Sequence[tuple[int, int, float]]) -> ExpertPass:
    """Nonnegative times of a pass that minimize squared relative errors at points (experts, rows, ms)."""
    if not points:
        return ExpertPass()
    experts, rows, ms = np.array(points, float).T
    coefficients, _ = nnls(np.stack([np.ones(len(ms)), experts, rows], axis=1) / ms[:, None], np.ones(len(ms)))
    return ExpertPass(*coefficients.tolist())
