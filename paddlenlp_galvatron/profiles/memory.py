"""Profile of the model's memory: one file in, one file out, both dialects' units made one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..base.errors import UserError
from ..interop.raw_runs import LARGEST, MEMORY_RUN, Dialect, derived_memory
from ..model import ModelShape, Recompute
from ..model.layer import APART
from .files import (
    Faults,
    Lengths,
    Meta,
    Note,
    ProfileFile,
    field_of,
    holds_no,
    memory_name,
    no_note,
    not_negative,
    objects,
    positive,
    read_profile,
    section,
    skipped,
    unknown_key,
    whole_number,
    write_profile,
)
from .identity import fits_layer

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
    working_constant_mib: Mapping[int, float] = field(default_factory=dict)  # and whatever the samples: a gradient
    # By the choices of parts in APART: tp -> of activation_mib, what is not kept where they are recomputed, and by how
    # much backward's own peak is higher then, per sample.
    spared_mib: Mapping[Recompute, Mapping[int, float]] = field(default_factory=dict)
    again_mib: Mapping[Recompute, Mapping[int, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class VocabMemory:
    """Memory of the vocabulary layers at one sequence length, in MiB."""

    states_mib: Mapping[int, float]  # tp degree -> weights of one rank at 16 bytes each
    activation_mib: Mapping[int, float]  # tp degree -> per sample, on one rank, peak of the loss included
    kept_mib: Mapping[int, float] = field(default_factory=dict)  # tp degree -> kept for backward alone, per sample
    # Of the peak, by tp degree: what grows with the samples, per sample, and what does not, a table's gradient.
    peak_mib: Mapping[int, float] = field(default_factory=dict)
    peak_constant_mib: Mapping[int, float] = field(default_factory=dict)


_OTHER_RUN = re.compile(r"pp\d+_ckpt[01]_layernum\[.*")  # raw runs of Galvatron's graphical interface
UNMEASURED_MIB = 1e6  # written by Galvatron for degree 1 (and halves of it for others) where there was no run
_LAYER = re.compile(r"layertype_(\d+)(_sp)?")
_VOCAB = re.compile(r"(other_memory_pp_(?:off|on_first|on_last))(_sp)?")
OF_PARTS = {
    f"{name}_{parts.words.replace('+', '_')}_mib": (f"{name}_mib", parts)
    for name in ("spared", "again")
    for parts in APART
}
# Names under our own key of the file.
OF_LAYERS = ("working_mib", "working_constant_mib", *OF_PARTS)
OF_VOCABULARY = ("kept_mib", "peak_mib", "peak_constant_mib")
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
    files: tuple[ProfileFile, ...] = field(default=(), compare=False)  # the files it was read from

    @property
    def flash_attention(self) -> bool | None:
        """Whether it was measured with it, which takes no mask; None: the file does not tell."""
        return not any(self.mask_mib.values()) if self.mask_mib else None

    def save(self, folder: str | Path) -> Path:
        """Write the file under its documented name, whole or not at all; returns its path."""
        content: dict[str, Any] = dict(self.raw)
        extra: dict[str, dict[str, Any]] = {name: {} for name in (*OF_LAYERS, *OF_VOCABULARY)}
        for (layer_type, sp), lengths in sorted(self.layers.items()):
            key = layer_key(layer_type, sp)
            content[key] = {str(seq): _layer_content(layer) for seq, layer in sorted(lengths.items())}
            _note_extra(extra, OF_LAYERS, key, lengths)
        for (role, sp), tables in sorted(self.vocab.items()):
            key = vocab_key(role, sp)
            content[key] = {
                str(seq): {"model_states": _keyed(vocab.states_mib), "activation": _keyed(vocab.activation_mib)}
                for seq, vocab in sorted(tables.items())
            }
            _note_extra(extra, OF_VOCABULARY, key, tables)
        meta = self.meta.model_copy(update={"dialect": "galvatron"}).with_extra(
            UNITS, **extra, mask_mib=_keyed(self.mask_mib)
        )
        return write_profile(Path(folder) / memory_name(self.dtype, self.hidden_size, self.heads), content, meta)

    @classmethod
    def load(
        cls,
        path: str | Path,
        dtype: str,
        hidden_size: int,
        heads: int,
        dialect: Dialect | None = None,
        *,
        model: ModelShape | None = None,
        seqs: Sequence[int] = (),
        note: Note = no_note,
    ) -> MemoryProfile:
        """Read a file, whatever its name, of any version of Galvatron or its PaddleNLP port.

        `dialect` settles whose units it is in where the file doesn't tell, else `model`, whose layer (of type 0) fits
        one of them. `seqs`: sequence length of each layer type, for keys that tell none. `note` hears
        what was assumed, derived from raw runs or left out. Raises UserError with all that is wrong, also when nothing
        tells the dialect or what tells contradicts.
        """
        whole, meta = read_profile(path)
        content, beside = section(whole, "memory_profiling")
        skipped(path, beside, note)
        known = _dialect(path, content, meta, dialect, model, note)
        derived = derived_memory(content, known)
        if derived:
            note(f"{path}: derived from raw runs: {', '.join(derived)}")
        raw = {key: value for key, value in content.items() if _tells_dialect(key) or _OTHER_RUN.fullmatch(key)}
        layers, vocab = _read_entries(path, {**content, **derived}, raw, known, Lengths(path, seqs, note), note)
        extra = meta.extra if meta else {}
        layer_keys = {layer_key(*variant): lengths for variant, lengths in layers.items()}
        vocab_keys = {vocab_key(*variant): lengths for variant, lengths in vocab.items()}
        for name in OF_LAYERS:
            _add_extra(path, name, layer_keys, extra)
        for name in OF_VOCABULARY:
            _add_extra(path, name, vocab_keys, extra)
        masks = _by_number(path, "galvatron.mask_mib", extra["mask_mib"]) if "mask_mib" in extra else {}
        files = (ProfileFile.of(path),)
        return cls(dtype, hidden_size, heads, layers, vocab, masks, raw, meta or Meta(dialect=known), files)


def _read_entries(
    path: str | Path, content: Mapping[str, Any], raw: Mapping[str, Any], dialect: Dialect, lengths: Lengths, note: Note
) -> tuple[dict[Variant, dict[int, LayerMemory]], dict[VocabVariant, dict[int, VocabMemory]]]:
    """Entries of layers and vocabulary layers by sequence length. Raises UserError with every fault."""
    layers: dict[Variant, dict[int, LayerMemory]] = {}
    vocab: dict[VocabVariant, dict[int, VocabMemory]] = {}
    roles = {key: role for role, key in ROLE_KEYS.items()}
    faults, strange = Faults(), []
    for key, value in content.items():
        with faults.gathered():
            if match := _LAYER.fullmatch(key):
                variant = _variant(path, key, match)
                for where, seqs, entry in _by_length(path, key, value, "parameter_size", lengths):
                    with faults.gathered():
                        tokens = seqs[min(variant.layer_type, len(seqs) - 1)]
                        layers.setdefault(variant, {})[tokens] = _read_layer(path, where, entry, dialect)
            elif match := _VOCAB.fullmatch(key):
                role = VocabVariant(roles[match[1]], bool(match[2]))
                for where, seqs, entry in _by_length(path, key, value, "model_states", lengths):
                    with faults.gathered():
                        if read := _read_vocab(path, where, entry, dialect, note):
                            vocab.setdefault(role, {}).update(dict.fromkeys(seqs, read))
            elif key.startswith(("layertype", "other_memory")):
                raise unknown_key(path, key, "layertype_{type}[_sp] or other_memory_pp_{off|on_first|on_last}[_sp]")
            elif key not in raw:
                strange.append(key)
    faults.require_none()
    if missing := [key for key, found in (("layertype_…", layers), ("other_memory_pp_…", vocab)) if not found]:
        wanted = f"{' and no '.join(missing)} entry" + (" and no raw runs that tell one" if raw else "")
        raise holds_no(path, wanted, content, "galvatron profile memory")
    skipped(path, strange, note)
    return layers, vocab


def _by_length(
    path: str | Path, key: str, value: object, name: str, lengths: Lengths
) -> Iterator[tuple[str, tuple[int, ...], Any]]:
    """Entries under a key with their place and lengths; Galvatron 1 writes one, without a length."""
    if isinstance(value, dict) and name in value:
        yield key, lengths.of(key, None), value
        return
    for seq, entry in objects(path, key, value):
        yield f"{key}.{seq}", lengths.of(key, seq), entry


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


def _note_extra(
    extra: dict[str, dict[str, Any]], names: Sequence[str], key: str, lengths: Mapping[int, LayerMemory | VocabMemory]
) -> None:
    """Put the fields of these names of all lengths into `extra`, each under its name and the key."""
    for name in names:
        known = {str(seq): _keyed(mib) for seq, entry in lengths.items() if (mib := _own(entry, name))}
        if known:
            extra[name][key] = known


def _own(entry: LayerMemory | VocabMemory, name: str) -> Mapping[int, float]:
    """The numbers under a name of our own key."""
    if name not in OF_PARTS:
        values: Mapping[int, float] = getattr(entry, name)
        return values
    name, parts = OF_PARTS[name]
    by_parts: Mapping[Recompute, Mapping[int, float]] = getattr(entry, name)
    return by_parts.get(parts, {})


def _layer_content(layer: LayerMemory) -> dict[str, Any]:
    activation = _keyed(layer.activation_mib)
    if layer.checkpoint_mib is not None:
        activation["checkpoint"] = layer.checkpoint_mib
    return {"parameter_size": layer.parameter_mib, "tp_activation_per_bsz_dict": activation}


def _tells_dialect(key: str) -> Dialect | None:
    return next((name for name, pattern in MEMORY_RUN.items() if pattern.fullmatch(key)), None)


def _dialect(
    path: str | Path,
    content: Mapping[str, Any],
    meta: Meta | None,
    given: Dialect | None,
    model: ModelShape | None,
    note: Note,
) -> Dialect:
    told = {name for key in content if (name := _tells_dialect(key))}
    if any(key.endswith("_sp") or _OTHER_RUN.fullmatch(key) for key in content):
        told.add("galvatron")
    if meta is not None:
        told = {meta.dialect}
    if given is not None and told and told != {given}:
        raise UserError(f"{path}: profile_dialect says {given} but the file is {' and '.join(sorted(told))}'s")
    if len(told) > 1:
        raise UserError(f"{path}: mixes keys of both dialects; keep one profile a file")
    size = next(_sizes(content.get("layertype_0")), None)
    if told or given is not None or size is None:
        return told.pop() if told else given or "galvatron"
    for dialect, parameter_bytes in PARAMETER_BYTES.items():
        if model and fits_layer(size * PARAMETER_BYTES["galvatron"] / parameter_bytes, model):
            note(
                f"{path}: units are not told; taken as {dialect}'s, as parameter_size is {parameter_bytes} bytes "
                f"for each weight of {model.name}"
            )
            return dialect
    raise UserError(
        f"{path}: nothing tells whether parameter_size is Galvatron's (fp32 MiB) or PaddleNLP's (bf16 MiB)"
        + (f", and {size:g} is neither of {model.name}" if model else "")
        + "; pass --profile_dialect galvatron or --profile_dialect paddlenlp"
    )


def _sizes(entry: object) -> Iterator[float]:
    """Every parameter_size within an entry."""
    for name, value in entry.items() if isinstance(entry, dict) else ():
        if name == "parameter_size" and isinstance(value, (int, float)) and 0 < value <= LARGEST:
            yield float(value)
        else:
            yield from _sizes(value)


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


def _read_vocab(path: str | Path, key: str, entry: object, dialect: Dialect, note: Note) -> VocabMemory | None:
    """None for what was not measured."""
    states = _by_number(path, f"{key}.model_states", field_of(path, key, entry, "model_states"))
    activation = _by_number(path, f"{key}.activation", field_of(path, key, entry, "activation"))
    if UNMEASURED_MIB in (states.get(1), activation.get(1)):
        note(f"{path}: {key} left out: {UNMEASURED_MIB:,.0f} MiB stand for what was not measured")
        return None
    scale = STATE_BYTES / MODEL_STATE_BYTES[dialect]
    return VocabMemory({tp: mib * scale for tp, mib in states.items()}, activation)


def _by_number(path: str | Path, key: str, value: object) -> dict[int, float]:
    """Numbers by degree. Galvatron 1 writes that of degree 1 without an object."""
    if isinstance(value, (int, float)):
        value = {"1": value}
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
            entry, values = entries[key][tokens], _by_number(path, f"{where}.{seq}", numbers)
            changed: dict[str, Any] = {name: values}
            if name in OF_PARTS:
                field_name, parts = OF_PARTS[name]
                changed = {field_name: {**getattr(entry, field_name), parts: values}}
            entries[key][tokens] = replace(entry, **changed)  # type: ignore[assignment]
