"""Profile of the model's memory: one file in, one file out, both dialects' units made one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..base.errors import UserError
from .files import (
    Dialect,
    Meta,
    ProfileFile,
    field_of,
    memory_name,
    not_negative,
    objects,
    positive,
    read_profile,
    unknown_key,
    whole_number,
    write_profile,
)

Role = Literal["only", "first", "last"]  # of the stage: the only one, the first of several, the last of several
ROLE_KEYS: dict[Role, str] = {
    "only": "other_memory_pp_off",
    "first": "other_memory_pp_on_first",
    "last": "other_memory_pp_on_last",
}
STATE_BYTES = 16  # model states that Galvatron counts per parameter: weight, gradient, two moments, four bytes each
# What one parameter takes in `parameter_size` and in `model_states` of each dialect, in bytes.
PARAMETER_BYTES: dict[Dialect, int] = {"galvatron": 4, "paddlenlp": 2}
MODEL_STATE_BYTES: dict[Dialect, int] = {"galvatron": STATE_BYTES, "paddlenlp": 18}


class Variant(NamedTuple):
    """One of the model's layer types, measured with or without Megatron-SP."""

    layer_type: int
    sequence_parallel: bool


class VocabVariant(NamedTuple):
    """Embedding and LM head on a kind of stage, measured with or without Megatron-SP."""

    role: Role
    sequence_parallel: bool


@dataclass(frozen=True)
class LayerMemory:
    """Memory of one layer at one sequence length, in MiB."""

    parameter_mib: float  # all weights of the layer at 4 bytes each
    activation_mib: Mapping[int, float]  # tp degree -> kept for backward, per sample, on one rank
    checkpoint_mib: float | None = None  # kept with recompute, per sample, tp 1
    working_mib: Mapping[int, float] = field(default_factory=dict)  # tp -> backward's own peak above that, per sample


@dataclass(frozen=True)
class VocabMemory:
    """Memory of the vocabulary layers at one sequence length, in MiB."""

    states_mib: Mapping[int, float]  # tp degree -> weights of one rank at 16 bytes each
    activation_mib: Mapping[int, float]  # tp degree -> per sample, on one rank, peak of the loss included
    kept_mib: Mapping[int, float] = field(default_factory=dict)  # tp degree -> kept for backward alone, per sample


_RAW: dict[Dialect, re.Pattern[str]] = {
    "galvatron": re.compile(r"\d+_\d+_\d+(_vtp)?(_c)?(_sp)?"),
    "paddlenlp": re.compile(r"\d+_\d+_\d+_(True|False)"),
}
_LAYER = re.compile(r"layertype_(\d+)(_sp)?")
_VOCAB = re.compile(r"(other_memory_pp_(?:off|on_first|on_last))(_sp)?")
UNITS = {
    "parameter_size": "MiB of all weights at 4 bytes each",
    "tp_activation_per_bsz_dict": "MiB per sample",
    "model_states": "MiB of a rank's weights at 16 bytes each",
    "activation": "MiB per sample",
}


