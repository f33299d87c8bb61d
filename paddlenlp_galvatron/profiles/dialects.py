"""Converts profile files of every version of Galvatron and of its PaddleNLP port to our form.

Their files may have raw runs (`raw_runs`), sections for times and memory, keys without a batch or a length, one number
for degree 1, bf16 weights, and entries that were never measured. Our files are unchanged.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..base import MIB, Faults, Note, UserError
from ..model import ModelShape
from .raw_runs import LARGEST, MEMORY_RUN, SEQ, TIME_RUN, Dialect, derived_memory, derived_times, is_number, kind_of

STATE_BYTES = 16  # model states that Galvatron counts per parameter: weight, gradient, two moments, four bytes each
# Bytes a parameter in `parameter_size` and in `model_states` of each dialect.
PARAMETER_BYTES: dict[Dialect, int] = {"galvatron": 4, "paddlenlp": 2}
MODEL_STATE_BYTES: dict[Dialect, int] = {"galvatron": STATE_BYTES, "paddlenlp": 18}
SECTIONS = ("computation_profiling", "memory_profiling")  # of a file that holds a model's times and memory together
UNMEASURED_MIB = 1e6  # written by Galvatron for degree 1 (and halves of it for others) where there was no run

_TIME = re.compile(rf"layertype_(?:(\d+)|(other)(?:_\d+)?)(?:_bsz(\d+))?(?:_seq({SEQ}|\d+))?")
_PART_TIME = re.compile(rf"{_TIME.pattern}_(attention|mlp)")
_TIME_RUNS = re.compile(rf"{TIME_RUN.pattern}(?:_.*)?")
_LAYER = re.compile(r"layertype_(\d+)(_sp)?")
_VOCABULARY = re.compile(r"other_memory_pp_(?:off|on_first|on_last)(_sp)?")
_OTHER_RUN = re.compile(r"pp\d+_ckpt[01]_layernum\[.*")  # raw runs of Galvatron's graphical interface
_LENGTH_IN_NAME = re.compile(r"_seqlen_?(\d{1,9})")


@dataclass(frozen=True)
class Entries:
    """The entries of a file in our form."""

    content: dict[str, Any]
    keys: tuple[str, ...] = ()  # the file's own
    origins: dict[str, str] = field(default_factory=dict)  # key of an entry here -> key in the file, if different
    raw: dict[str, Any] = field(default_factory=dict)  # raw runs, unchanged
    skipped: list[str] = field(default_factory=list)  # keys that are not measurements

    def put(self, origin: str, entry: Any, *path: str) -> None:
        """Adds an entry under these keys."""
        *outer, last = path
        holder = self.content
        for key in outer:
            holder = holder.setdefault(key, {})
        holder[last] = entry
        self.origins.pop(target := ".".join(path), None)
        if target != origin:
            self.origins[target] = origin


class _Lengths:
    """The sequence lengths of a key, one per layer type: a number, a list, or nothing (Galvatron 1)."""

    def __init__(self, path: str, seqs: Sequence[int], note: Note):
        self._path, self._note = path, note
        named = _LENGTH_IN_NAME.search(Path(path).name)
        self._unnamed_lengths = (named[1],) if named else tuple(map(str, seqs))
        self._why = "the file's name" if named else "this search's"

    def of(self, key: str, text: str | None) -> Sequence[str]:
        """Raises UserError if no sequence length is known."""
        if text is not None:
            return re.findall(r"[^,\s\[\]]+", text) or [text]
        if not self._unnamed_lengths:
            raise UserError(f"{self._path}: {key}: no sequence length; write it as _seq… into the key")
        tokens = ", ".join(dict.fromkeys(self._unnamed_lengths))
        self._note(f"{self._path}: keys without a sequence length are taken as of {tokens} tokens ({self._why})")
        return self._unnamed_lengths

    def of_type(self, key: str, text: str | None, layer_type: str) -> str:
        """The length of a layer type's samples."""
        lengths = self.of(key, text)
        return lengths[min(int(layer_type[:9]), len(lengths) - 1)]


def times(path: str, content: dict[str, Any], seqs: Sequence[int], note: Note) -> Entries:
    """Entries of a computation profile. `seqs`: sequence length of each layer type, for keys without one; `note` gets
    assumptions, derived and ignored entries. Raises UserError."""
    content, outside = _section(content, SECTIONS[0])
    derived, useless = derived_times(content)
    if derived:
        note(f"{path}: derived from raw runs: {', '.join(dict.fromkeys(map(kind_of, derived)))}")
    if useless and (derived or not any(map(_TIME.fullmatch, content))):
        note(f"{path}: ignored, as more layers did not take longer or were not run: {', '.join(useless)}")
    raw = {key: value for key, value in content.items() if _TIME_RUNS.fullmatch(key)}
    whole = {key: value for key, value in (content | derived).items() if key not in raw}
    lengths, read = _Lengths(path, seqs, note), Entries({}, tuple(content), raw=raw, skipped=outside)
    by_batch = {match[1] for key in whole if (match := _TIME.fullmatch(key)) and match[3]}
    parts, faults = set(), Faults()
    for key, value in sorted(whole.items(), key=lambda item: _has_no_batch(item[0])):
        if documented := _PART_TIME.fullmatch(key):
            parts.add(documented[5])
        elif not (match := _TIME.fullmatch(key)):
            read.content[key] = value
        elif not match[3] and match[1] in by_batch:
            note(f"{path}: {key} ignored: the file has times by batch")
        else:
            if not match[3]:
                note(f"{path}: {key} has no batch; a sample takes the same time in every batch")
            with faults.gathered():
                _put_time(read, key, match, value, lengths)
    faults.require_none()
    if parts and not any(key.startswith("layertype") and not key.startswith("layertype_other") for key in read.content):
        raise UserError(
            f"{path}: holds times of {' and '.join(sorted(parts))} alone, not of whole layers; measure these with "
            "`galvatron profile computation`"
        )
    read.skipped.extend(f"…_{documented}" for documented in sorted(parts))
    return read


