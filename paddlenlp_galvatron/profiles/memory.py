"""Profile of the model's memory: reads and writes its file, in Galvatron's units also for other dialects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from ..base.text import Note, no_note
from ..model import APART, ModelShape, Recompute
from . import dialects as foreign
from .dialects import STATE_BYTES as STATE_BYTES
from .files import Meta, ProfileFile, memory_name, read_profile, write_profile
from .raw_runs import Dialect
from .schema import ALONE, INDEX, META_KEY, Content, FilePlace, Keys, NumberField, Part, Record, TableField, one_of

Role = Literal["only", "first", "last"]  # of a stage: the only stage, the first or the last of several
ROLES: dict[str, Role] = {"off": "only", "on_first": "first", "on_last": "last"}
Key = TypeVar("Key", bound=tuple[Any, ...])
T = TypeVar("T")


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
    working_mib: Mapping[int, float] = field(default_factory=dict)  # tp -> backward's peak above that, per sample
    working_constant_mib: Mapping[int, float] = field(default_factory=dict)  # and independent of samples: a gradient
    # By the choices of parts in APART: tp -> part of activation_mib that recompute frees, and the increase of
    # backward's peak, per sample.
    recompute_saving_mib: Mapping[Recompute, Mapping[int, float]] = field(default_factory=dict)
    recompute_peak_mib: Mapping[Recompute, Mapping[int, float]] = field(default_factory=dict)

    @classmethod
    def of_entry(cls, parameter_mib: float, by_degree: Mapping[int | None, float]) -> LayerMemory:
        """Read a file's entry; activations with recompute have the key None."""
        activation_mib = {tp: mib for tp, mib in by_degree.items() if tp is not None}
        return cls(parameter_mib, activation_mib, by_degree.get(None))

    @property
    def by_degree(self) -> dict[int | None, float]:
        """Activations in the form of an entry."""
        by_degree: dict[Any, float] = dict(self.activation_mib)
        return by_degree if self.checkpoint_mib is None else by_degree | {None: self.checkpoint_mib}


@dataclass(frozen=True)
class VocabMemory:
    """Memory of the vocabulary layers at one sequence length, in MiB."""

    states_mib: Mapping[int, float]  # tp degree -> weights of one rank at 16 bytes each
    activation_mib: Mapping[int, float]  # tp degree -> per sample, on one rank, including the peak of the loss
    kept_mib: Mapping[int, float] = field(default_factory=dict)  # tp degree -> only kept for backward, per sample
    # The peak by tp degree: the part that grows with the samples, per sample, and the constant part, a table's
    # gradient.
    peak_mib: Mapping[int, float] = field(default_factory=dict)
    peak_constant_mib: Mapping[int, float] = field(default_factory=dict)


SEQ, DEGREE = Keys("{tokens}", int, ALONE), Keys("{degree}", int, ALONE)
DEGREE_OR_RECOMPUTED: Keys[int | None] = Keys(
    "{degree|checkpoint}",
    lambda degree: degree,
    Part(
        ALONE.pattern,
        lambda place, text: None if text == "checkpoint" else ALONE.read(place, text),
        lambda degree: "checkpoint" if degree is None else str(degree),
    ),
)
MEGATRON_SP = one_of({"": False, "_sp": True})
LAYERS = Keys("layertype_{type}[_sp]", Variant, INDEX, MEGATRON_SP)
VOCABULARY = Keys("other_memory_pp_{off|on_first|on_last}[_sp]", VocabVariant, one_of(ROLES), MEGATRON_SP)
BY_DEGREE = TableField(DEGREE, NumberField("MiB"))
LAYER = Record(
    LayerMemory.of_entry,
    {
        "parameter_size": ("parameter_mib", NumberField("MiB", above_zero=True)),
        "tp_activation_per_bsz_dict": ("by_degree", TableField(DEGREE_OR_RECOMPUTED, NumberField("MiB per sample"))),
    },
)
VOCAB = Record(VocabMemory, {"model_states": ("states_mib", BY_DEGREE), "activation": ("activation_mib", BY_DEGREE)})
# Name in our object of the file -> field of an entry, and the parts that are recomputed; meaning with unit.
OF_PARTS = {
    f"{name}_{parts.words.replace('+', '_')}_mib": (attribute, parts)
    for name, attribute in (("spared", "recompute_saving_mib"), ("again", "recompute_peak_mib"))
    for parts in APART
}
OF_LAYERS = {
    "working_mib": "MiB per sample: workspace of a layer's backward beyond saved activations",
    "working_constant_mib": "MiB: the part of it that does not grow with the samples, a weight's gradient",
    **{
        name: "MiB per sample: "
        + (
            "saved activations that a layer which recomputes these parts does not keep"
            if attribute == "recompute_saving_mib"
            else "by how much the peak of backward is higher where these parts are recomputed"
        )
        for name, (attribute, _) in OF_PARTS.items()
    },
}
OF_VOCABULARY = {
    "kept_mib": "MiB per sample: the part of `activation` that is kept for backward; the rest is workspace",
    "peak_mib": "MiB per sample: peak of the vocabulary layers; used instead of `activation`",
    "peak_constant_mib": "MiB: the part of it that does not grow with the samples, a table's gradient",
}
CONTENT = Content(
    "memory",
    {
        "layertype": (
            TableField(LAYERS, TableField(SEQ, LAYER)),
            "MiB: by sequence length; `parameter_size`: all weights of a layer at 4 bytes each; "
            "`tp_activation_per_bsz_dict`: kept for backward per sample by tp degree, `checkpoint` with recompute, "
            "tp 1",
        ),
        "other_memory_pp": (
            TableField(VOCABULARY, TableField(SEQ, VOCAB)),
            "MiB: by sequence length; `model_states`: weights of vocabulary layers on one rank at 16 bytes each; "
            "`activation`: their activations per sample, including the peak of the loss",
        ),
    },
    {
        **{name: (TableField(LAYERS, TableField(SEQ, BY_DEGREE)), meaning) for name, meaning in OF_LAYERS.items()},
        **{
            name: (TableField(VOCABULARY, TableField(SEQ, BY_DEGREE)), meaning)
            for name, meaning in OF_VOCABULARY.items()
        },
        "mask_mib": (
            TableField(SEQ, NumberField("MiB")),
            "MiB: the attention mask of a stage, by sequence length; none with flash attention",
        ),
    },
    begins=("layertype", "other_memory"),
)


