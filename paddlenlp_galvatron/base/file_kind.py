"""Kinds of files, recognised by their first bytes, because a file name may be wrong."""

import codecs
import json
from pathlib import Path
from typing import NamedTuple

HEAD_BYTES = 2**16
TAR_MAGIC = slice(257, 262)  # bytes of a tar archive's magic number


class Kind(NamedTuple):
    """A file that is not plain UTF-8 text."""

    fault: str  # "is a PDF", for errors
    remedy: str
    codec: str | None = None  # pyarrow's name of the compression, where pyarrow can decompress it
    encoding: str | None = None  # Python's name of the text's encoding


# First bytes, written as Latin-1 characters. The first kind that matches is used.
_ROWS = json.loads(Path(__file__).with_name("file_kinds.json").read_text())
BEGINNINGS = {
    begin.encode("latin-1"): Kind(row["fault"], row["remedy"], row.get("codec"))
    for row in _ROWS
    for begin in row["begins"]
}
PARQUET = BEGINNINGS[b"PAR1"]
TAR = Kind("is an archive (tar)", "unpack it and name the files inside")
NULS = Kind("has NUL bytes, which text never has", "is it the right file, and whole?")
BYTE_ORDER_MARKS = {  # UTF-32 first: its mark starts with the mark of UTF-16
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
WIDE = ("utf-32-le", "utf-32-be", "utf-16-le", "utf-16-be")


def kind_of(head: bytes) -> Kind | None:
    """The kind of a file whose first HEAD_BYTES (or all bytes) are `head`. None: it may be text in UTF-8, with or
    without a byte order mark, or in another encoding that extends ASCII."""
    for beginning, kind in BEGINNINGS.items():
        if head.startswith(beginning):
            return kind
    if head[TAR_MAGIC] == b"ustar":
        return TAR
    for mark, encoding in BYTE_ORDER_MARKS.items():
        if head.startswith(mark):
            return _text_in(encoding)
    if b"\0" not in head:
        return None
    return next((_text_in(encoding) for encoding in WIDE if _reads_as(head, encoding)), NULS)


def _text_in(encoding: str) -> Kind:
    return Kind(f"is {encoding.upper()} text", f"convert it: iconv -f {encoding} -t utf-8", encoding=encoding)


def _reads_as(head: bytes, encoding: str) -> bool:
    """Whether all characters are printable or white space and at least one is ASCII; in the wrong byte order none
    is."""
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(head)  # the last character may be cut off
    except UnicodeDecodeError:
        return False
    return any(map(str.isascii, text)) and all(char.isprintable() or char.isspace() for char in text)
