"""Files of others: read by their content, or refused by name, under any name."""

import bz2
import gzip
import io
import json
import lzma
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pyarrow
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pyarrow import parquet

from paddlenlp_galvatron.base import UserError
from paddlenlp_galvatron.training.data.conversations import Encoder
from paddlenlp_galvatron.training.data.corpus import Corpus, find_files
from paddlenlp_galvatron.training.data.text_files import require_encoding
from paddlenlp_galvatron.training.data.tuning import tuning_files


def zipped() -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("a.txt", "text")
    return content.getvalue()


def tarred() -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"))
    return content.getvalue()


def rows(*texts: object, key: str = "text") -> bytes:
    content = io.BytesIO()
    parquet.write_table(pyarrow.table({key: list(texts), "more": [1] * len(texts)}), content)
    return content.getvalue()


def compressed(codec: str, content: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, codec) as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


COMPRESSIONS = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".zst": lambda content: compressed("zstd", content),
    ".lz4": lambda content: compressed("lz4", content),
}
NO_TEXT = {
    "compressed (xz)": lzma.compress(b"text"),
    "an archive (zip": zipped(),
    "an archive (tar)": tarred(),
    "a PDF": b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj",
    "a picture (PNG)": b"\x89PNG\r\n\x1a\n" + bytes(8),
    "NUL bytes": b"text\0\x01\x02 more",
    "a pointer of Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "an Arrow stream": b"\xff\xff\xff\xff\x10\0\0\0",
}
ENDINGS = ("", ".txt", ".TXT", ".md", ".jsonl", ".JSONL", ".json", ".ndjson", ".dat", ".pdf", ".parquet", "_00")
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be", "gbk", "latin-1")
JSON_ENDINGS = (".jsonl", ".json", ".ndjson")
TEXTS = st.text("abc xyz,.\t'\"{}[]é中文。\u3000🐈", min_size=1, max_size=40).map(lambda text: f"T {text}")


def read(*paths: Path, encoding: str = "utf-8") -> list[str]:
    return [document.text for document in Corpus(find_files(paths, encoding).files, encoding=encoding)]


@given(
    st.lists(TEXTS, min_size=1, max_size=3),
    st.sampled_from([*NO_TEXT, "text", "text", "json", "json", "json"]),
    st.sampled_from(ENDINGS),
    st.sampled_from([*COMPRESSIONS]),
    st.booleans(),
    st.sampled_from(ENCODINGS),
    st.booleans(),
)
def test_any_file_is_read_as_it_is_or_refused(texts, kind, ending, compression, honest, encoding, named):
    """`honest`: the name shows the compression; `named`: the encoding is given."""
    is_json = ending.lower() in JSON_ENDINGS
    if kind in NO_TEXT:
        content, right = NO_TEXT[kind], None
    else:
        whole = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
        plain = whole if kind == "json" else texts[0] + "\n"
        try:
            content = plain.encode(encoding)
        except UnicodeEncodeError:
            assume(False)
        given_encoding = encoding if named else "utf-8"
        try:
            same = content.decode(given_encoding).removeprefix("\ufeff") == plain
        except UnicodeDecodeError:
            same = False
        right = (texts if kind == "json" else [plain]) if same and (kind == "json" or not is_json) else None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "in").mkdir()
        file = folder / "in" / f"b{ending}{compression if honest else ''}"
        file.write_bytes(COMPRESSIONS[compression](content))
        given_encoding = encoding if named and kind not in NO_TEXT else "utf-8"
        if right is None:
            with pytest.raises(UserError) as caught:
                read(file, encoding=given_encoding)
            assert len(caught.value.faults) == 1 and str(file) in str(caught.value)
            if kind in NO_TEXT:
                assert kind in str(caught.value)
        else:
            assert read(file, encoding=given_encoding) == right
        try:
            found = find_files([folder / "in"], given_encoding)
        except UserError as error:
            assert str(file) in str(error)
        else:
            assert ([file], {}) == (list(found.files), found.left_out)