@dataclass(frozen=True)
class MemoryProfile:
    """Measured memory of one model in one dtype, in Galvatron's units also for other dialects."""

    dtype: str  # fp32, bf16, fp16
    hidden_size: int
    heads: int
    layers: Mapping[Variant, Mapping[int, LayerMemory]]  # sequence length in tokens -> memory
    vocab: Mapping[VocabVariant, Mapping[int, VocabMemory]]  # the same
    mask_mib: Mapping[int, float] = field(default_factory=dict)  # sequence length -> attention mask that a stage keeps
    meta: Meta = field(default_factory=Meta)
    files: tuple[ProfileFile, ...] = field(default=(), compare=False)  # the files it was read from

    @property
    def flash_attention(self) -> bool | None:
        """Whether it was measured with flash attention, which needs no mask; None: unknown."""
        return not any(self.mask_mib.values()) if self.mask_mib else None

    def save(self, folder: str | Path) -> Path:
        """Write the file atomically under its documented name; returns its path."""
        values: dict[str, Any] = {
            "layertype": _sorted(self.layers),
            "other_memory_pp": _sorted(self.vocab),
            "mask_mib": self.mask_mib,
            **{name: _of_each(self.layers, name) for name in OF_LAYERS},
            **{name: _of_each(self.vocab, name) for name in OF_VOCABULARY},
        }
        name = memory_name(self.dtype, self.hidden_size, self.heads)
        meta = self.meta.model_copy(update={"dialect": "galvatron"})
        return write_profile(Path(folder) / name, CONTENT, values, meta)

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
        """Read a file, of any name and any version of Galvatron or its PaddleNLP port.

        If the file has no dialect, `dialect` gives its units, else `model`, whose layer (of type 0) fits one of them.
        `seqs`: sequence length of each layer type, for keys without one. `note` receives assumptions, derived entries
        and omissions. Raises UserError with all faults, also for an unknown or contradictory dialect.
        """
        content, meta = read_profile(path)
        dialects = meta.dialect if meta else None, dialect
        entries, dialect_read = foreign.memory(str(path), content, dialects, model, seqs, note)
        read = CONTENT.read(str(path), entries, meta.extra if meta else {}, note)
        layers, vocab = read["layertype"], read["other_memory_pp"]
        if missing := [key for key, has in (("layertype_…", layers), ("other_memory_pp_…", vocab)) if not has]:
            raise CONTENT.lacking(str(path), entries, f"{' and no '.join(missing)} entry")
        for names, keys, known_entries in ((OF_LAYERS, LAYERS, layers), (OF_VOCABULARY, VOCABULARY, vocab)):
            for name in names:
                at = FilePlace(str(path), META_KEY).at(name)
                _add(at, keys, name, read.get(name, {}), known_entries)
        masks, files = read.get("mask_mib", {}), (ProfileFile.of(path),)
        return cls(dtype, hidden_size, heads, layers, vocab, masks, meta or Meta(dialect=dialect_read), files)


def _sorted(entries: Mapping[Key, Mapping[int, T]]) -> dict[Key, dict[int, T]]:
    return {key: dict(sorted(lengths.items())) for key, lengths in sorted(entries.items())}


def _of_each(entries: Mapping[Any, Mapping[int, Any]], name: str) -> dict[Any, dict[int, Mapping[int, float]]]:
    """Values of one `galvatron` field of every entry that has it."""
    attribute, parts = OF_PARTS.get(name, (name, None))

    def of(entry: Any) -> Mapping[int, float]:
        values: Mapping[Any, Any] = getattr(entry, attribute)
        return values.get(parts, {}) if parts else values

    by_key = {key: {seq: mib for seq, entry in of_key.items() if (mib := of(entry))} for key, of_key in entries.items()}
    return {key: lengths for key, lengths in by_key.items() if lengths}


def _add(at: FilePlace, keys: Keys[Any], name: str, table: Mapping[Any, Mapping[int, Any]], entries: Any) -> None:
    """Stores the numbers under a name of our object in the field of their entries."""
    attribute, parts = OF_PARTS.get(name, (name, None))
    for key, lengths in table.items():
        where = at.at(keys.write(key))
        if key not in entries:
            raise where.unknown("one of this file's keys without galvatron")
        for seq, mib in lengths.items():
            if seq not in entries[key]:
                raise where.at(str(seq)).unknown("a sequence length of this file")
            entry = entries[key][seq]
            value = {**getattr(entry, attribute), parts: mib} if parts else mib
            entries[key][seq] = replace(entry, **{attribute: value})
