"""Foreign files through the one reader, and foreign text on a terminal."""

import gzip
import io
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from paddlenlp_galvatron.base import UserError
from paddlenlp_galvatron.base.printing import Console
from paddlenlp_galvatron.base.reading import DEEPEST, parse_json, read_bytes, read_json, read_yaml
from paddlenlp_galvatron.base.text import printable

SECONDS = 20  # linear work takes less than a second on a machine at rest, quadratic work minutes

WRONG_JSON = {
    "cut off": ('{"a": ', "line 1, column 7"),
    "duplicate key": ('{"a": 1, "a": 2}', '"a" stands twice'),
    "late duplicate key": ("{" + "".join(f'"k{i}": 1, ' for i in range(50_000)) + '"k7": 1}', '"k7" stands twice'),
    "NaN": ('{"a": NaN}', "NaN is no number"),
    "infinity": ("[-Infinity]", "-Infinity is no number"),
    "beyond a float": ("[1e999]", "1e999 is beyond"),
    "digits": ("9" * 5000, "has 5000 digits"),
    "half a character": ('["\\ud800"]', "\\ud800 is one half"),
    "half a character in a name": ('{"\\udfff": 1}', "\\udfff is one half"),
    "deep": ("[" * (DEEPEST + 2) + "]" * (DEEPEST + 2), "within one another"),
    "as deep as the parser goes": ("[" * 100_000, "within one another"),
}
WRONG_YAML = {
    "alias": ("a: &a [1]\nb: *a", "*a repeats"),
    "bomb": ("a: &a [x,x]\n" + "".join(f"b{i}: &b{i} [*a,*a]\n" for i in range(30)), "*a repeats"),
    "duplicate name": ("a: 1\na: 2", '"a" stands twice'),
    "late duplicate name": ("".join(f"k{i}: 1\n" for i in range(40_000)) + "k7: 1", '"k7" stands twice'),
    "tag": ("a: !!python/object:os.system {}", "is a tag"),
    "deep": ("a: " + "[" * 100_000, "within one another"),
    "digits": ("a: " + "1" * 100_000, "digits"),
    "infinity": ("a: .inf", "beyond the numbers"),
    "date": ("a: 2020-01-01", "put it in quotes"),
    "date that is none": ("a: 2020-13-45", "month must be in 1..12"),
    "half a character": ('a: "\\ud800"', "line 1, column 7"),
    "control characters": ("a: '\x1b[2J'", "control characters are not allowed"),
    "list as a name": ("? [a]\n: b", "found unhashable key"),
    "two documents": ("--- 1\n--- 2", "found another document"),
    "newer format": ("%YAML 9.9\n---\na: b", "found incompatible YAML document"),
    "tab": ("\t", "cannot start any token"),
    "name that is none": ("1: 2", "1 is a name, but no text"),
    "long": ("a: [" + "1," * 400_000 + "]", "names and values"),
}


@pytest.mark.parametrize("case", WRONG_JSON)
def test_json_that_is_refused(case):
    text, message = WRONG_JSON[case]
    begin = time.process_time()
    with pytest.raises(UserError) as caught:
        parse_json(text, "file.json")
    assert message in str(caught.value) and str(caught.value).startswith("file.json: not valid JSON")
    assert time.process_time() - begin < SECONDS


@pytest.mark.parametrize("case", WRONG_YAML)
def test_yaml_that_is_refused(tmp_path, case):
    text, message = WRONG_YAML[case]
    path = tmp_path / "file.yaml"
    path.write_text(text)
    begin = time.process_time()
    with pytest.raises(UserError) as caught:
        read_yaml(path)
    assert message in str(caught.value) and str(caught.value).startswith(f"{path}: not valid YAML")
    assert time.process_time() - begin < SECONDS


def test_yaml_of_many_names_is_read(tmp_path):
    path = tmp_path / "file.yaml"
    path.write_text("".join(f"k{number}: {number}\n" for number in range(40_000)))
    assert read_yaml(path)["k39999"] == 39_999


