"""Kinds of files, recognised by their first bytes, as a name may say anything."""

from __future__ import annotations

import codecs
from typing import NamedTuple

HEAD_BYTES = 2**16
TAR_MAGIC = slice(257, 262)  # where a tar archive has it


class Kind(NamedTuple):
    """A file that is not plain UTF-8 text."""

    fault: str  # "is a PDF", for errors
    remedy: str
    codec: str | None = None  # of compression, as pyarrow calls those that it can decompress
    encoding: str | None = None  # of text, as Python calls it


def _compressed(name: str, tool: str, codec: str | None = None) -> Kind:
    return Kind(f"is compressed ({name})", f"decompress it: {tool}", codec)


def _archive(name: str) -> Kind:
    return Kind(f"is an archive ({name})", "unpack it and name the files inside")


def _other(name: str) -> Kind:
    return Kind(f"is {name}", "convert it to text")


PARQUET = Kind("is a Parquet file", "convert it to JSON lines")
NULS = Kind("has NUL bytes, as no text has", "is it the right file, and whole?")
ZSTD = _compressed("zstd", "zstd -d", "zstd")
BEGINNINGS = {
    b"\x1f\x8b": _compressed("gzip", "gunzip", "gzip"),
    b"\x28\xb5\x2f\xfd": ZSTD,
    **{bytes([nibble]) + b"\x2a\x4d\x18": ZSTD for nibble in range(0x50, 0x60)},  # a skippable frame comes first
    **{b"BZh%d1AY&SY" % level: _compressed("bzip2", "bunzip2", "bz2") for level in range(1, 10)},
    b"\x04\x22\x4d\x18": _compressed("lz4", "lz4 -d", "lz4"),
    b"\xfd7zXZ\0": _compressed("xz", "unxz"),
    b"\xff\x06\0\0sNaPpY": _compressed("snappy", "snzip -d"),
    b"PK\3\4": _archive("zip, or a document that is one"),
    b"PK\5\6": _archive("zip"),
    b"7z\xbc\xaf\x27\x1c": _archive("7z"),
    b"Rar!\x1a\x07": _archive("RAR"),
    b"PAR1": PARQUET,
    b"ARROW1\0\0": _other("an Arrow file"),
    b"\xff\xff\xff\xff": _other("an Arrow stream or other binary data"),
    b"Obj\1": _other("an Avro file"),
    b"\x89HDF\r\n": _other("an HDF5 file"),
    b"\x93NUMPY": _other("a NumPy array"),
    b"SQLite format 3\0": _other("an SQLite database"),
    b"%PDF-": _other("a PDF"),
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": _other("an Office document"),
    b"{\\rtf": _other("an RTF document"),
    b"\x89PNG\r\n": _other("a picture (PNG)"),
    b"\xff\xd8\xff": _other("a picture (JPEG)"),
    b"GIF8": _other("a picture (GIF)"),
    b"\x7fELF": _other("a program (ELF)"),
    b"MMIDIDX\0": _other("the index of a Megatron data set"),
    b"TNTIDX\0": _other("the lazy index of a Megatron data set (TNTIDX)"),
    b"version https://git-lfs.github.com/": Kind("is a pointer of Git LFS, not the file", "fetch it: git lfs pull"),
}
BYTE_ORDER_MARKS = {  # UTF-32 first: its mark begins as that of UTF-16
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
WIDE = ("utf-32-le", "utf-32-be", "utf-16-le", "utf-16-be")


def kind_of(head: bytes) -> Kind | None:
    """The kind of a file that begins with `head`, HEAD_BYTES or all of it; None: nothing shows that it is not text
    in UTF-8, with or without its byte order mark, or in another encoding that extends ASCII."""
    for beginning, kind in BEGINNINGS.items():
        if head.startswith(beginning):
            return kind
    if head[TAR_MAGIC] == b"ustar":
        return _archive("tar")
    for mark, encoding in BYTE_ORDER_MARKS.items():
        if head.startswith(mark):
            return _text_in(encoding)
    if b"\0" not in head:
        return None
    return next((_text_in(encoding) for encoding in WIDE if _reads_as(head, encoding)), NULS)


def _text_in(encoding: str) -> Kind:
    return Kind(f"is {encoding.upper()} text", f"convert it: iconv -f {encoding} -t utf-8", encoding=encoding)


def _reads_as(head: bytes, encoding: str) -> bool:
    """Whether all characters are printable or white space, and any is ASCII: in the other byte order, none is."""
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(head)  # the last character may be cut off
    except UnicodeDecodeError:
        return False
    return any(map(str.isascii, text)) and all(char.isprintable() or char.isspace() for char in text)
