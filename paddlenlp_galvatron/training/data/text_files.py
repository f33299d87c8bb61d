"""Foreign text files: UTF-8 or a named encoding, plain or compressed, one text or JSON lines.

The first bytes decide the kind of a file. Other kinds are refused by name.
"""

import codecs
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from typing import IO, NamedTuple, cast

from ...base import UserError, shortened
from ...base.file_kind import BYTE_ORDER_MARKS, HEAD_BYTES, NULS, PARQUET, WIDE, Kind, kind_of
from ...base.reading import LARGEST_BYTES, open_file

UTF8 = "utf-8"
JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
COMPRESSED_SUFFIXES = (".gz", ".gzip", ".zst", ".zstd", ".bz2", ".lz4", ".xz")
JSON_OBJECT = re.compile(r'([^\n]*\n)?\s*\{\s*"')  # in the first or second line, as one may be damaged
JSON_LIST = re.compile(r"\s*\[\s*\{")
LINE_END, MARK = "\n", "\ufeff"  # MARK: of byte order
UNDECODABLE = "\udcff"  # stands for bytes that are not of the encoding: half a character, which no text has
MARKING = "galvatron-marking"  # handler of decoding errors: each becomes UNDECODABLE
UNREADABLE = re.compile("[\0\ud800-\udfff]")
PROOF = 8  # non-ASCII characters that are valid UTF-8; in other encodings fewer than one text in 10,000 has them

codecs.register_error(MARKING, lambda error: (UNDECODABLE, cast(UnicodeDecodeError, error).end))


def require_encoding(name: str) -> None:
    """Raise UserError: Python knows no encoding of text files by this name."""
    try:
        TextIOWrapper(BytesIO(b"\xff"), name, MARKING).read()
    except (LookupError, ValueError):
        raise UserError(f"encoding: {shortened(name)} is unknown; such names are utf-16, gbk, big5, latin-1") from None


class Look(NamedTuple):
    """The kind of a file by its first bytes."""

    codec: str | None  # the compression of the file
    suffix: str  # ending of the name in lower case, without the compression's
    json_lines: bool
    parquet: bool
    text: str = ""  # its beginning, for `decoded`


def look(path: Path, encoding: str | None = None) -> Look:
    """Look at the first bytes of a file. `encoding`: of its text, as `--encoding` names it; None: UTF-8, and there is
    no such option.

    Raises UserError: the file is neither text in this encoding nor Parquet, or is one JSON list.
    """
    head, codec = _head(path, None), None
    kind = kind_of(head)
    if kind and kind.codec:
        codec = kind.codec
        head = _head(path, codec)
        kind = kind_of(head)
    suffix = decompressed_name(path).suffix.lower()
    if kind is PARQUET and not codec:
        return Look(codec, suffix, json_lines=False, parquet=True)
    _require_text(f"{path}: {'decompressed, it' if codec else 'it'}", head, kind, encoding)
    text = codecs.getincrementaldecoder(encoding or UTF8)(MARKING).decode(head).removeprefix(MARK)
    if JSON_LIST.match(text):
        raise UserError(f"{path}: is one JSON list; write one object a line: jq -c '.[]'")
    return Look(codec, suffix, suffix in JSON_SUFFIXES or bool(JSON_OBJECT.match(text)), False, text)


def decompressed_name(path: Path) -> Path:
    """A file's path without the ending of a compression."""
    return path.with_suffix("") if path.suffix.lower() in COMPRESSED_SUFFIXES else path


def require_no_copies(files: Collection[Path]) -> None:
    """Raise UserError if a file is next to its compressed copy, as its text would be read twice."""
    for file in files:
        if (plain := decompressed_name(file)) != file and plain in files:
            raise UserError(f"{file}: is the compressed {plain.name}, which is also there; keep one")


