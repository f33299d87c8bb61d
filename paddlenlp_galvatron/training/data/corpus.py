"""Text into a Megatron-compatible data set: finds documents in files, tokenises them, writes `.bin` and `.idx`."""

from __future__ import annotations

import io
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from ...base import UserError, reported, shortened
from ...base.reading import parse_json, read_text
from ...base.writing import locked, make_folder, to_disk, whole_file, write_text
from .dataset import dataset_files
from .text_files import (
    COMPRESSED_SUFFIXES,
    JSON_SUFFIXES,
    UTF8,
    Look,
    decoded,
    decompressed_name,
    look,
    read_lines,
    read_whole,
    require_no_copies,
)
from .tokenizer import encode, encode_limited, largest_id

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")  # of text in folders; other kinds and named files may have any
NOT_STANDARD_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
BATCH_BYTES = 1 << 20  # text tokenised at once: enough for the tokenizer's threads, little memory
BATCH_ROWS = 1000  # rows of a Parquet file read at once
LARGEST_TEXT = 1 << 30  # characters of a file that is one document; tokenising needs about 100 bytes per token
UINT16_VOCAB = 65500  # Megatron and PaddleNLP store ids of smaller vocabularies in two bytes, others in four


class Document(NamedTuple):
    text: str
    size_bytes: int  # its size in the file, for progress
    place: str  # file and line number


@dataclass(frozen=True)
class Corpus:
    """Documents of text, JSON lines and Parquet files, in order. Each iteration reads the files again."""

    files: tuple[Path, ...]
    text_key: str = "text"  # field of a JSON line that holds the document
    limit_bytes: int | None = None  # stops after the document that exceeds it
    encoding: str = UTF8

    @property
    def size_bytes(self) -> int | None:
        """Bytes of text to read, for progress; None: unknown, as the files' names indicate compression."""
        if any(file.suffix.lower() in (*COMPRESSED_SUFFIXES, ".parquet") for file in self.files):
            return self.limit_bytes
        try:
            total = sum(file.stat().st_size for file in self.files)
        except OSError as error:
            raise UserError(f"input: {error.filename}: cannot be read: {error.strerror}") from None
        return total if self.limit_bytes is None else min(total, self.limit_bytes)

    def __iter__(self) -> Iterator[Document]:
        read_bytes = 0
        for file in self.files:
            for document in _documents(file, self.text_key, self.encoding):
                yield document
                read_bytes += document.size_bytes
                if self.limit_bytes is not None and read_bytes >= self.limit_bytes:
                    return


class Written(NamedTuple):
    """Content of a data set."""

    documents: int
    tokens: int


class CorpusFiles(NamedTuple):
    """Files to read, each once, in a fixed order, and other files of folders with the reasons to skip them."""

    files: tuple[Path, ...]
    left_out: dict[Path, str]


def find_files(inputs: Sequence[str | Path], encoding: str = UTF8) -> CorpusFiles:
    """Named files, and files in folders that hold text.

    Raises UserError if a named file or a file with the ending of a text cannot be read.
    """
    files: dict[Path, None] = {}
    left_out: dict[Path, str] = {}
    for path in map(Path, inputs):
        try:
            for file, reason in _inside(path, encoding):
                if reason:
                    left_out[file] = reason
                else:
                    files[file] = None
        except OSError as error:
            raise UserError(f"input: {error.filename}: cannot be read: {error.strerror}") from None
    require_no_copies(files)
    if not files:
        first = next((f"; {file}: {reason}" for file, reason in left_out.items()), "")
        raise UserError(f"input: {', '.join(map(str, inputs))} holds no file of text{first}")
    return CorpusFiles(tuple(files), left_out)


def _inside(path: Path, encoding: str) -> Iterator[tuple[Path, str | None]]:
    """The file, or all files in the folder, each with the reason to skip it. Raises UserError; OSError if files cannot
    be listed."""
    if not path.is_dir():
        if not path.exists():
            raise UserError(f"input: {path}: no such file or folder")
        _look(path, encoding)
        yield path, None
        return

    def refuse(error: OSError) -> None:
        raise error

    walk = os.walk(path, onerror=refuse)
    inside = (Path(folder, name) for folder, folders, names in walk for name in (*folders, *names))
    for file in sorted(file for file in inside if not file.is_dir() or file.is_symlink()):
        yield file, _left_out(file, path.resolve(), encoding)


def _look(file: Path, encoding: str) -> Look:
    """`look`, which also raises UserError if the start of the file does not match the encoding, instead of hours
    later."""
    seen = look(file, encoding)
    decoded(seen.text, encoding, f"{file}: ")
    return seen


def _left_out(file: Path, root: Path, encoding: str) -> str | None:
    """The reason to skip a file of a folder; None: read it. Raises UserError if it has the ending of a text but cannot
    be read as text."""
    if not file.is_file():
        return "a pipe, a device, or a link to a folder or to nothing"
    if not file.resolve().is_relative_to(root):
        return "a link out of the folder"
    try:
        seen = _look(file, encoding)
    except UserError as error:
        if decompressed_name(file).suffix.lower() in (*TEXT_SUFFIXES, *JSON_SUFFIXES):
            raise
        return str(error).removeprefix(f"{file}: ")
    if seen.json_lines or seen.parquet or seen.suffix in TEXT_SUFFIXES:
        return None
    return f"neither JSON lines nor named {', '.join(TEXT_SUFFIXES)}"


