"""Rows of a fine-tuning data set: samples are tokenised and packed into rows once, and cached next to the data.

So a step's rows are the same under every plan, after every restart, and for any reader. `pack` chooses the samples of
each row by their lengths and order.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from json import dumps, loads
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from ...base import UserError, count, reported, shortened
from ...base.buckets import in_buckets
from ...base.reading import LargeFile, read_json
from ...options.prices import Packing
from ...runtime.batch import IGNORED_LABEL, Samples
from .conversations import Encoder, PairEncoder
from .dataset import FOLDER, cached_arrays
from .source import InPasses
from .templates import open_template
from .text_files import JSON_SUFFIXES, decompressed_name, look, require_no_copies
from .tokenizer import end_of_text, load_tokenizer

LAYOUT = 3  # version of the cached rows; changing it rebuilds them
NAMES = {"train": "train", "valid": "dev"}  # split -> PaddleNLP's name of its file or folder
# Remarks on a line: subject and text.
REMARKS: dict[str, tuple[str, str]] = read_json(Path(__file__).with_name("remarks.json"))
MOST_NAMED = 3  # lines in a note
MOST_KEYS = 100  # counted keys, as lines without a common form may have any number
WORTH_PACKING = 0.5  # filled share of the rows below which packing halves the time and a note suggests it
WINDOW = 500  # samples that PaddleNLP's greedy rule considers together
Rows = list[list[int]]  # sample numbers of each row


class TuningFiles(NamedTuple):
    """Files of a split, and skipped files of its folder with the reasons."""

    files: list[Path]
    left_out: list[str]


def tuning_files(data: Path, split: str) -> TuningFiles:
    """The files of a split: `train.json` or `train/*` in a folder, or a file that is the training data itself.

    They hold JSON lines, with the endings JSON_SUFFIXES, and may be compressed; in a folder `train`, JSON lines may
    have any name. Raises UserError."""
    name = NAMES.get(split, split)
    if data.is_file():
        return TuningFiles([data], [])
    if not data.is_dir():
        lacks = f"has no {name} split" if data.exists() else "no such folder, and built-in data sets are not loaded"
        raise UserError(f"dataset_name_or_path: {data}: {lacks}; give a folder with {name}.json")
    named = ((file, decompressed_name(file)) for file in _listed(data) if file.is_file())
    whole = [file for file, plain in named if plain.stem == name and plain.suffix.lower() in JSON_SUFFIXES]
    if len(whole) > 1:
        both = " and ".join(file.name for file in whole)
        raise UserError(f"dataset_name_or_path: {data}: has {both} for one split; keep one")
    if whole:
        return TuningFiles(whole, [])
    reasons = {file: _left_out(file) for file in _listed(data / name) if file.name != FOLDER}
    files = [file for file, reason in reasons.items() if reason is None]
    require_no_copies(files)
    left_out = [f"{file} ({reason})" for file, reason in reasons.items() if reason]
    if not files:
        rest = f"; skipped: {left_out[0]}" if left_out else ""
        raise UserError(
            f"dataset_name_or_path: {data}: has neither {name}.json nor a folder {name} of .json files{rest}"
        )
    return TuningFiles(files, left_out)


def _listed(folder: Path) -> list[Path]:
    """Raises UserError."""
    with reported(f"dataset_name_or_path: {folder}: cannot be read"):
        return sorted(folder.iterdir()) if folder.is_dir() else []


def _left_out(file: Path) -> str | None:
    """The reason to skip a file of a split's folder; None: read it, or report its fault because of its name."""
    try:
        if decompressed_name(file).suffix.lower() in JSON_SUFFIXES and file.is_file():
            return None
        return None if look(file).json_lines else "holds no JSON lines"
    except UserError as error:
        return str(error).removeprefix(f"{file}: ")


class Lengths(NamedTuple):
    """Statistics of the rows."""

    document_tokens: float  # mean length of a token's document
    filled: float  # share of tokens without padding
    learnt: float  # share of tokens that have a label