def test_what_is_no_file_of_the_right_size(tmp_path):
    (tmp_path / "large").write_bytes(b"x" * 11)
    os.mkfifo(tmp_path / "pipe")
    for name, message in {
        "large": "more than 10 bytes",
        "pipe": "not a regular file",
        "": "not a regular file",
        "none": "no such file",
        "x" * 300: "File name too long",
        "a\0b": "cannot be read",
    }.items():
        with pytest.raises(UserError, match=message):
            read_bytes(tmp_path / name, 10)
    for content in (b"\xff", b'{"a": 1}\0'):
        (tmp_path / "bytes").write_bytes(content)
        with pytest.raises(UserError, match="cannot be read"):
            read_json(tmp_path / "bytes")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"a": 1}'.encode("utf-16"), "it is UTF-16 text; convert it: iconv -f utf-16 -t utf-8"),
        ('{"a": 1}'.encode("utf-16-be"), "it is UTF-16-BE text"),
        ('{"a": 1}'.encode("utf-32"), "it is UTF-32 text"),
        (gzip.compress(b"{}", mtime=0), "it is compressed .gzip.; decompress it: gunzip"),
        (b"PK\3\4", "it is an archive"),
        (b"version https://git-lfs.github.com/spec/v1", "pointer of Git LFS, not the file; fetch it: git lfs pull"),
        (b'{"a": 1}\0', "it has NUL bytes"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_files_of_other_kinds_are_named(tmp_path, content, says):
    (tmp_path / "a").write_bytes(content)
    for read in (read_json, read_yaml):
        with pytest.raises(UserError, match=says):
            read(tmp_path / "a")


def test_a_byte_order_mark_is_no_fault_of_json_and_yaml(tmp_path):
    (tmp_path / "a").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_json(tmp_path / "a") == read_yaml(tmp_path / "a") == {"a": 1}


def test_only_text_that_ends_too_early_may_be_cut_off():
    for text, cut in {
        '{"a": ': True,
        "[tru": True,
        '{"a": "b': True,
        '{"a" 1}': False,
        "\ufeff{}": False,
        "{,}": False,
    }.items():
        with pytest.raises(UserError) as caught:
            parse_json(text, "file.json")
        assert ("is the file cut off?" in str(caught.value)) == cut, text


def test_foreign_text_is_shown_and_does_nothing():
    assert printable("plain é 中文\n") == "plain é 中文\n"
    assert printable("\x1b[2J\r\u202e\udcff\x9b") == "\\x1b[2J\\r\\u202e\\udcff\\x9b"
    out = io.StringIO()
    console = Console(file=out, force_terminal=True)
    table = Table("na\x1bme")
    table.add_row("[bold]x\x1b]0;t\x07[/bold]")
    table.add_row(":smile:")
    console.print(table)
    console.print("[red]\x1b[31m")
    shown = out.getvalue()
    assert "[bold]x\\x1b]0;t" in shown and ":smile:" in shown and "[red]\\x1b[31m" in shown and "na\\x1bme" in shown
    assert "\x1b]" not in shown and "\x1b[31m" not in shown and "\x07" not in shown


@given(
    st.from_regex(
        r"[-+]?[0-9]{1,12}|0o[0-7]{1,9}|0x[0-9a-fA-F]{1,9}|[0-9]{1,3}(:[0-9]{2}){1,3}|0b[01]{1,9}", fullmatch=True
    )
)
def test_numbers_of_yaml_are_those_of_its_core_schema(tmp_path_factory, text):
    """PyYAML has YAML 1.1's: 010 is 8, 1:30 is 90."""
    file = tmp_path_factory.mktemp("yaml") / "a.yaml"
    file.write_text(f"a: {text}\n")
    bases = {"0o": 8, "0x": 16}
    try:
        expected: object = int(text, bases.get(text[:2], 10))
    except ValueError:
        expected = text
    assert read_yaml(file) == {"a": expected}