@dataclass(frozen=True)
class MemoryProfile:
    """Measured memory of one model in one dtype, in Galvatron's units whatever the file's."""

    dtype: str  # fp32, bf16, fp16
    hidden_size: int
    heads: int
    layers: Mapping[Variant, Mapping[int, LayerMemory]]  # sequence length in tokens -> memory
    vocab: Mapping[VocabVariant, Mapping[int, VocabMemory]]  # the same
    mask_mib: Mapping[int, float] = field(default_factory=dict)  # sequence length -> attention mask that a stage keeps
    raw: Mapping[str, Any] = field(default_factory=dict)  # runs that the values were derived from, kept as they are
    meta: Meta = field(default_factory=Meta)
    files: tuple[ProfileFile, ...] = field(default=(), compare=False)  # that it was read from

    def save(self, folder: str | Path) -> Path:
        """Write the file under its documented name, whole or not at all; returns its path."""
        content: dict[str, Any] = dict(self.raw)
        working: dict[str, Any] = {}
        kept: dict[str, Any] = {}
        for (layer_type, sp), lengths in sorted(self.layers.items()):
            key = layer_key(layer_type, sp)
            content[key] = {str(seq): _layer_content(layer) for seq, layer in sorted(lengths.items())}
            peaks = {str(seq): _keyed(layer.working_mib) for seq, layer in lengths.items() if layer.working_mib}
            if peaks:
                working[key] = peaks
        for (role, sp), tables in sorted(self.vocab.items()):
            key = vocab_key(role, sp)
            content[key] = {
                str(seq): {"model_states": _keyed(vocab.states_mib), "activation": _keyed(vocab.activation_mib)}
                for seq, vocab in sorted(tables.items())
            }
            held = {str(seq): _keyed(vocab.kept_mib) for seq, vocab in tables.items() if vocab.kept_mib}
            if held:
                kept[key] = held
        meta = self.meta.model_copy(update={"dialect": "galvatron"}).with_extra(
            UNITS, working_mib=working, kept_mib=kept, mask_mib=_keyed(self.mask_mib)
        )
        return write_profile(Path(folder) / memory_name(self.dtype, self.hidden_size, self.heads), content, meta)

    @classmethod
    def load(
        cls, path: str | Path, dtype: str, hidden_size: int, heads: int, dialect: Dialect | None = None
    ) -> MemoryProfile:
        """Read a file, whatever its name. `dialect` settles whose units it is in where the file doesn't tell.

        Raises UserError, also when nothing tells the dialect or what tells contradicts.
        """
        content, meta = read_profile(path)
        known = _dialect(path, content, meta, dialect)
        layers: dict[Variant, dict[int, LayerMemory]] = {}
        vocab: dict[VocabVariant, dict[int, VocabMemory]] = {}
        raw: dict[str, Any] = {}
        roles = {key: role for role, key in ROLE_KEYS.items()}
        for key, value in content.items():
            if match := _LAYER.fullmatch(key):
                layers[_variant(path, key, match)] = {
                    whole_number(path, key, seq): _read_layer(path, f"{key}.{seq}", entry, known)
                    for seq, entry in objects(path, key, value)
                }
            elif match := _VOCAB.fullmatch(key):
                vocab[VocabVariant(roles[match[1]], bool(match[2]))] = {
                    whole_number(path, key, seq): _read_vocab(path, f"{key}.{seq}", entry, known)
                    for seq, entry in objects(path, key, value)
                }
            elif any(pattern.fullmatch(key) for pattern in _RAW.values()):
                raw[key] = value
            else:
                raise unknown_key(path, key, "layertype_{type}[_sp] or other_memory_pp_{off|on_first|on_last}[_sp]")
        for wanted, found in (("layertype_…", layers), ("other_memory_pp_…", vocab)):
            if not found:
                raise UserError(
                    f"{path}: holds {'raw runs, but ' if raw else ''}no {wanted} entry; Galvatron's profile_memory.sh "
                    "derives it when all its runs are done, or measure with `galvatron profile memory`"
                )
        extra = meta.extra if meta else {}
        layer_keys = {layer_key(*variant): lengths for variant, lengths in layers.items()}
        _add_extra(path, "working_mib", layer_keys, extra)
        _add_extra(path, "kept_mib", {vocab_key(*variant): lengths for variant, lengths in vocab.items()}, extra)
        masks = _by_number(path, "galvatron.mask_mib", extra["mask_mib"]) if "mask_mib" in extra else {}
        files = (ProfileFile.of(path),)
        return cls(dtype, hidden_size, heads, layers, vocab, masks, raw, meta or Meta(dialect=known), files)


def layer_key(layer_type: int, sequence_parallel: bool) -> str:
    """Key of a layer type's entry."""
    return f"layertype_{layer_type}{'_sp' if sequence_parallel else ''}"


def vocab_key(role: Role, sequence_parallel: bool) -> str:
    """Key of the vocabulary layers' entry."""
    return ROLE_KEYS[role] + ("_sp" if sequence_parallel else "")


