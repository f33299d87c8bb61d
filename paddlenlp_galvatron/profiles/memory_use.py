"""Memory of the model's parts for any degree and sequence length, from measured points."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from itertools import accumulate
from typing import TypeVar

from ..base import UserError, once
from ..model import Recompute
from ..model.layer import apart
from .curves import Curve
from .memory import LayerMemory, MemoryProfile, Role, Variant, VocabMemory, VocabVariant


class MemoryMode(StrEnum):
    """Interpolation between measured points (Galvatron's memory_profile_mode)."""

    STATIC = "static"  # this sequence length
    SEQUENCE = "sequence"  # other lengths: a line in the sequence length


class MemoryUse:
    """Memory of layers and vocabulary layers of one model, MiB on one rank.

    Over the degree t all sizes are a line in 1/t: split parts fall with t, replicated parts are constant.
    """

    def __init__(self, profile: MemoryProfile, mode: MemoryMode = MemoryMode.STATIC):
        self.profile = profile
        self.mode = mode

    def parameter_mib(self, layer_type: int) -> float:
        """All weights of one layer at 4 bytes each."""
        for sequence_parallel in (True, False):
            lengths = self.profile.layers.get(Variant(layer_type, sequence_parallel))
            if lengths:
                return lengths[min(lengths)].parameter_mib
        raise _missing_layer(layer_type)

    def vocab_states_measured(self) -> dict[str, float]:
        """Role of the stage -> the vocabulary layers' weights at 16 bytes each, if degree 1 was measured."""
        return {
            role: lengths[max(lengths)].states_mib[1]
            for (role, _), lengths in self.profile.vocab.items()
            if 1 in lengths[max(lengths)].states_mib
        }

    def without_megatron_sp(self) -> list[str]:
        """Keys of the layer types that were measured only without Megatron-SP."""
        measured = self.profile.layers
        return [f"layertype_{t}" for t, sp in sorted(measured) if not sp and Variant(t, True) not in measured]

    def activation_mib(self, layer_type: int, tp: int, seq: int, sequence_parallel: bool) -> float:
        """MiB kept for backward by one layer, per sample of the tp group."""
        lengths, split = self._layer(layer_type, sequence_parallel)
        name = f"layertype_{layer_type}.tp_activation_per_bsz_dict"
        return self._over_lengths(name, lengths, seq, lambda m: _at_degree(name, m.activation_mib, tp, split))

    def working_mib(self, layer_type: int, tp: int, seq: int, sequence_parallel: bool, samples: float) -> float:
        """Workspace of a layer's backward beyond saved activations, for `samples`; 0 where not measured."""
        lengths, _ = self._layer(layer_type, sequence_parallel)
        measured = {length: memory for length, memory in lengths.items() if memory.working_mib}
        if not measured:
            return 0.0
        name = f"layertype_{layer_type}.working_mib"

        def mib(memory: LayerMemory) -> float:
            constant = _at_degree(name, memory.working_constant_mib or {1: 0.0}, tp, split=True)
            return constant + samples * _at_degree(name, memory.working_mib, tp, split=True)

        return self._over_lengths(name, measured, seq, mib)

    def checkpoint_mib(self, layer_type: int, seq: int) -> float:
        """MiB kept by one layer with recompute, per sample, all tokens."""
        for sequence_parallel in (True, False):
            lengths = self.profile.layers.get(Variant(layer_type, sequence_parallel), {})
            measured = {length: m.checkpoint_mib for length, m in lengths.items() if m.checkpoint_mib is not None}
            if measured:
                return self._over_lengths(f"layertype_{layer_type}.checkpoint", measured, seq, lambda mib: mib)
        raise UserError(
            f"layertype_{layer_type}: the memory profile has no checkpoint entry, so recompute cannot be priced; "
            "measure it with `galvatron profile memory` or search with disable_ckpt"
        )

    def recompute_saving_mib(
        self, layer_type: int, recompute: Recompute, tp: int, seq: int, sequence_parallel: bool
    ) -> float | None:
        """Part of `activation_mib` that recompute of parts frees; None: not measured."""
        saving = self._of_parts("recompute_saving_mib", layer_type, recompute, tp, seq, sequence_parallel)
        return None if saving is None else sum(saving)

    def recompute_peak_mib(
        self, layer_type: int, recompute: Recompute, tp: int, seq: int, sequence_parallel: bool
    ) -> float | None:
        """Per sample, the memory of backward beyond `working_mib` if parts are recomputed one after the other, each
        with the activations of earlier parts in memory. None: not measured."""
        peak = self._of_parts("recompute_peak_mib", layer_type, recompute, tp, seq, sequence_parallel)
        saving = self._of_parts("recompute_saving_mib", layer_type, recompute, tp, seq, sequence_parallel)
        if peak is None or saving is None:
            return None
        return max(mib + recomputed for mib, recomputed in zip(peak, accumulate(saving, initial=0.0), strict=False))

    @once
    def _of_parts(
        self, field: str, layer_type: int, recompute: Recompute, tp: int, seq: int, sequence_parallel: bool
    ) -> list[float] | None:
        """A number for each measured part; None: it is missing for one."""
        lengths, _ = self._layer(layer_type, sequence_parallel)
        parts_mib = [
            {length: mib for length, memory in lengths.items() if (mib := getattr(memory, field).get(parts))}
            for parts in apart(recompute)
        ]
        if not all(parts_mib):
            return None
        name = f"layertype_{layer_type}.{field.replace('_mib', '')}_{recompute.words}_mib"
        return [
            self._over_lengths(name, mib, seq, lambda by_degree: _at_degree(name, by_degree, tp, split=True))
            for mib in parts_mib
        ]

    def mask_mib(self, seq: int) -> float:
        """The attention mask that a stage keeps, a square in the sequence length; 0 where none was measured."""
        measured = self.profile.mask_mib
        nearest = min(measured, key=lambda length: abs(length - seq), default=0)
        return measured[nearest] * (seq / nearest) ** 2 if nearest else 0.0

    def vocab_states_mib(self, role: Role, tp: int) -> float:
        """Weights of the vocabulary layers on one rank at 16 bytes each."""
        lengths = self._vocab(role, True)
        return _at_degree("model_states", lengths[max(lengths)].states_mib, tp, split=True)

    def vocab_activation_mib(
        self, role: Role, tp: int, seq: int, sequence_parallel: bool, samples: float
    ) -> tuple[float, float]:
        """Activations of the vocabulary layers for `samples` samples of the vtp group: at the loss's peak, and kept per
        micro-batch in flight (equal if only the peak is known)."""
        lengths = self._vocab(role, sequence_parallel)
        name = f"other_memory ({role} stage).activation"

        def peak_of(memory: VocabMemory) -> float:
            constant = _at_degree(name, memory.peak_constant_mib or {1: 0.0}, tp, split=True)
            return constant + samples * _at_degree(name, memory.peak_mib or memory.activation_mib, tp, split=True)

        peak = self._over_lengths(name, lengths, seq, peak_of)
        measured = {length: memory for length, memory in lengths.items() if memory.kept_mib}
        if not measured:
            return peak, peak
        kept = samples * self._over_lengths(name, measured, seq, lambda m: _at_degree(name, m.kept_mib, tp, True))
        return peak, min(kept, peak)

    def _layer(self, layer_type: int, sequence_parallel: bool) -> tuple[Mapping[int, LayerMemory], bool]:
        """Entries with the wanted Megatron-SP, or else without; and whether one degree determines all others."""
        for sp in (sequence_parallel, not sequence_parallel):
            lengths = self.profile.layers.get(Variant(layer_type, sp))
            if lengths:
                return (lengths if sp == sequence_parallel else _unsplit(lengths)), sequence_parallel
        raise _missing_layer(layer_type)

    def _vocab(self, role: Role, sequence_parallel: bool) -> Mapping[int, VocabMemory]:
        for sp in (sequence_parallel, not sequence_parallel):
            lengths = self.profile.vocab.get(VocabVariant(role, sp))
            if lengths:
                return lengths
        raise UserError(
            f"other_memory: the memory profile does not say what the vocabulary layers take on the {role} stage; "
            "measure it with `galvatron profile memory`" + ("" if role == "only" else " or search with max_pp_deg 1")
        )

    def _over_lengths(self, name: str, lengths: Mapping[int, T], seq: int, mib: Callable[[T], float]) -> float:
        if seq in lengths:
            return mib(lengths[seq])
        if self.mode is MemoryMode.STATIC:
            seqs = ", ".join(map(str, sorted(lengths)))
            raise UserError(
                f"{name}: sequence length {seq} was not measured (the memory profile has {seqs}); measure it or "
                "search with memory_profile_mode sequence"
            )
        return Curve.through((float(length), mib(entry)) for length, entry in lengths.items())(seq)


T = TypeVar("T")


def _unsplit(lengths: Mapping[int, LayerMemory]) -> dict[int, LayerMemory]:
    """The entries at degree 1, where Megatron-SP makes no difference."""
    alone = {
        seq: LayerMemory(m.parameter_mib, {1: m.activation_mib[1]}, m.checkpoint_mib)
        for seq, m in lengths.items()
        if 1 in m.activation_mib
    }
    if not alone:
        raise UserError(
            "tp_activation_per_bsz_dict: lacks degree 1, the only one that shows what a layer keeps both with "
            "Megatron-SP and without; measure it with `galvatron profile memory`"
        )
    return alone


def _at_degree(name: str, by_degree: Mapping[int, float], degree: int, split: bool) -> float:
    """Value at a degree: measured, or on the line in 1/degree. `split`: one point gives all (everything is split)."""
    if not by_degree or (len(by_degree) == 1 and not split and degree not in by_degree):
        raise UserError(
            f"{name}: degree {degree} without Megatron-SP does not follow from degree {', '.join(map(str, by_degree))} "
            "alone; measure it with `galvatron profile memory` or search with sequence_parallel"
        )
    return Curve.at_degree(by_degree, degree)


def _missing_layer(layer_type: int) -> UserError:
    return UserError(f"layertype_{layer_type}: not in the memory profile; measure it with `galvatron profile memory`")