@dataclass(frozen=True)
class RowLayout:
    """Options that turn samples into rows of tokens."""

    seq_length: int
    vocab_size: int  # the model's, which has no larger token
    src_length: int = 1024  # most tokens of a prompt
    chat_template: str | None = None
    all_learnt: bool = False  # prompts are learnt as well
    packing: Packing = "none"
    pairs: bool = False  # each line has a chosen and a rejected answer, which share a row
    keep: bool = True  # rows stay on disk next to the data


class TuningData(InPasses):
    """A split of a fine-tuning data set. Pass p has its rows in the order of PaddleNLP's sampler, as `InPasses` says.

    A row holds one sample, or several (`packing`), and padding at the end.
    """

    def __init__(
        self,
        data: Path,
        tokenizer: Path,
        layout: RowLayout,
        global_batch: int,
        split: str = "train",
        on_identity: Callable[[dict[str, Any]], object] = lambda identity: None,
    ):
        """`on_identity` receives the data's identity before rows are made, which may take minutes. Raises
        UserError with the file and the line of each fault."""
        seq_length, packing, pairs = layout.seq_length, layout.packing, layout.pairs
        self._files, self._left_out = tuning_files(data, split)
        tokens = load_tokenizer(tokenizer)
        template = open_template(layout.chat_template, tokenizer)
        end = None if template else end_of_text(tokens, tokenizer)
        self._end_notes = [end.note] if end and end.note else []
        kind = PairEncoder if pairs else Encoder
        most_source = min(layout.src_length, seq_length)
        encoder = kind(tokens, template, end.token if end else 0, most_source, seq_length, layout.all_learnt)
        checksums = [LargeFile(file).checksum() for file in self._files]
        made_from: dict[str, Any] = {
            "data": f"{len(self._files)} files with {sum(LargeFile(file).size_bytes for file in self._files)} bytes",
            "checksums": " ".join(f"{checksum:08x}" for checksum in checksums),
            "tokenizer": f"{crc32(tokens.to_str().encode()):08x}",
            "chat_template": f"{crc32(getattr(template, 'text', '').encode()):08x}",
            "special_tokens": dict(getattr(template, "special_tokens", {})),
            "split_special_tokens": tokens.encode_special_tokens,
            "end": end.token if end else 0,
            "seq_length": seq_length,
            "src_length": layout.src_length,
            "all_learnt": layout.all_learnt,
            "packing": packing,
            "layout": LAYOUT,
        } | ({"pairs": 1} if pairs else {})
        super().__init__(global_batch, made_from, shuffle=split == "train")
        on_identity(self.identity)
        first, origin = self._files[0], made_from | {"vocab_size": layout.vocab_size}
        build = partial(_build, encoder, self._files, layout)
        rows = cached_arrays(first.parent / FOLDER, first.stat().st_uid, origin, build, layout.keep)
        self._tokens, self._pieces, self._rows, self._remarks, unread = rows
        self._unread: dict[str, int] = loads(bytes(np.asarray(unread[0 : len(unread)])[:, 0].tolist()))
        self.packed = packing != "none" or pairs
        self._pairs = int(np.asarray(self._rows[0 : len(self._rows)])[:, 1].max()) // 2 if pairs else 0  # most in a row
        # Log-probabilities of the answers by the reference model, in the order of rows; set by `Reference`.
        self.reference = np.zeros(len(self._pieces), np.float32)
        self._seq_length = seq_length

    @property
    def samples(self) -> int:
        """Rows of a pass."""
        return len(self._rows)

    @property
    def notes(self) -> list[str]:
        """Notes for the user on the samples."""
        remarks = np.asarray(self._remarks[0 : len(self._remarks)])
        notes = []
        if left_out := self._left_out:
            named = ", ".join(left_out[:MOST_NAMED])
            notes.append(
                f"{count(len(left_out), 'file')} skipped: {named}{', …' if len(left_out) > MOST_NAMED else ''}"
            )
        if self._unread:
            counted = ", ".join(f"{shortened(key)} ({lines})" for key, lines in self._unread.items())
            notes.append(f"keys that are not read, each with its number of lines: {counted}")
        for kind, (subject, what) in enumerate(REMARKS.values()):
            lines = remarks[remarks[:, 2] == kind]
            if len(lines):
                named = ", ".join(f"{self._files[file]}: line {line}" for file, line, _ in lines[:MOST_NAMED].tolist())
                notes.append(f"{count(len(lines), subject)} {what}: {named}{', …' if len(lines) > MOST_NAMED else ''}")
        filled = np.asarray(self._rows[0 : self.samples])[:, 2].sum() / (self.samples * self._seq_length)
        contents = count(len(self._pieces) // 2, "pair") if self._pairs else count(len(self._pieces), "sample")
        if self.packed:
            notes.append(f"{contents} in {count(self.samples, 'row')}, which they fill to {filled:.1%}")
        elif filled < WORTH_PACKING:
            notes.append(f"rows are filled to {filled:.1%} ({contents}); several share a row with --packing best_fit")
        return [*notes, *self._end_notes]

    @property
    def lengths(self) -> Lengths:
        """Lengths over all rows."""
        rows, pieces, tokens = (np.asarray(each[0 : len(each)]) for each in (self._rows, self._pieces, self._tokens))
        length, tokens_held = self._seq_length, rows[:, 2].sum()
        squares = ((pieces[:, 1] - 1.0) ** 2).sum() + ((length - rows[:, 2]) ** 2.0).sum()  # padding is one document
        starts = np.zeros(len(tokens), bool)
        starts[pieces[:, 0]] = True  # no token before predicts it
        return Lengths(
            squares / (len(rows) * length) if self.packed else length,
            tokens_held / (len(rows) * length),
            float(((tokens[:, 0] >= 0) & ~starts).sum() / (len(rows) * length)),
        )

    def filled(self, step: int) -> float:
        """Share of a step's tokens without padding."""
        rows = (self.index(self.first_sample(step) + row) for row in range(self.global_batch))
        tokens = sum(int(self._rows[row : row + 1][0][2]) for row in rows)
        return tokens / (self.global_batch * self._seq_length)

    def _batch(self, indices: Sequence[int]) -> Samples:
        shape = len(indices), self._seq_length
        ids, labels = np.zeros(shape, np.int64), np.full(shape, IGNORED_LABEL)
        ends = np.full(shape, self._seq_length)
        pairs = np.zeros((len(indices), self._pairs, 4), np.float32)
        for row, index in enumerate(indices):
            first, count, _ = np.asarray(self._rows[index : index + 1])[0].tolist()
            start = 0
            for number, (offset, length) in enumerate(np.asarray(self._pieces[first : first + count]).tolist()):
                tokens = np.asarray(self._tokens[offset : offset + length])[:, 0]
                stop = start + length - 1
                ids[row, start:stop] = np.where(tokens < 0, ~tokens, tokens)[:-1]
                labels[row, start:stop] = np.where(tokens < 0, IGNORED_LABEL, tokens)[1:]
                ends[row, start:stop] = stop
                if self._pairs:
                    pairs[row, number // 2, number % 2 :: 2] = self.reference[first + number], (tokens[1:] >= 0).sum()
                start = stop
        return Samples(ids, labels, ends if self.packed else None, pairs if self._pairs else None)

    def place_in_reference(self, row: int) -> slice:
        """The entries of `reference` that belong to a row of the data."""
        first, count, _ = np.asarray(self._rows[row : row + 1])[0].tolist()
        return slice(first, first + count)


def _build(encoder: Encoder, files: Sequence[Path], layout: RowLayout) -> list[NDArray[np.int64]]:
    """Tokens [tokens, 1]; of each sample, in the order of rows, where its tokens begin and how many they are; of each
    row its first sample, how many it has, and its tokens; remarks: file, line and kind; keys that are not read and the
    number of their lines, as bytes of JSON. Raises UserError."""
    parts: list[NDArray[np.int64]] = []
    remarks: list[tuple[int, int, int]] = []
    faults: list[str] = []
    unread = Counter[str]()
    together = encoder.together
    kinds = {name: number for number, name in enumerate(REMARKS)}
    stream = encoder.samples(files)
    while samples := tuple(islice(stream, together)):
        line = samples[0].line
        largest = max(int(np.maximum(each.tokens, ~each.tokens).max(initial=0)) for each in samples)
        if largest >= layout.vocab_size and not faults:
            faults.append(
                f"{files[line.file]}: line {line.number}: has token {largest}, but the model's vocab_size is "
                f"{layout.vocab_size}; take the model's own tokenizer"
            )
        unread.update(key for key in sorted(set(line.unread)) if key in unread or len(unread) < MOST_KEYS)
        if not all(sample.learns for sample in samples):
            remarks.append((line.file, line.number, kinds["masked" if line.masked else "cut_away"]))
            continue
        lacks = {name for sample in samples for name, number in sample.losses._asdict().items() if number}
        remarks += [(line.file, line.number, kinds[name]) for name in kinds if name in lacks]
        parts += [sample.tokens for sample in samples]
    if faults:
        raise UserError(faults)
    if not parts:
        lost = f"; {files[remarks[0][0]]}: line {remarks[0][1]} is the first" if remarks else ""
        raise UserError(
            f"{files[0]}: holds no sample with anything to learn within src_length and max_length ({len(remarks)} have "
            f"none left{lost}); give other data or longer samples"
        )
    sizes = np.array([len(piece) for piece in parts])
    places = sizes.cumsum() - sizes
    rows = pack((sizes - 1).reshape(-1, together).sum(1).tolist(), layout.seq_length, layout.packing)
    rows = [[together * number + each for number in row for each in range(together)] for row in rows]
    order = np.array([number for row in rows for number in row])
    counts = np.array([len(row) for row in rows])
    tokens_held = [int((sizes[row] - 1).sum()) for row in rows]
    counted = dict(sorted(unread.items(), key=lambda item: (-item[1], item[0])))
    return [
        np.concatenate(parts)[:, None],
        np.stack([places[order], sizes[order]], axis=1),
        np.stack([counts.cumsum() - counts, counts, tokens_held], axis=1),
        np.array(remarks, np.int64).reshape(-1, 3),
        np.array([*dumps(counted).encode()], np.int64)[:, None],
    ]


def pack(lengths: Sequence[int], room: int, packing: Packing) -> Rows:
    """Rows of samples that are each at most `room` long; every sample is whole and appears once."""
    if packing == "none":
        return [[number] for number in range(len(lengths))]
    if packing == "in_order":
        return in_buckets(range(len(lengths)), lengths, room)  # PaddleNLP's zero_padding
    if packing == "greedy":
        numbers = range(len(lengths))
        windows = (numbers[first : first + WINDOW] for first in range(0, len(lengths), WINDOW))
        return [row for window in windows for row in _greedy(lengths, room, window)]
    return _best_fit(lengths, room)


def _greedy(lengths: Sequence[int], room: int, numbers: range) -> Rows:
    """PaddleNLP's greedy_zero_padding: a sample goes to the row with most free space, or opens a new row."""
    rows: Rows = [[]]
    left = [room]
    for number in numbers:
        row = left.index(max(left))
        if lengths[number] > left[row]:
            row = len(rows)
            rows.append([])
            left.append(room)
        rows[row].append(number)
        left[row] -= lengths[number]
    return rows


def _best_fit(lengths: Sequence[int], room: int) -> Rows:
    """Best fit decreasing: the longest sample first, each into the row that it fills best. Rows are in the order of
    their first sample in the data."""
    rows: Rows = []
    open_rows: list[tuple[int, int]] = []  # (free space, row), sorted
    for number in sorted(range(len(lengths)), key=lambda each: (-lengths[each], each)):
        position = bisect_left(open_rows, (lengths[number], -1))
        if position < len(open_rows):
            left, row = open_rows.pop(position)
            rows[row].append(number)
        else:
            left, row = room, len(rows)
            rows.append([number])
        insort(open_rows, (left - lengths[number], row))
    return sorted((sorted(row) for row in rows), key=lambda row: row[0])
