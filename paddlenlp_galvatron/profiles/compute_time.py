"""Compute times of the model's parts for any batch, sequence length and degree, from measured points."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from ..base import UserError, once
from ..plan.mesh import Axis
from .computation import EMBEDDING, HEAD, NOTHING, CommPointTimes, ComputationProfile, PassTimes, Shape, layer_part
from .curves import Curve


class TimeMode(StrEnum):
    """Interpolation between measured points (Galvatron's time_profile_mode)."""

    STATIC = "static"  # this sequence length at one or more batch sizes; with one, time is proportional
    BATCH = "batch"  # this sequence length at two or more batch sizes: an alpha-beta line beyond them
    SEQUENCE = "sequence"  # other sequence lengths: time per token is a line in the sequence length


Value = TypeVar("Value")


class ComputeTimes:
    """Compute time of layers, embedding and head of one model."""

    def __init__(self, profile: ComputationProfile, mode: TimeMode = TimeMode.STATIC):
        self.profile = profile
        self.mode = mode
        self._passes: dict[tuple[str, int], dict[Shape, PassTimes]] = {}  # (part, tp) -> measured passes
        for key, times in profile.passes.items():
            self._passes.setdefault((key.part, key.tp), {})[Shape(key.batch, key.seq)] = times

    def layer(self, layer_type: int, samples: float, seq: int, tp: int = 1) -> PassTimes:
        """Times in ms of one layer on one of `tp` ranks that share `samples` samples of `seq` tokens.

        Unmeasured backward is twice forward (two matrix products for each of forward's). Raises UserError if there are
        too few points.
        """
        return self._part(layer_part(layer_type), samples, seq, tp)

    @once
    def points(self, layer_type: int, axis: Axis, samples: float, seq: int) -> CommPointTimes:
        """Computation of a rank at the communication points of a layer that ranks share along an axis, each with
        `samples` samples' worth of tokens: copies and calls, without messages. 0 if not measured.

        Scaled by tokens from the nearest measured length.
        """
        wanted = layer_part(layer_type), axis
        measured = [(key, ms) for key, ms in self.profile.points.items() if (key.part, key.axis) == wanted]
        if not measured:
            return CommPointTimes()
        nearest = min((key.seq for key, _ in measured), key=lambda length: abs(length - seq))
        points = [(key.batch * nearest, ms) for key, ms in measured if key.seq == nearest]
        curves = (Curve.rising((tokens, ms[which]) for tokens, ms in points) for which in (0, 1))
        return CommPointTimes(*(curve(samples * seq) for curve in curves))

    def experts(self, count: int, rows: float, degree: int) -> tuple[PassTimes, PassTimes]:
        """Times (of the device, of its host) for the `count` experts of a layer that a rank has, which together get
        `rows` rows; `degree`: ranks that split each of them. Raises UserError when no times of experts are known."""
        measured = self.profile.experts
        if not measured:
            raise UserError(
                "experts_ms: the computation profile has no times of experts; measure it again with `galvatron profile "
                "computation`"
            )

        def of(way: str) -> float:
            return Curve.at_degree({d: getattr(times, way).of(count, rows) for d, times in measured.items()}, degree)

        forward, launch = of("forward"), of("launch")
        return PassTimes(forward, of("backward"), forward), PassTimes(launch, launch, launch)

    def embedding(self, samples: float, seq: int, tp: int = 1) -> PassTimes:
        """The embedding. Zero if not measured separately: then the head includes it."""
        return self._part(EMBEDDING, samples, seq, tp)

    def head(self, samples: float, seq: int, tp: int = 1) -> PassTimes:
        """Last norm, LM head and loss; if not measured separately, all of `layertype_other`."""
        return self._part(HEAD, samples, seq, tp)

    @once
    def _part(self, module: str, samples: float, seq: int, tp: int) -> PassTimes:
        measured = {degree: points for (name, degree), points in self._passes.items() if name == module}
        fitting = [d for d, points in measured.items() if tp % d == 0 and not self._fault(module, points, seq)]
        if fitting:
            degree = max(fitting)
            return self._measured(module, degree, samples * degree / tp, seq)
        if module == EMBEDDING and not measured:
            return NOTHING
        forward = self._time(module, self._forward_points(module), samples / tp, seq)
        return PassTimes(forward, 2 * forward, forward)

    def _forward_points(self, module: str) -> dict[Shape, float]:
        """Whole times in ms of the files' plain keys (which hold times per sample)."""
        layers = {layer_part(number): times for number, times in self.profile.layer_ms.items()}
        times = self.profile.other_ms if module == HEAD else layers.get(module)
        if not times:
            missing = "layertype_other" if module == HEAD else module
            raise UserError(
                f"{missing}: no time in the computation profile; measure it with `galvatron profile computation`"
            )
        return {shape: shape.batch * ms for shape, ms in times.items()}

    def _measured(self, module: str, degree: int, samples: float, seq: int) -> PassTimes:
        passes = self._passes[module, degree]
        forward = self._time(module, {s: t.forward_ms for s, t in passes.items()}, samples, seq)
        backward = self._time(module, {s: t.backward_ms for s, t in passes.items()}, samples, seq)
        measured_ms = {s: t.recompute_ms for s, t in passes.items() if t.recompute_ms is not None}
        recompute = self._time(module, measured_ms, samples, seq) if len(measured_ms) == len(passes) else forward
        shared = [s for s, times in passes.items() if times.shares]
        nearest = min(shared, key=lambda s: (abs(s.seq - seq), abs(s.batch - samples)), default=None)
        return PassTimes(forward, backward, recompute, passes[nearest].shares if nearest else {})

    def _time(self, module: str, points: Mapping[Shape, float], samples: float, seq: int) -> float:
        """Time in ms: over the batch a curve through the points of one length, over lengths a curve of time a token."""
        fault = self._fault(module, points, seq)
        if fault:
            raise UserError(fault)
        lengths = _by_length(points)
        if seq in lengths:
            return Curve.rising(lengths[seq].items())(samples)
        per_token = {length: Curve.rising(times.items())(samples) / length for length, times in lengths.items()}
        return seq * Curve.through(per_token.items())(seq)

    def _fault(self, module: str, points: Mapping[Shape, object], seq: int) -> str | None:
        """Why the points do not determine the times at a sequence length, with the remedy; None: they do."""
        lengths = _by_length(points)
        if self.mode is TimeMode.SEQUENCE and seq not in lengths:
            wanted = 3 if module.startswith("layertype") else 2
            if len(lengths) >= wanted:
                return None
            return (
                f"{module}: time_profile_mode sequence needs {wanted} sequence lengths but the profile has "
                f"{_listed(lengths)}; measure more around {seq} with `galvatron profile computation`"
            )
        if seq not in lengths:
            return (
                f"{module}: sequence length {seq} was not measured (the profile has {_listed(lengths)}); measure it, "
                "or measure several lengths and search with time_profile_mode sequence"
            )
        if self.mode is TimeMode.BATCH and len(lengths[seq]) < 2:
            return (
                f"{module}: time_profile_mode batch needs two batch sizes or more at sequence length {seq} but the "
                f"profile has {_listed(lengths[seq])}; measure more, or search with time_profile_mode static"
            )
        return None


def _by_length(points: Mapping[Shape, Value]) -> dict[int, dict[int, Value]]:
    """Sequence length -> batch -> value."""
    lengths: dict[int, dict[int, Value]] = {}
    for (batch, length), value in points.items():
        lengths.setdefault(length, {})[batch] = value
    return lengths


def _listed(numbers: Mapping[int, object]) -> str:
    return ", ".join(map(str, sorted(numbers))) or "none"
