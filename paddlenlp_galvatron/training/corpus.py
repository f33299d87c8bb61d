"""Text into a Megatron-compatible data set: finds documents in files, tokenises them, writes `.bin` and `.idx`."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from ..base.errors import UserError
from ..base.writing import write_text

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")  # taken from folders; a file that is named itself may have any suffix
JSON_LINES_SUFFIXES = (".jsonl", ".json")
NOT_STANDARD_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
BATCH_BYTES = 1 << 20  # text tokenised at once: enough for the tokenizer's threads, little memory
UINT16_VOCAB = 65500  # Megatron and PaddleNLP store ids of smaller vocabularies in two bytes, others in four


class Document(NamedTuple):
    text: str
    size_bytes: int  # what it takes in its file, for progress


@dataclass(frozen=True)
class Corpus:
    """Documents of text and JSON-lines files, in order. Iterating reads the files again each time."""

    files: tuple[Path, ...]
    text_key: str = "text"  # field of a JSON line that holds the document
    limit_bytes: int | None = None  # the document that passes it is the last

    @property
    def size_bytes(self) -> int:
        total = sum(file.stat().st_size for file in self.files)
        return total if self.limit_bytes is None else min(total, self.limit_bytes)

    def __iter__(self) -> Iterator[Document]:
        read_bytes = 0
        for file in self.files:
            for document in _documents(file, self.text_key):
                yield document
                read_bytes += document.size_bytes
                if self.limit_bytes is not None and read_bytes >= self.limit_bytes:
                    return


class Written(NamedTuple):
    """What a data set holds."""

    documents: int
    tokens: int


def find_files(inputs: Sequence[str | Path]) -> tuple[Path, ...]:
    """Files named, and in folders those with a known suffix, each once, in a fixed order. Raises UserError."""
    files: dict[Path, None] = {}
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.suffix in TEXT_SUFFIXES + JSON_LINES_SUFFIXES)
            files.update(dict.fromkeys(p for p in inside if p.is_file()))
        elif path.is_file():
            files[path] = None
        else:
            raise UserError(f"input: {path}: no such file or folder")
    if not files:
        known = ", ".join(TEXT_SUFFIXES + JSON_LINES_SUFFIXES)
        raise UserError(f"input: {', '.join(map(str, inputs))} holds no file that ends in {known}")
    return tuple(files)


def standard_library() -> tuple[Path, ...]:
    """Sources of the running Python's standard library without its tests: real text that every machine has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = (p for p in root.rglob("*.py") if not NOT_STANDARD_LIBRARY.intersection(p.relative_to(root).parts))
    files = tuple(sorted(sources))
    if not files:
        raise UserError(f"{root}: this Python keeps no sources of its standard library; name text of your own")
    return files


def write_dataset(documents: Iterable[Document], prefix: Path, tokenizer: Tokenizer, end: int) -> Written:
    """Tokenise documents and write `prefix.bin` and `prefix.idx`, each document closed by the token `end`.

    Both files are there whole or the `.idx` is not there. Raises UserError.
    """
    # Deferred: PaddleNLP takes seconds to import, and the command line imports this file.
    from paddlenlp.data.indexed_dataset import MMapIndexedDatasetBuilder

    bin_file, idx_file = dataset_files(prefix)
    ids = np.uint16 if tokenizer.get_vocab_size() < UINT16_VOCAB else np.int32
    written = Written(0, 0)
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=prefix.parent, prefix=f".{prefix.name}.") as folder:
            new_bin, new_idx = Path(folder, "data.bin"), Path(folder, "data.idx")
            builder = MMapIndexedDatasetBuilder(str(new_bin), dtype=ids)
            for encoded in _encode(documents, tokenizer):
                builder.add_item([*encoded, end])
                builder.end_document()
                written = Written(written.documents + 1, written.tokens + len(encoded) + 1)
            if not written.documents:
                raise UserError("input: holds no text")
            with contextlib.redirect_stdout(io.StringIO()):  # the builder prints its own summary
                builder.finalize(str(new_idx))
            for file in (new_bin, new_idx):
                _make_durable(file)
            idx_file.unlink(missing_ok=True)  # never an old index beside new data
            new_bin.replace(bin_file)
            new_idx.replace(idx_file)
    except OSError as error:
        raise UserError(f"{prefix}: cannot be written: {error.strerror}") from None
    return written


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Write a `tokenizer.json` whole. Another one in its place is kept, as other data may need it: UserError."""
    text = tokenizer.to_str(pretty=True)
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise UserError(f"{path}: exists and is another tokenizer; use it (--tokenizer {path}) or write elsewhere")
    write_text(path, text)


def dataset_files(prefix: Path) -> tuple[Path, Path]:
    """Paths of the tokens and of their index."""
    return prefix.with_name(f"{prefix.name}.bin"), prefix.with_name(f"{prefix.name}.idx")


def _encode(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[list[int]]:
    batch: list[str] = []
    size_bytes = 0
    for document in documents:
        batch.append(document.text)
        size_bytes += document.size_bytes
        if size_bytes >= BATCH_BYTES:
            yield from (encoding.ids for encoding in tokenizer.encode_batch(batch, add_special_tokens=False))
            batch, size_bytes = [], 0
    yield from (encoding.ids for encoding in tokenizer.encode_batch(batch, add_special_tokens=False))


def _documents(file: Path, text_key: str) -> Iterator[Document]:
    """Documents of one file that hold any text."""
    try:
        if file.suffix in JSON_LINES_SUFFIXES:
            yield from _json_lines(file, text_key)
        else:
            content = file.read_bytes()
            if content.strip():
                # A stray byte in a text of gigabytes must not stop the work; the mark U+FFFD stands for it.
                yield Document(content.decode("utf-8", errors="replace"), len(content))
    except OSError as error:
        raise UserError(f"input: {file}: cannot be read: {error.strerror}") from None


def _json_lines(file: Path, text_key: str) -> Iterator[Document]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise UserError(f"input: {file}: line {number} is not JSON: {error}; give one object a line") from None
            if not isinstance(record, dict) or not isinstance(record.get(text_key), str):
                raise UserError(f'input: {file}: line {number} has no text "{text_key}"; name its field by --text_key')
            if record[text_key].strip():
                yield Document(record[text_key], len(line))


def _make_durable(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