def standard_library() -> tuple[Path, ...]:
    """Sources of the running Python's standard library without its tests: real text that every machine has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = (p for p in root.rglob("*.py") if not NOT_STANDARD_LIBRARY.intersection(p.relative_to(root).parts))
    files = tuple(sorted(sources))
    if not files:
        raise UserError(f"{root}: this Python keeps no sources of its standard library; name text of your own")
    return files


def write_dataset(
    documents: Iterable[Document], prefix: Path, tokenizer: Tokenizer, end: int, tokenizer_file: Path | None = None
) -> Written:
    """Tokenise documents and write `prefix.bin` and `prefix.idx`, each document closed by the token `end`.

    With `tokenizer_file` also write the tokenizer that was trained here; an existing other tokenizer is kept, as other
    data may need it. Writes all files or none. Raises UserError.
    """
    bin_file, idx_file = dataset_files(prefix)
    files = [file for file in (bin_file, idx_file, tokenizer_file) if file]
    with reported(f"{prefix}: cannot be written"), _new_only_if_done(prefix.parents):
        make_folder(prefix.parent)
        with (
            locked(prefix, file=prefix.with_name(f".{prefix.name}.lock")),
            _new_only_if_done(files),
            whole_file(idx_file) as new_idx,  # renamed last
            whole_file(bin_file) as new_bin,
        ):
            if tokenizer_file:
                _require_same(tokenizer, tokenizer_file)
            tokenised = _tokenised(documents, tokenizer, encode if tokenizer_file else encode_limited)
            written = _write(tokenised, Path(new_bin.name), Path(new_idx.name), largest_id(tokenizer), end)
            if tokenizer_file:
                save_tokenizer(tokenizer, tokenizer_file)
            idx_file.unlink(missing_ok=True)  # never an old index with new data
            to_disk(prefix.parent)
    return written


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Write a `tokenizer.json` atomically. Raises UserError if another tokenizer exists there, as other data may need
    it."""
    _require_same(tokenizer, path)
    write_text(path, tokenizer.to_str(pretty=True))


def _require_same(tokenizer: Tokenizer, path: Path) -> None:
    if path.exists() and read_text(path) != tokenizer.to_str(pretty=True):
        raise UserError(f"{path}: exists and is another tokenizer; use it (--tokenizer {path}) or write elsewhere")


@contextmanager
def _new_only_if_done(paths: Sequence[Path]) -> Iterator[None]:
    """On failure, remove new files and new empty folders."""
    new = [path for path in paths if not path.exists()]
    try:
        yield
    except BaseException:
        for path in new:
            with suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()
        raise


def _write(
    tokenised: Iterable[tuple[Document, list[int]]], bin_file: Path, idx_file: Path, largest: int, end: int
) -> Written:
    """Raises UserError, OSError."""
    # Imported here: PaddleNLP takes seconds, and the command line imports this file.
    from paddlenlp.data.indexed_dataset import MMapIndexedDatasetBuilder

    builder = MMapIndexedDatasetBuilder(str(bin_file), dtype=np.uint16 if largest + 1 < UINT16_VOCAB else np.int32)
    written = Written(0, 0)
    for document, ids in tokenised:
        if max(ids, default=0) > largest:
            raise UserError(
                f"tokenizer: makes token {max(ids)} of {document.place}, which its vocabulary does not have; is "
                "tokenizer.json whole?"
            )
        builder.add_item([*ids, end])
        builder.end_document()
        written = Written(written.documents + 1, written.tokens + len(ids) + 1)
    if not written.documents:
        raise UserError("input: holds no text; is this the right folder, and --text_key the right field?")
    with redirect_stdout(io.StringIO()):  # the builder prints its own summary
        builder.finalize(str(idx_file))
    return written


def _tokenised(
    documents: Iterable[Document], tokenizer: Tokenizer, encode: Callable[[Tokenizer, list[str]], list[list[int]]]
) -> Iterator[tuple[Document, list[int]]]:
    batch: list[Document] = []
    size_bytes = 0
    for document in documents:
        batch.append(document)
        size_bytes += document.size_bytes
        if size_bytes >= BATCH_BYTES:
            yield from zip(batch, encode(tokenizer, [item.text for item in batch]), strict=True)
            batch, size_bytes = [], 0
    yield from zip(batch, encode(tokenizer, [item.text for item in batch]), strict=True)


def _documents(file: Path, text_key: str, encoding: str) -> Iterator[Document]:
    """Documents of one file that hold any text. Raises UserError."""
    seen = look(file, encoding)
    if seen.parquet:
        yield from _rows(file, text_key)
    elif seen.json_lines:
        yield from _json_lines(file, text_key, encoding)
    else:
        content = read_whole(file, encoding, LARGEST_TEXT)
        if content.strip():
            yield Document(content, len(content.encode()), str(file))


def _json_lines(file: Path, text_key: str, encoding: str) -> Iterator[Document]:
    for number, line in read_lines(file, encoding):
        where = f"{file}: line {number}"
        if not line.strip():
            continue
        record = parse_json(decoded(line, encoding, f"input: {where}: "), f"input: {where} is not one JSON object")
        text = record.get(text_key) if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise UserError(f'input: {where} has no text "{text_key}"; name its field by --text_key')
        if text.strip():
            yield Document(text, len(line.encode()), where)


def _rows(file: Path, text_key: str) -> Iterator[Document]:
    """Documents of a Parquet file. Raises UserError."""
    import pyarrow  # here, as its import takes time
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(file) as table:
            number = 0
            for batch in table.iter_batches(BATCH_ROWS, columns=[text_key]):
                for row in batch.to_pylist():
                    number += 1
                    text = row.get(text_key)
                    if not isinstance(text, str):
                        raise UserError(f'input: {file}: row {number} has no text "{text_key}"; name it by --text_key')
                    if text.strip():
                        yield Document(text, len(text.encode()), f"{file}: row {number}")
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise UserError(f"input: {file}: cannot be read as Parquet: {shortened(str(error), 200)}") from None
