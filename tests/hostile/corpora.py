"""Corpora of others: files whose names, kinds, encodings and compression contradict each other, whole or damaged."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
from random import Random
from typing import Any

import pyarrow
from pyarrow import parquet

from . import data
from .case import Case

STEMS = ("a", "b c", "wiki_00", "-d", "e\x1b[2J", ".f", "g.tar")
ENDINGS = ("", ".txt", ".TXT", ".md", ".jsonl", ".JSONL", ".json", ".ndjson", ".csv", ".pdf", ".parquet", ".arrow")
COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz", ".lz4")
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "gbk", "latin-1", "utf-7", "cp037")
NAMED = (*ENCODINGS, "rot13", "unicode_escape", "idna", "punycode", "\x1b[2J", "", "x" * 1000)
TEXTS = ("a cat sat", "où l'été dure", "中文 数据\n第二行", "🐈", '{"text": "a"}', "a\r\nb\r", "[1, 2]", '"')
BINARY = (
    b"%PDF-1.7\n",
    b"PK\3\4",
    b"\x89PNG\r\n\x1a\n",
    b"MMIDIDX\0\0",
    b"\0" * 50,
    b"version https://git-lfs.github.com/",
)


def corpus(random: Random) -> Case:
    """A folder of such files, or one of them, with an encoding that may be the right one."""
    files = dict(file(random) for _ in range(random.randint(1, 5)))
    named = f"./in/{random.choice([*files])}" if random.random() < 0.3 else "in"
    words = ["data", "prepare", named, "--tokenizer", "tokenizer.json", "--output", "out/x"]
    if random.random() < 0.3:
        words.append(f"--encoding={random.choice(NAMED)}")
    content = {f"in/{name}": content for name, content in files.items()}
    writes = ("out/x.bin", "out/x.idx")
    return Case(tuple(words), {**content, "tokenizer.json": data.tokenizer()}, writes=writes)


def file(random: Random) -> tuple[str, bytes]:
    """A name, and what the file of that name holds."""
    content = _content(random)
    for _ in range(random.choice([0, 0, 1, 1, 2])):
        content = compressed(random.choice(COMPRESSIONS), content)
    if random.random() < 0.4:
        content = data.damaged(random, content)
    ending = random.choice(COMPRESSIONS) if random.random() < 0.4 else ""
    return random.choice(STEMS) + random.choice(ENDINGS) + ending, content


def _content(random: Random) -> bytes:
    texts = random.choices(TEXTS, k=random.randint(1, 4))
    kind = random.randrange(8)
    if kind == 0:
        return random.choice(BINARY) + random.randbytes(20)
    if kind == 1:
        values: list[Any] = random.choice([texts, [None, *texts], [1, 2], [], [{"text": "a"}]])
        sink = io.BytesIO()
        table = pyarrow.table({random.choice(["text", "text", "body"]): values})
        parquet.write_table(table, sink, compression=random.choice(["none", "snappy", "zstd"]))
        return sink.getvalue()
    if kind == 2:
        return data.json_lines(random)
    whole = "\n".join(texts if kind < 5 else (json.dumps({"text": text}, ensure_ascii=False) for text in texts))
    return whole.encode(random.choice(ENCODINGS) if random.random() < 0.5 else "utf-8", errors="replace")


def compressed(suffix: str, content: bytes) -> bytes:
    """As files with this ending are."""
    if suffix in (".zst", ".lz4"):
        sink = pyarrow.BufferOutputStream()
        with pyarrow.CompressedOutputStream(sink, "zstd" if suffix == ".zst" else "lz4") as stream:
            stream.write(content)
        return sink.getvalue().to_pybytes()
    return {".gz": gzip, ".bz2": bz2, ".xz": lzma}[suffix].compress(content)