def _variant(path: str | Path, key: str, match: re.Match[str]) -> Variant:
    return Variant(0 if match[1] == "0" else whole_number(path, key, match[1]), bool(match[2]))


def _keyed(values: Mapping[int, float]) -> dict[str, float]:
    return {str(tp): value for tp, value in sorted(values.items())}


def _layer_content(layer: LayerMemory) -> dict[str, Any]:
    activation = _keyed(layer.activation_mib)
    if layer.checkpoint_mib is not None:
        activation["checkpoint"] = layer.checkpoint_mib
    return {"parameter_size": layer.parameter_mib, "tp_activation_per_bsz_dict": activation}


def _dialect(path: str | Path, content: Mapping[str, Any], meta: Meta | None, given: Dialect | None) -> Dialect:
    told: set[Dialect] = {name for name, pattern in _RAW.items() for key in content if pattern.fullmatch(key)}
    if any(key.endswith("_sp") for key in content):
        told.add("galvatron")
    if meta is not None:
        told = {meta.dialect}
    if given is not None and told and told != {given}:
        raise UserError(f"{path}: profile_dialect says {given} but the file is {' and '.join(sorted(told))}'s")
    if len(told) > 1:
        raise UserError(f"{path}: mixes keys of both dialects; keep one profile a file")
    if told:
        return told.pop()
    if given is None:
        raise UserError(
            f"{path}: nothing tells whether parameter_size is Galvatron's (fp32 MiB) or PaddleNLP's (bf16 MiB); "
            "pass --profile_dialect galvatron or --profile_dialect paddlenlp"
        )
    return given


def _read_layer(path: str | Path, key: str, entry: object, dialect: Dialect) -> LayerMemory:
    size = positive(path, f"{key}.parameter_size", field_of(path, key, entry, "parameter_size"), "MiB")
    name = f"{key}.tp_activation_per_bsz_dict"
    activation = dict(objects(path, name, field_of(path, key, entry, "tp_activation_per_bsz_dict")))
    checkpoint = activation.pop("checkpoint", None)
    if checkpoint is not None:
        checkpoint = not_negative(path, f"{name}.checkpoint", checkpoint, "MiB per sample")
    return LayerMemory(
        size * PARAMETER_BYTES["galvatron"] / PARAMETER_BYTES[dialect], _by_number(path, name, activation), checkpoint
    )


def _read_vocab(path: str | Path, key: str, entry: object, dialect: Dialect) -> VocabMemory:
    states = _by_number(path, f"{key}.model_states", field_of(path, key, entry, "model_states"))
    scale = STATE_BYTES / MODEL_STATE_BYTES[dialect]
    return VocabMemory(
        {tp: mib * scale for tp, mib in states.items()},
        _by_number(path, f"{key}.activation", field_of(path, key, entry, "activation")),
    )


def _by_number(path: str | Path, key: str, value: object) -> dict[int, float]:
    return {
        whole_number(path, key, number): not_negative(path, f"{key}.{number}", mib, "MiB")
        for number, mib in objects(path, key, value)
    }


def _add_extra(
    path: str | Path,
    name: str,
    entries: Mapping[str, dict[int, LayerMemory]] | Mapping[str, dict[int, VocabMemory]],
    extra: Mapping[str, Any],
) -> None:
    """Put the numbers of our own key `name` into the field of that name of the entries that they belong to."""
    if name not in extra:
        return
    for key, lengths in objects(path, f"galvatron.{name}", extra[name]):
        where = f"galvatron.{name}.{key}"
        if key not in entries:
            raise unknown_key(path, where, "one of this file's keys without galvatron")
        for seq, numbers in objects(path, where, lengths):
            tokens = whole_number(path, where, seq)
            if tokens not in entries[key]:
                raise unknown_key(path, f"{where}.{seq}", "a sequence length of this file")
            field_values: dict[str, Any] = {name: _by_number(path, f"{where}.{seq}", numbers)}
            entries[key][tokens] = replace(entries[key][tokens], **field_values)  # type: ignore[assignment]
