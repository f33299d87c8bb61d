"""Text into a Megatron-compatible data set: finds documents in files, tokenises them, writes `.bin` and `.idx`."""

from __future__ import annotations

import io
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from ...base.errors import UserError
from ...base.locking import locked
from ...base.reading import LARGEST_BYTES, open_file, parse_json, read_bytes, read_text
from ...base.text import printable
from ...base.writing import make_folder, to_disk, whole_file, write_text
from .dataset import dataset_files
from .tokenizer import encode, encode_limited, largest_id

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")  # taken from folders; a file that is named itself may have any suffix
JSON_LINES_SUFFIXES = (".jsonl", ".json")
NOT_STANDARD_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
BATCH_BYTES = 1 << 20  # text tokenised at once: enough for the tokenizer's threads, little memory
LARGEST_TEXT_BYTES = 1 << 30  # of a file that is one document; a token takes about 100 bytes while it is made
UINT16_VOCAB = 65500  # Megatron and PaddleNLP store ids of smaller vocabularies in two bytes, others in four


class Document(NamedTuple):
    text: str
    size_bytes: int  # its size in the file, for progress
    place: str  # its file, and its line there


@dataclass(frozen=True)
class Corpus:
    """Documents of text and JSON-lines files, in order. Iterating reads the files again each time."""

    files: tuple[Path, ...]
    text_key: str = "text"  # field of a JSON line that holds the document
    limit_bytes: int | None = None  # the document that passes it is the last

    @property
    def size_bytes(self) -> int:
        try:
            total = sum(file.stat().st_size for file in self.files)
        except OSError as error:
            raise UserError(f"input: {error.filename}: cannot be read: {error.strerror}") from None
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
    """Content of a data set."""

    documents: int
    tokens: int


def find_files(inputs: Sequence[str | Path]) -> tuple[Path, ...]:
    """Files named, and in folders those with a known suffix, each once, in a fixed order. Raises UserError."""
    files: dict[Path, None] = {}
    for name in inputs:
        try:
            files.update(dict.fromkeys(_inside(Path(name))))
        except OSError as error:
            raise UserError(f"input: {error.filename}: cannot be read: {error.strerror}") from None
    if not files:
        known = ", ".join(TEXT_SUFFIXES + JSON_LINES_SUFFIXES)
        raise UserError(f"input: {', '.join(map(str, inputs))} holds no file that ends in {known}")
    return tuple(files)


def _inside(path: Path) -> list[Path]:
    """Raises UserError; OSError: some of it cannot be read, which nobody wants left out unsaid."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f"input: {path}: no such file or folder")

    def refuse(error: OSError) -> None:
        raise error

    found = (Path(folder, name) for folder, _, names in os.walk(path, onerror=refuse) for name in names)
    texts = sorted(file for file in found if file.suffix in TEXT_SUFFIXES + JSON_LINES_SUFFIXES)
    root = path.resolve()
    inside = [file for file in texts if file.is_file() and file.resolve().is_relative_to(root)]
    if others := len(texts) - len(inside):
        first = min(set(texts) - set(inside))
        said = f"{others} links out of it, pipes and the like are left out, the first is {first}"
        sys.stderr.write(f"note: input: {printable(f'{path}: {said}')}\n")
    return inside


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

    With `tokenizer_file` the tokenizer, too, which was trained here; another one in its place is kept, as other data
    may need it. All of it is there in the end, or nothing new. Raises UserError.
    """
    bin_file, idx_file = dataset_files(prefix)
    own = [file for file in (bin_file, idx_file, tokenizer_file) if file]
    try:
        with _new_only_if_done(prefix.parents):
            make_folder(prefix.parent)
            with (
                locked(prefix, file=prefix.with_name(f".{prefix.name}.lock")),
                _new_only_if_done(own),
                whole_file(idx_file) as new_idx,  # gets its name last
                whole_file(bin_file) as new_bin,
            ):
                if tokenizer_file:
                    _require_same(tokenizer, tokenizer_file)
                tokenised = _tokenised(documents, tokenizer, encode if tokenizer_file else encode_limited)
                written = _write(tokenised, Path(new_bin.name), Path(new_idx.name), largest_id(tokenizer), end)
                if tokenizer_file:
                    save_tokenizer(tokenizer, tokenizer_file)
                idx_file.unlink(missing_ok=True)  # never an old index beside new data
                to_disk(prefix.parent)
    except OSError as error:
        raise UserError(f"{prefix}: cannot be written: {error.strerror}") from None
    return written


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Write a `tokenizer.json` whole. Another one in its place is kept, as other data may need it: UserError."""
    _require_same(tokenizer, path)
    write_text(path, tokenizer.to_str(pretty=True))


def _require_same(tokenizer: Tokenizer, path: Path) -> None:
    if path.exists() and read_text(path) != tokenizer.to_str(pretty=True):
        raise UserError(f"{path}: exists and is another tokenizer; use it (--tokenizer {path}) or write elsewhere")


@contextmanager
def _new_only_if_done(paths: Sequence[Path]) -> Iterator[None]:
    """If something fails, remove those files and empty folders that were not there before."""
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
    # Deferred: PaddleNLP takes seconds to import, and the command line imports this file.
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
            yield from zip(batch, encode(tokenizer, [one.text for one in batch]), strict=True)
            batch, size_bytes = [], 0
    yield from zip(batch, encode(tokenizer, [one.text for one in batch]), strict=True)


def _documents(file: Path, text_key: str) -> Iterator[Document]:
    """Documents of one file that hold any text. Raises UserError."""
    if file.suffix in JSON_LINES_SUFFIXES:
        yield from _json_lines(file, text_key)
    else:
        content = read_bytes(file, LARGEST_TEXT_BYTES)
        if content.strip():
            # A stray byte in a text of gigabytes must not stop the work; the mark U+FFFD stands for it.
            yield Document(content.decode("utf-8", errors="replace"), len(content), str(file))


def _json_lines(file: Path, text_key: str) -> Iterator[Document]:
    for number, line in enumerate(_lines(file), start=1):
        place = f"{file}: line {number}"
        if not line.strip():
            continue
        try:
            record = parse_json(line.decode("utf-8-sig"), f"input: {place} is not one JSON object")
        except UnicodeDecodeError as error:
            raise UserError(f"input: {place}: byte {error.start:,} is not UTF-8 text") from None
        if not isinstance(record, dict) or not isinstance(record.get(text_key), str):
            raise UserError(f'input: {place} has no text "{text_key}"; name its field by --text_key')
        if record[text_key].strip():
            yield Document(record[text_key], len(line), place)


def _lines(file: Path) -> Iterator[bytes]:
    """Raises UserError: it cannot be read, or a line is too long."""
    with open_file(file) as lines:
        try:
            while line := lines.readline(LARGEST_BYTES + 1):
                if len(line) > LARGEST_BYTES:
                    raise UserError(
                        f"input: {file}: a line has more than {LARGEST_BYTES:,} bytes; give one object a line"
                    )
                yield line
        except OSError as error:
            raise UserError(f"input: {file}: cannot be read: {error.strerror}") from None