def _has_no_batch(key: str) -> tuple[bool, str]:
    """Sorts keys without a batch after all others, by name."""
    match = _TIME.fullmatch(key)
    return (True, key) if match and not match[3] else (False, "")


def _put_time(read: Entries, key: str, match: re.Match[str], value: Any, lengths: _Lengths) -> None:
    """Stores one time under our key. In a file with several lengths, the time of all but the layers is stored for
    each."""
    layer_type, other, batch, text = match.groups()
    if not other:
        seq = lengths.of_type(key, text, layer_type)
        read.put(key, value, f"layertype_{layer_type}_bsz{batch or 1}_seq{seq}")
        return
    for seq in dict.fromkeys(lengths.of(key, text)):
        name = f"layertype_other_bsz{batch or 1}_seq{seq}"
        # Galvatron 2.0 writes one per type that includes the other types' layers: the smallest has fewest of them.
        stored = read.content.get(name, math.inf)
        if is_number(value) and (stored < value if is_number(stored) else name in read.content):
            continue  # keeps a value that is no number, to be refused later
        read.put(key, value, name)


def memory(
    path: str,
    content: dict[str, Any],
    dialects: tuple[Dialect | None, Dialect | None],
    model: ModelShape | None,
    seqs: Sequence[int],
    note: Note,
) -> tuple[Entries, Dialect]:
    """Entries of a memory profile in Galvatron's units, and their original dialect.

    `dialects`: from our object in the file, and from the user. If both are unset, keys and units determine it, units by
    `model`, whose layer (of type 0) fits one of them. `seqs` and `note` as for `times`. Raises UserError, also when the
    dialect is unclear or contradictory.
    """
    content, outside = _section(content, SECTIONS[1])
    dialect = _dialect(path, content, *dialects, model, note)
    derived = derived_memory(content, dialect)
    if derived:
        note(f"{path}: derived from raw runs: {', '.join(derived)}")
    raw = {key: value for key, value in content.items() if _dialect_of_key(key) or _OTHER_RUN.fullmatch(key)}
    lengths, read = _Lengths(path, seqs, note), Entries({}, tuple(content), raw=raw, skipped=outside)
    faults = Faults()
    for key, value in (content | derived).items():
        layer, vocabulary = _LAYER.fullmatch(key), _VOCABULARY.fullmatch(key)
        if not isinstance(value, dict) or not value or not (layer or vocabulary):
            if key not in raw:
                read.content[key] = value
            continue
        name = "parameter_size" if layer else "model_states"
        for origin, text, entry in _by_length(key, value, name):
            with faults.gathered():
                if layer:
                    entry = _layer(entry, dialect)
                    read.put(origin, entry, key, lengths.of_type(key, text, layer[1]))
                elif _is_unmeasured(entry):
                    note(f"{path}: {origin} ignored: {UNMEASURED_MIB:,.0f} MiB is a placeholder, not a measurement")
                else:
                    for seq in lengths.of(key, text):
                        read.put(origin, _vocabulary(entry, dialect), key, seq)
    faults.require_none()
    return read, dialect


def allreduce(path: str, content: dict[str, Any]) -> Entries:
    """Entries of an all-reduce file. A key without `_consec_` is a consecutive group's. Raises UserError."""
    read = Entries({}, tuple(content))
    for key, value in content.items():
        name = f"{key}_consec_1" if re.fullmatch(r"allreduce_size_\d+", key) else key
        if name in read.content:
            raise UserError(f"{path}: {key}: the same group stands there twice, with and without _consec_; keep one")
        read.put(key, value, name)
    return read


def messages(content: dict[str, Any]) -> Entries:
    """Entries of a file of times by message size. Keys of consecutive groups are without `_consec_1`."""
    read = Entries({}, tuple(content))
    for key, value in content.items():
        read.put(key, value, re.sub(r"(?<=\d)_consec_1(?=_[\d.]+MB_time$)", "", key))
    return read


