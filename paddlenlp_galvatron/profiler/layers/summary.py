"""From the journal of a model's times to its file: what the turns say together, their spread, how well it fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ...plan import ModelShape, Precision, Recompute
from ...plan.mesh import Axis
from ...profiles import (
    EMBEDDING,
    HEAD,
    NOTHING,
    ComputationProfile,
    Meta,
    PassKey,
    PassTimes,
    SeamKey,
    SeamTimes,
    Shape,
    layer_part,
)
from ..journal import Journal
from ..refine import falling, misses
from ..stopwatch import WIDE, Timing

OPTIMIZER, LAUNCH = "optimizer", "launch"


class PassPoint(NamedTuple):
    """One measurement, as it stands in the journal."""

    key: PassKey
    turn: int  # which of the repetitions at different times

    @property
    def name(self) -> str:
        return " ".join(map(str, ["time", *self.key, self.turn]))

    @classmethod
    def from_name(cls, name: str) -> PassPoint:
        _, part, *numbers = name.split()
        batch, seq, tp, turn = map(int, numbers)
        return cls(PassKey(part, batch, seq, tp), turn)


class SharePoint(NamedTuple):
    """Where it is measured what recomputing a layer's parts takes, as it stands in the journal."""

    part: str
    seq: int
    tp: int

    @classmethod
    def of(cls, key: PassKey) -> SharePoint:
        return cls(key.part, key.seq, key.tp)

    @property
    def name(self) -> str:
        return " ".join(map(str, ["shares", *self]))


class SeamPoint(NamedTuple):
    """One measurement of a layer that ranks share beside one that they don't, as it stands in the journal."""

    key: SeamKey
    turn: int

    @property
    def name(self) -> str:
        return " ".join(map(str, ["seams", *self.key, self.turn]))

    @classmethod
    def from_name(cls, name: str) -> SeamPoint:
        _, part, batch, seq, axis, turn = name.split()
        return cls(SeamKey(part, int(batch), int(seq), Axis(axis)), int(turn))


class SeamTurn(NamedTuple):
    """By how many ms each lap took longer than that of as many tokens of an unshared layer."""

    forward: Sequence[float]
    backward: Sequence[float]


class PassTurn(NamedTuple):
    """What one measurement finds: ms of each lap, alike in number, and of computing again."""

    forward: Sequence[float]
    backward: Sequence[float]
    recompute_ms: float | None


class PassTimings(NamedTuple):
    """Times of one part at one point."""

    forward: Timing
    backward: Timing
    recompute_ms: float | None

    @classmethod
    def of_turns(cls, turns: Sequence[PassTurn]) -> PassTimings:
        """Of measurements of the same at different times."""
        again = [[turn.recompute_ms] for turn in turns if turn.recompute_ms]
        return cls(
            Timing.of_turns([turn.forward for turn in turns]),
            Timing.of_turns([turn.backward for turn in turns]),
            Timing.of_turns(again).ms if again else turns[0].recompute_ms,
        )

    @property
    def whole(self) -> Timing:
        """Forward and backward together."""
        return Timing(self.forward.ms + self.backward.ms, max(self.forward.spread, self.backward.spread))


def line_of(key: PassKey, by_batch: bool) -> tuple[str, int, int]:
    """What stays along a line of points: over the batch, or over the sequence length."""
    return key.part, key.tp, key.seq if by_batch else key.batch


def measured(journal: Journal) -> dict[PassKey, PassTimings]:
    """Every point that the journal knows."""
    return {key: PassTimings.of_turns(turns) for key, turns in _turns(journal).items()}


def doubtful(journal: Journal) -> set[PassKey]:
    """Points whose time spreads too widely or cannot be."""
    known = measured(journal)
    return {key for key, found in known.items() if found.whole.spread > WIDE} | set(_falling(known))


