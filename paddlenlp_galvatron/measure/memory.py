"""Measures the memory of a model's parts, by sequence length and degree, to the byte."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..base.units import FP32_BYTES, MIB
from ..model.layer import APART
from ..plan import Assumptions, LayerStrategy, ModelShape, Precision, Recompute
from ..profiles import LayerMemory, MemoryProfile, Meta, Variant, VocabMemory, VocabVariant
from ..profiles.memory import STATE_BYTES, Role
from ..runtime import device
from .journal import Journal, Used, note_used, used_of
from .part import LAYERS, Extent, MeasuredPart

STAGES: dict[Role, dict[str, Any]] = {
    "only": {"embedding": True, "head": True},
    "first": {"embedding": True},
    "last": {"head": True},
}


class Use(NamedTuple):
    """Memory of one micro-batch in a part, in MiB above the part's memory between micro-batches."""

    kept: float  # kept from forward for backward
    working: float  # backward's peak above `kept`
    peak: float  # peak of both passes
    weights: int  # elements of the part's weights
    mask: float = 0.0  # once per stage, for all its layers
    reserved: float = 1.0  # the allocator's peak / the tensors' peak, of backward
    forward: float = 0.0  # forward's peak


@dataclass
class MemoryProfiler:
    """Measures one model into a journal. One rank is enough."""

    shapes: Sequence[ModelShape]  # one a layer type
    journal: Journal
    samples: int  # samples of the measured micro-batch
    precision: Precision = Precision.FP32
    flash_attention: bool = False
    used: Used = field(default_factory=Used)

    def measure(
        self, lengths: Sequence[int], degrees: Sequence[int], meta: Meta, tick: Callable[[int], None]
    ) -> MemoryProfile:
        """The profile over all sequence lengths and degrees; `tick` gets the number of finished runs, two a length."""
        layers: dict[Variant, dict[int, LayerMemory]] = {}
        vocab: dict[VocabVariant, dict[int, VocabMemory]] = {}
        gc.collect()
        gc.freeze()  # later collections look at the measured parts alone, which is quick
        masks: dict[int, float] = {}
        done = 0
        for sequence_parallel in (True, False):
            for seq in lengths:
                for number, shape in enumerate(self.shapes):
                    length = shape.seq_length or seq
                    masks[length] = self._use(number, length, 1, sequence_parallel, layers=LAYERS[0]).mask
                    table = layers.setdefault(Variant(number, sequence_parallel), {})
                    table[length] = self._layer(number, length, degrees, sequence_parallel)
                for role in STAGES:
                    tables = vocab.setdefault(VocabVariant(role, sequence_parallel), {})
                    length = self.shapes[0 if role == "first" else -1].seq_length or seq
                    tables[length] = self._vocab(role, seq, degrees, sequence_parallel)
                done += 1
                tick(done)
        gc.unfreeze()
        first = self.shapes[0]
        reserved = max(Use(*use).reserved for _, use in self.journal.items("memory "))
        note_used(self.journal, "workspaces_mib", self.used.more_mib())
        used = used_of(self.journal)
        meta = meta.with_extra({"reserved": "allocator's peak / tensors' peak"}, reserved=reserved, **used)
        return MemoryProfile(self.precision.value, first.hidden_size, first.heads, layers, vocab, masks, meta=meta)

    def _layer(self, number: int, seq: int, degrees: Sequence[int], sequence_parallel: bool) -> LayerMemory:
        few, many = LAYERS

        def use(layers: int, tp: int, recompute: Recompute = Recompute.NONE) -> Use:
            return self._use(number, seq, tp, sequence_parallel, layers=layers, recompute=recompute)

        def of_one(tp: int, recompute: Recompute = Recompute.NONE) -> float:
            return (use(many, tp, recompute).kept - use(few, tp, recompute).kept) / (many - few) / self.samples

        def saving(parts: Recompute) -> dict[int, float]:
            return {tp: (use(few, tp).kept - use(few, tp, parts).kept) / few / self.samples for tp in degrees}

        def peak(parts: Recompute) -> dict[int, float]:
            more = {tp: use(few, tp, parts).working - use(few, tp).working for tp in degrees}
            return {tp: max(mib, 0.0) / self.samples for tp, mib in more.items()}

        def working(tp: int) -> tuple[float, float]:
            return self._line(lambda count: self._use(number, seq, tp, sequence_parallel, count, layers=few).working)

        weights = (use(many, 1).weights - use(few, 1).weights) / (many - few)
        return LayerMemory(
            parameter_mib=FP32_BYTES * weights / MIB,
            activation_mib={tp: of_one(tp) for tp in degrees},
            checkpoint_mib=of_one(1, Recompute.FULL),
            working_mib={tp: working(tp)[1] for tp in degrees},
            working_constant_mib={tp: working(tp)[0] for tp in degrees},
            recompute_saving_mib={parts: saving(parts) for parts in APART},
            recompute_peak_mib={parts: peak(parts) for parts in APART},
        )

    def _line(self, mib: Callable[[int], float]) -> tuple[float, float]:
        """(constant, per sample) from the values for one sample and for several."""
        several = mib(self.samples)
        if self.samples == 1:
            return 0.0, several
        each = max(several - mib(1), 0.0) / (self.samples - 1)
        return several - self.samples * each, each

    def _vocab(self, role: Role, seq: int, degrees: Sequence[int], sequence_parallel: bool) -> VocabMemory:
        """The last stage and a single stage reach their peak in the loss; the first stage keeps its share afterwards.

        With layer types of several widths or lengths embedding and head differ: the only stage holds the sum of the
        first and the last.
        """
        sizes = {(shape.hidden_size, shape.seq_length) for shape in (self.shapes[0], self.shapes[-1])}
        if role == "only" and len(sizes) > 1:
            first, last = (self._vocab(end, seq, degrees, sequence_parallel) for end in ("first", "last"))
            return VocabMemory(
                {tp: first.states_mib[tp] + last.states_mib[tp] for tp in degrees},
                {tp: first.kept_mib[tp] + last.activation_mib[tp] for tp in degrees},
                {tp: first.kept_mib[tp] + last.kept_mib[tp] for tp in degrees},
                {tp: first.kept_mib[tp] + last.peak_mib[tp] for tp in degrees},
                last.peak_constant_mib,
            )
        number = 0 if role == "first" else len(self.shapes) - 1
        length = self.shapes[number].seq_length or seq

        def use_of(tp: int, samples: int) -> Use:
            return self._use(number, length, tp, sequence_parallel, samples, **STAGES[role])

        def peak(tp: int) -> tuple[float, float]:
            """(constant, per sample) that is at least the peak of few samples, the weights' gradient, and that of many,
            which grows like forward's."""
            if role == "first":
                return self._line(lambda samples: use_of(tp, samples).kept)
            single, several = use_of(tp, 1), use_of(tp, self.samples)
            _, between = self._line(lambda samples: use_of(tp, samples).peak)
            each = max(between, several.forward / self.samples)
            return max(single.peak - each, several.peak - self.samples * each), each

        uses = {tp: use_of(tp, self.samples) for tp in degrees}
        peaks = {tp: peak(tp) for tp in degrees}
        return VocabMemory(
            {tp: STATE_BYTES * use.weights / MIB for tp, use in uses.items()},
            {tp: (use.kept if role == "first" else use.peak) / self.samples for tp, use in uses.items()},
            {tp: use.kept / self.samples for tp, use in uses.items()},
            {tp: each for tp, (_, each) in peaks.items()},
            {tp: constant for tp, (constant, _) in peaks.items()},
        )

    def _use(
        self,
        number: int,
        seq: int,
        tp: int,
        sequence_parallel: bool,
        samples: int | None = None,
        recompute: Recompute = Recompute.NONE,
        **extent: Any,
    ) -> Use:
        samples = samples or self.samples
        settings = {"samples": samples, "seq_length": seq, "sequence_parallel": sequence_parallel} | extent
        facts = {name: int(value) for name, value in settings.items()} | {"tp": tp, "recompute": recompute.value}
        flash, strategy = self.flash_attention, LayerStrategy(tp, recompute=recompute)
        assumed = Assumptions(sequence_parallel, self.precision, seq_length=seq, flash_attention=flash)
        key = f"memory {number} " + " ".join(f"{name}={value}" for name, value in facts.items())

        def measure() -> Use:
            return _measure(MeasuredPart(self.shapes[number], assumed, samples, Extent(**extent), strategy))

        return Use(*self.journal.get(key, measure))


def _measure(module: MeasuredPart) -> Use:
    module.forward()  # makes gradients and masks, which stay
    module.backward()
    gc.collect()  # frees the previous module now, not during the measurement
    device.release()
    start = device.allocated_mib()
    device.reset_peak()
    module.forward()
    kept, forward_peak = device.allocated_mib() - start, device.peak_mib() - start
    device.reset_peak()
    module.backward()
    backward_peak, reserved = device.peak_mib() - start, device.reserved_peak_mib() / device.peak_mib()
    peak = max(forward_peak, backward_peak)
    return Use(kept, backward_peak - kept, peak, module.weights, module.mask_mib, reserved, forward_peak)