@given(st.sampled_from([*COMPRESSIONS][1:]), st.randoms(use_true_random=False))
def test_damaged_compression_is_never_read_as_less(suffix, random):
    """Cut off, with something behind, or with a bit changed where there are checksums: all documents, or an error."""
    texts = [f"document {number} {random.random()}" for number in range(random.randint(1, 200))]
    whole = COMPRESSIONS[suffix]("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
    at = random.randrange(len(whole))
    changed = whole[:at] + bytes([whole[at] ^ 1 << random.randrange(8)]) + whole[at + 1 :]
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / f"a.jsonl{suffix}"
        damaged = [whole[:at] or b"\0", whole + whole[: at // 2 + 1], whole + b"behind"]
        for content in (*damaged, changed) if suffix in (".gz", ".bz2") else damaged:
            file.write_bytes(content)
            try:
                assert read(file) == texts
            except UserError as error:
                assert str(file) in str(error)
        file.write_bytes(whole + whole)
        assert read(file) == texts + texts


@pytest.mark.parametrize(
    ("content", "encoding", "says"),
    [
        ("café\n".encode("latin-1"), "utf-8", "character 4 is not UTF-8 text; name its encoding"),
        ("one\ncafé\n".encode("latin-1"), "utf-8", "line 2: character 4 is not UTF-8 text"),
        ("text".encode("utf-16"), "utf-8", "it is UTF-16 text; give --encoding utf-16"),
        ("text".encode("utf-16-be"), "utf-8", "it is UTF-16-BE text; give --encoding utf-16-be"),
        ("text".encode("utf-16-be"), "utf-16-le", "it is UTF-16-BE text; give --encoding utf-16-be"),
        ("text".encode("utf-32-le"), "gbk", "it is UTF-32-LE text; give --encoding utf-32-le"),
        (b"text", "utf-16", "it is UTF-8 text, not UTF-16; read it without --encoding"),
        (b"text", "utf-16-le", "it is UTF-8 text, not UTF-16-LE"),
        ("中文中文".encode("utf-16-le"), "utf-16", "no byte order mark; give --encoding utf-16-le or utf-16-be"),
        ("中文数据中文数据".encode(), "gbk", "it is UTF-8 text, not GBK"),
        ("中文".encode("utf-8-sig"), "gbk", "it is UTF-8 text, not GBK"),
        ("中文".encode("gbk") + b"\xff", "gbk", "character 3 is not GBK text"),
        (b"a" * 70_000 + b"\0", "utf-8", "character 70,001 is a NUL"),
        (b'[{"text": "a"},\n {"text": "b"}]', "utf-8", "is one JSON list; write one object a line"),
        (b'text": "a"}\n{"text": "b"}', "utf-8", "line 1 is not one JSON object"),
        (b'{\n "text": "a"\n}', "utf-8", "line 1 is not one JSON object"),
        (gzip.compress(gzip.compress(b"text", mtime=0), mtime=0), "utf-8", "decompressed, it is compressed .gzip."),
        (gzip.compress(tarred(), mtime=0), "utf-8", "decompressed, it is an archive .tar.; unpack it"),
        (gzip.compress(b"text", mtime=0)[:-4], "utf-8", "cannot be read: Truncated"),
        (rows("a", None), "utf-8", 'row 2 has no text "text"'),
        (rows("a", key="content"), "utf-8", 'row 1 has no text "text"; name it by --text_key'),
        (rows("a")[:-9], "utf-8", "cannot be read as Parquet"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_refused_and_why(tmp_path, content, encoding, says):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(UserError, match=says):
        read(tmp_path / "a", encoding=encoding)


def test_another_encoding_is_found_before_work_begins(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").write_bytes("数据".encode("gbk"))
    with pytest.raises(UserError, match=r"b\.txt: character 1 is not UTF-8 text"):
        find_files([tmp_path])


def test_rows_of_parquet_are_documents(tmp_path):
    (tmp_path / "a.parquet").write_bytes(rows("one", " ", "two"))
    assert read(tmp_path) == ["one", "two"]


def test_byte_order_marks_are_no_text(tmp_path):
    part = '{"text": "a"}\n'.encode("utf-8-sig")
    (tmp_path / "a").write_bytes(part + part)  # as files are put one behind the other
    (tmp_path / "b.txt").write_bytes("b".encode("utf-8-sig"))
    assert read(tmp_path) == ["a", "a", "b"]


def test_a_file_and_its_compressed_copy_are_not_both_read(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "train" / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n', mtime=0))
    for reading in (lambda: read(tmp_path), lambda: tuning_files(tmp_path, "train")):
        with pytest.raises(UserError, match=r"a\.jsonl\.gz: is the compressed a\.jsonl"):
            reading()


@pytest.mark.parametrize("name", ["rot13", "hex", "none", "", "a\0b", "undefined", "idna", "punycode"])
def test_names_of_no_encoding(name):
    with pytest.raises(UserError, match=r"encoding: .*is unknown"):
        require_encoding(name)


LINE = '{"src": "un été", "tgt": "b"}\n'


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("train.json", LINE.encode("utf-8-sig"), ""),
        ("train.jsonl.gz", gzip.compress(LINE.encode(), mtime=0), ""),
        ("train.JSONL.zst", compressed("zstd", LINE.encode()), ""),
        ("train.ndjson", LINE.encode(), ""),
        ("train/wiki_00", LINE.encode(), ""),
        ("train.json", LINE.encode("utf-16"), "it is UTF-16 text; convert it: iconv -f utf-16 -t utf-8"),
        ("train.json", LINE.encode("latin-1"), "line 1: character 13 is not UTF-8 text; convert it: iconv"),
        ("train.json", f"[{LINE}]".encode(), "is one JSON list"),
        ("train.json", rows("a"), "it is a Parquet file; convert it to JSON lines"),
        ("train.jsonl.xz", lzma.compress(LINE.encode()), r"it is compressed \(xz\)"),
        ("train/a.pdf", b"%PDF-1", "skipped: .*a.pdf .it is a PDF"),
        ("train/a.jsonl", b"%PDF-1", "it is a PDF"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_fine_tuning_data_are_looked_at_as_well(tmp_path, tokenizer, name, content, says):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(content)
    encoder = Encoder(tokenizer, None, 0, 100, 100)

    def samples():
        return list(encoder.samples(tuning_files(tmp_path, "train").files))

    if says:
        with pytest.raises(UserError, match=says):
            samples()
    else:
        (sample,) = samples()
        assert sample.line.contents[0].message["content"] == "un été"


def test_a_split_in_two_files_or_with_others_is_reported(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.jsonl").write_text(LINE)
    (tmp_path / "train" / "notes.txt").write_text("notes")
    found = tuning_files(tmp_path, "train")
    assert found.files == [tmp_path / "train" / "a.jsonl"] and "notes.txt (holds no JSON lines)" in found.left_out[0]
    for name in ("train.json", "train.jsonl"):
        (tmp_path / name).write_text(LINE)
    with pytest.raises(UserError, match=r"has train\.json and train\.jsonl for one split"):
        tuning_files(tmp_path, "train")