def measured_seams(journal: Journal) -> dict[SeamKey, SeamTimes]:
    """The medians over all laps of all turns. Noise may make them negative, which says nothing."""
    laps: dict[SeamKey, list[SeamTurn]] = {}
    for name, value in journal.items("seams "):
        laps.setdefault(SeamPoint.from_name(name).key, []).append(SeamTurn(*value))
    return {
        key: SeamTimes(*(max(float(np.median(np.concatenate(of))), 0.0) for of in zip(*turns, strict=True)))
        for key, turns in laps.items()
    }


def _turns(journal: Journal) -> dict[PassKey, list[PassTurn]]:
    turns: dict[PassKey, list[PassTurn]] = {}
    for name, value in journal.items("time "):
        turns.setdefault(PassPoint.from_name(name).key, []).append(PassTurn(*value))
    return turns


def _falling(known: Mapping[PassKey, PassTimings]) -> dict[PassKey, float]:
    """Points that take less time than a smaller batch at the same length, with that time in ms."""
    result = {}
    for line in {line_of(key, by_batch=True) for key in known}:
        keys = {float(key.batch): key for key in known if line_of(key, by_batch=True) == line}
        for batch, longer_ms in falling({batch: known[key].whole for batch, key in keys.items()}).items():
            result[keys[batch]] = longer_ms
    return result


def fit_errors(known: Mapping[PassKey, PassTimings]) -> dict[str, float]:
    """Median relative error of predicting each point from the others, over batches and over time a token by lengths."""
    errors: dict[str, list[float]] = {}
    for by_batch in (True, False):
        for line in sorted({line_of(key, by_batch) for key in known}):
            keys = [key for key in known if line_of(key, by_batch) == line]
            points = {
                float(key.batch if by_batch else key.seq): known[key].whole.ms / (1 if by_batch else key.seq)
                for key in keys
            }
            errors.setdefault("batch" if by_batch else "sequence", []).extend(misses(points).values())
    return {name: float(np.median(found)) for name, found in errors.items() if found}


def _times(found: PassTimings) -> PassTimes:
    return PassTimes(found.forward.ms, found.backward.ms, found.recompute_ms)


def computation_profile(
    journal: Journal, shapes: Sequence[ModelShape], precision: Precision, meta: Meta
) -> ComputationProfile:
    """The profile of all that the journal knows."""
    known = measured(journal)
    alone = {(key.part, Shape(key.batch, key.seq)): found.forward.ms for key, found in known.items() if key.tp == 1}
    spread: dict[str, float] = {}
    flags: dict[str, str] = {}
    fallen = _falling(known)
    for key, found in known.items():
        name = f"{key.part}_bsz{key.batch}_seq{key.seq}_tp{key.tp}"
        spread |= {f"{name}.forward": found.forward.spread, f"{name}.backward": found.backward.spread}
        if longer_ms := fallen.get(key):
            flags[name] = f"{found.whole.ms:.3g} ms, but a smaller batch takes {longer_ms:.3g} ms"
    shares = {
        name: {Recompute.of(words): share for words, share in found.items()} for name, found in journal.items("shares ")
    }
    launch = [PassTurn(*value) for _, value in journal.items(LAUNCH)]
    [optimizer_ms] = [ms for _, ms in journal.items(OPTIMIZER)] or [0.0]
    told = meta.model_dump() | {"spread": spread, "flags": flags, "fit_error": fit_errors(known)}
    return ComputationProfile(
        precision.value,
        shapes[0].hidden_size,
        shapes[0].heads,
        {
            number: {point: ms / point.batch for (part, point), ms in alone.items() if part == layer_part(number)}
            for number in range(len(shapes))
        },
        {
            point: (ms + alone[HEAD, point]) / point.batch
            for (part, point), ms in alone.items()
            if part == EMBEDDING and (HEAD, point) in alone
        },
        {key: replace(_times(found), shares=shares.get(SharePoint.of(key).name, {})) for key, found in known.items()},
        measured_seams(journal),
        _times(PassTimings.of_turns(launch)) if launch else NOTHING,
        optimizer_ms,
        meta=Meta.model_validate(told),
    )
