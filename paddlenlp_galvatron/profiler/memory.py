"""Measures what the parts of a model keep in memory, by sequence length and degree, to the byte."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..plan import ModelShape
from ..profiles import LayerMemory, MemoryProfile, Meta, Variant, VocabMemory, VocabVariant
from ..profiles.memory import STATE_BYTES, Role
from ..runtime import device
from ..runtime.family import Family
from .part import Part

FEW, MANY = 1, 3  # layers; the difference of the two leaves out what does not belong to a layer
MIB = 2**20
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Use:
    """Memory of one micro-batch in a part, in MiB above what the part holds between micro-batches."""

    kept: float  # after forward, for backward
    working: float  # backward's peak above that
    peak: float  # of both passes


class MemoryProfiler:
    """Measures one model. One rank is enough."""

    def __init__(self, shape: ModelShape, family: Family, samples: int):
        """`samples` are those of the micro-batch that is measured."""
        self._shape, self._family, self._samples = shape, family, samples

    def measure(
        self, lengths: Sequence[int], degrees: Sequence[int], meta: Meta, tick: Callable[[], None]
    ) -> MemoryProfile:
        """The profile over all sequence lengths and degrees; `tick` is called after each pair of these."""
        layers: dict[Variant, dict[int, LayerMemory]] = {}
        vocab: dict[VocabVariant, dict[int, VocabMemory]] = {}
        gc.collect()
        gc.freeze()  # what is there stays: later collections look at the measured parts alone, and are quick
        for sequence_parallel in (True, False):
            variant = Variant(0, sequence_parallel)
            for seq in lengths:
                layers.setdefault(variant, {})[seq] = self._layer(seq, degrees, sequence_parallel)
                for role, tables in self._vocab(seq, degrees, sequence_parallel).items():
                    vocab.setdefault(VocabVariant(role, sequence_parallel), {})[seq] = tables
                tick()
        gc.unfreeze()
        return MemoryProfile("fp32", self._shape.hidden_size, self._shape.heads, layers, vocab, meta=meta)

    def _layer(self, seq: int, degrees: Sequence[int], sequence_parallel: bool) -> LayerMemory:
        def use(layers: int, tp: int, recompute: bool = False) -> Use:
            return self._use(self._part(seq, tp, sequence_parallel, layers=layers, recompute=recompute))

        few = {tp: use(FEW, tp) for tp in degrees}
        many = {tp: use(MANY, tp) for tp in degrees}
        checkpoint = use(MANY, 1, recompute=True).kept - use(FEW, 1, recompute=True).kept
        weights = self._part(seq, 1, sequence_parallel, layers=1).weights
        return LayerMemory(
            parameter_mib=FLOAT_BYTES * weights / MIB,
            activation_mib={tp: (many[tp].kept - few[tp].kept) / (MANY - FEW) / self._samples for tp in degrees},
            checkpoint_mib=checkpoint / (MANY - FEW) / self._samples,
            working_mib={tp: few[tp].working / self._samples for tp in degrees},
        )

    def _vocab(self, seq: int, degrees: Sequence[int], sequence_parallel: bool) -> dict[Role, VocabMemory]:
        """The last stage and the only one reach their peak in the loss; the first keeps its share beyond it."""
        ends: dict[Role, dict[str, bool]] = {
            "only": {"embedding": True, "head": True},
            "first": {"embedding": True},
            "last": {"head": True},
        }
        result: dict[Role, VocabMemory] = {}
        for role, what in ends.items():
            states: dict[int, float] = {}
            activation: dict[int, float] = {}
            kept: dict[int, float] = {}
            for tp in degrees:
                part = self._part(seq, tp, sequence_parallel, **what)
                use = self._use(part)
                states[tp] = STATE_BYTES * part.weights / MIB
                activation[tp] = (use.kept if role == "first" else use.peak) / self._samples
                kept[tp] = use.kept / self._samples
            result[role] = VocabMemory(states, activation, kept)
        return result

    def _part(self, seq: int, tp: int, sequence_parallel: bool, **what: Any) -> Part:
        settings: dict[str, Any] = {
            "samples": self._samples,
            "seq_length": seq,
            "tp": tp,
            "sequence_parallel": sequence_parallel,
        }
        return Part(self._shape, self._family, **settings, **what)

    def _use(self, part: Part) -> Use:
        part.forward()  # makes what stays: gradients and masks
        part.backward()
        gc.collect()  # of the part before, too: nothing may be freed while this one is measured
        start = device.allocated_mib()
        device.reset_peak()
        part.forward()
        kept, forward_peak = device.allocated_mib() - start, device.peak_mib() - start
        device.reset_peak()
        part.backward()
        backward_peak = device.peak_mib() - start
        return Use(kept, backward_peak - kept, max(forward_peak, backward_peak))