def _require_text(file: str, head: bytes, kind: Kind | None, encoding: str | None) -> None:
    """Raise UserError for first bytes that are no text in this encoding."""
    named = codecs.lookup(encoding or UTF8).name
    if kind and kind.encoding:
        if kind.encoding != named:
            remedy = f"give --encoding {kind.encoding}" if encoding else kind.remedy
            raise UserError(f"{file} {kind.fault}; {remedy}")
    elif kind and not (kind is NULS and named in WIDE):
        raise UserError(f"{file} {kind.fault}; {kind.remedy}")
    elif named not in (UTF8, "utf-8-sig") and _is_utf8(head, 0 if named.startswith(("utf-16", "utf-32")) else PROOF):
        raise UserError(f"{file} is UTF-8 text, not {named.upper()}; read it without --encoding")
    elif named in BYTE_ORDER_MARKS.values() and head:
        raise UserError(f"{file} has no byte order mark; give --encoding {named}-le or {named}-be")


def _is_utf8(head: bytes, least: int) -> bool:
    """Whether bytes are UTF-8 without NUL, and have its byte order mark or at least `least` non-ASCII characters."""
    try:
        text = codecs.getincrementaldecoder(UTF8)().decode(head)
    except UnicodeDecodeError:
        return False
    enough = text.startswith(MARK) or sum(not character.isascii() for character in text) >= least
    return bool(head) and "\0" not in text and enough


def _head(path: Path, codec: str | None) -> bytes:
    with _opened(path, codec) as file:
        return file.read(HEAD_BYTES)


@contextmanager
def _opened(path: Path, codec: str | None) -> Iterator[IO[bytes]]:
    """A decompressed file. Raises UserError if it cannot be read or its compression is broken."""
    with open_file(path) as file:
        try:
            if codec is None:
                yield file
            else:
                import pyarrow  # slow import; unlike gzip.open and bz2.open, it refuses trailing data

                with pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), codec) as stream:
                    yield stream
        except (OSError, UnicodeError) as error:
            raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def read_lines(path: Path, encoding: str | None = None, largest: int = LARGEST_BYTES) -> Iterator[tuple[int, str]]:
    """Lines of a text file with their numbers, for `decoded`, without byte order marks. Raises UserError as `look`
    does, and for a line of more than `largest` characters."""
    with _text(path, encoding) as text:
        number = 0
        while line := text.readline(largest + 1):
            number += 1
            if len(line) > largest:
                raise UserError(f"{path}: line {number}: has more than {largest:,} characters; is it the right file?")
            yield number, line.removeprefix(MARK)  # on each line, as files may have been concatenated


def read_whole(path: Path, encoding: str | None, largest: int) -> str:
    """A file's text without byte order mark. Raises UserError as `look` and `decoded` do, and for more than `largest`
    characters."""
    content = StringIO(newline=LINE_END)  # grows with the file: a `read` of `largest` would take the memory at once
    with _text(path, encoding) as text:
        while block := text.read(HEAD_BYTES):
            content.write(block)
            if content.tell() > largest:
                raise UserError(f"{path}: has more than {largest:,} characters; is it the right file?")
    return decoded(content.getvalue().removeprefix(MARK), encoding, f"{path}: ")


@contextmanager
def _text(path: Path, encoding: str | None) -> Iterator[TextIOWrapper]:
    seen = look(path, encoding)
    if seen.parquet:
        raise UserError(f"{path}: it {PARQUET.fault}; {PARQUET.remedy}")
    with _opened(path, seen.codec) as file:
        yield TextIOWrapper(file, encoding or UTF8, MARKING, newline=LINE_END)


def decoded(text: str, encoding: str | None, where: str = "") -> str:
    """The text from `where`. Raises UserError for NULs, or bytes that are not of the encoding."""
    unreadable = UNREADABLE.search(text)
    if not unreadable:
        return text
    at = unreadable.start()
    if unreadable[0] == "\0":
        fault, remedy = "is a NUL", "is the file damaged?"
    else:
        fault = f"is not {(encoding or UTF8).upper()} text"
        remedy = "name its encoding, such as --encoding gbk" if encoding else "convert it: iconv -t utf-8 -f …"
    begin = text.rfind(LINE_END, 0, at) + 1
    line = f"line {text.count(LINE_END, 0, begin) + 1}: " if begin else ""
    raise UserError(f"{where}{line}character {at - begin + 1:,} {fault}; {remedy}")