def _section(content: dict[str, Any], name: str) -> tuple[dict[str, Any], list[str]]:
    """One of SECTIONS if the content has it, else the whole content; and the keys outside the sections."""
    if not isinstance(content.get(name), dict):
        return content, []
    return content[name], [key for key in content if key not in SECTIONS]


def _by_length(key: str, value: dict[str, Any], name: str) -> Iterator[tuple[str, str | None, Any]]:
    """Entries under a key with their place and length; Galvatron 1 writes a single entry without a length."""
    if name in value:
        yield key, None, value
    else:
        yield from ((f"{key}.{seq}", seq, entry) for seq, entry in value.items())


def _layer(entry: Any, dialect: Dialect) -> Any:
    if not isinstance(entry, dict):
        return entry
    converted = dict(entry)
    if "parameter_size" in converted:
        factor = PARAMETER_BYTES["galvatron"] / PARAMETER_BYTES[dialect]
        converted["parameter_size"] = _times(converted["parameter_size"], factor)
    if "tp_activation_per_bsz_dict" in converted:
        converted["tp_activation_per_bsz_dict"] = _by_degree(converted["tp_activation_per_bsz_dict"])
    return converted


def _vocabulary(entry: Any, dialect: Dialect) -> Any:
    if not isinstance(entry, dict):
        return entry
    converted = {name: _by_degree(value) for name, value in entry.items()}
    if isinstance(states := converted.get("model_states"), dict):
        factor = STATE_BYTES / MODEL_STATE_BYTES[dialect]
        converted["model_states"] = {degree: _times(mib, factor) for degree, mib in states.items()}
    return converted


def _is_unmeasured(entry: Any) -> bool:
    names = ("model_states", "activation")
    tables = [_by_degree(entry.get(name)) for name in names] if isinstance(entry, dict) else []
    return any(isinstance(table, dict) and table.get("1") == UNMEASURED_MIB for table in tables)


def _by_degree(value: Any) -> Any:
    """Numbers by degree. Galvatron 1 writes the number of degree 1 without an object."""
    return {"1": value} if isinstance(value, (int, float)) else value


def _times(value: Any, factor: float) -> Any:
    """A number in Galvatron's units; an impossible number stays as it is."""
    return value * factor if is_number(value) and value > 0 and factor != 1 else value


def _dialect_of_key(key: str) -> Dialect | None:
    return next((name for name, pattern in MEMORY_RUN.items() if pattern.fullmatch(key)), None)


def _dialect(
    path: str,
    content: Mapping[str, Any],
    by_us: Dialect | None,
    requested: Dialect | None,
    model: ModelShape | None,
    note: Note,
) -> Dialect:
    dialects = {name for key in content if (name := _dialect_of_key(key))}
    if any(key.endswith("_sp") or _OTHER_RUN.fullmatch(key) for key in content):
        dialects.add("galvatron")
    if by_us is not None:
        dialects = {by_us}
    if requested is not None and dialects and dialects != {requested}:
        raise UserError(f"{path}: profile_dialect says {requested} but the file is {' and '.join(sorted(dialects))}'s")
    if len(dialects) > 1:
        raise UserError(f"{path}: mixes keys of both dialects; keep one profile a file")
    size = next(_sizes(content.get("layertype_0")), None)
    if dialects or requested is not None or size is None:
        return dialects.pop() if dialects else requested or "galvatron"
    for dialect, parameter_bytes in PARAMETER_BYTES.items():
        if model and fits_layer(size * PARAMETER_BYTES["galvatron"] / parameter_bytes, model):
            note(
                f"{path}: units are not given; taken as {dialect}'s, as parameter_size is {parameter_bytes} bytes "
                f"for each weight of {model.name}"
            )
            return dialect
    raise UserError(
        f"{path}: unclear whether parameter_size is Galvatron's (fp32 MiB) or PaddleNLP's (bf16 MiB)"
        + (f", and {size:g} is neither of {model.name}" if model else "")
        + "; galvatron search --profile_dialect galvatron (or paddlenlp) says it"
    )


def _sizes(entry: object) -> Iterator[float]:
    """Every parameter_size within an entry."""
    for name, value in entry.items() if isinstance(entry, dict) else ():
        if name == "parameter_size" and isinstance(value, (int, float)) and 0 < value <= LARGEST:
            yield float(value)
        else:
            yield from _sizes(value)


def fits_layer(parameter_mib: float, model: ModelShape) -> bool:
    """Whether a layer's weights (MiB at 4 bytes each) are the model's: within 3 % and the 5 MiB that allocators round
    by, but never more than a quarter off. Older Galvatrons ran all models with as many kv heads as heads."""
    return any(is_near(parameter_mib, layer_mib(kind)) for kind in (model, replace(model, kv_heads=model.heads)))


def layer_mib(model: ModelShape) -> float:
    """A layer's weights at 4 bytes each."""
    return model.layer_parameters * 4 / MIB


def is_near(measured_mib: float, expected_mib: float) -> bool:
    """Whether a layer's weights are the expected ones up to the allocator's rounding."""
    return abs(measured_mib - expected_mib) <= min(0.03 * expected_mib + 5, 0.25 * expected_mib)
