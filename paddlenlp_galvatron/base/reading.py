"""The one reader of files that others wrote: bounded in size and depth, with errors for people."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .errors import UserError

LARGEST_BYTES = 64 * 2**20  # of a file that is read whole; the largest known, a tokenizer of 250,000 words, has 17 MB
DEEPEST = 64  # objects and lists within one another; no file of ours or Galvatron's has more than 6
_STRING = r'("(?:[^"\\\n]|\\.)*+"?)'  # an open one ends with its line: each character is looked at once
_STRING_OR_COMMENT = re.compile(_STRING + r"|//[^\n]*")
_STRING_OR_LAST_COMMA = re.compile(_STRING + r"|,(?=\s*[}\]])")
TOO_DEEP = f"not valid JSON: more than {DEEPEST} objects and lists within one another"


def read_bytes(path: str | Path, limit: int = LARGEST_BYTES) -> bytes:
    """A regular file's content, of at most `limit` bytes. Raises UserError."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer would wait for ever
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UserError(f"{path}: is not a regular file")
            content = file.read(limit + 1)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > limit:
        raise UserError(f"{path}: has more than {limit:,} bytes; is it the right file?")
    return content


def read_text(path: str | Path, limit: int = LARGEST_BYTES) -> str:
    """As `read_bytes`, of a UTF-8 text without NULs. Raises UserError."""
    try:
        text = read_bytes(path, limit).decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: cannot be read: byte {error.start:,} is not UTF-8 text") from None
    if "\0" in text:
        raise UserError(f"{path}: cannot be read: character {text.index(chr(0)):,} is a NUL; is the file damaged?")
    return text


def read_json(path: str | Path, limit: int = LARGEST_BYTES, comments: bool = False) -> Any:
    """Parse a JSON file. Raises UserError that names the file and the place of the fault.

    `comments`: as documents print JSON, with `// …` up to the end of a line and a comma behind the last entry.
    """
    text = read_text(path, limit)
    return parse_json(without_comments(text) if comments else text, str(path))


def without_comments(text: str) -> str:
    """The text with spaces for what only `comments` allows, so that lines and columns stay what they were."""
    plain = _STRING_OR_COMMENT.sub(lambda found: found[1] or " " * len(found[0]), text)
    return _STRING_OR_LAST_COMMA.sub(lambda found: found[1] or " ", plain)


def parse_json(text: str, source: str) -> Any:
    """As `read_json`, of a text that came from `source`."""
    try:
        value = json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_not_json, parse_float=_finite)
        _require_plain(value)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise UserError(f"{source}: not valid JSON at {where}: {error.msg}; is the file cut off?") from None
    except ValueError as error:
        raise UserError(f"{source}: {error}") from None
    except RecursionError:
        raise UserError(f"{source}: {TOO_DEEP}") from None
    return value


def _require_plain(value: Any) -> None:
    """Raise ValueError for what JSON allows but no text can hold or nobody follows: half characters, great depth."""
    level = [value]
    for _ in range(DEEPEST + 1):
        for item in level:
            if isinstance(item, str) and not item.isascii():
                _require_whole(item)
            elif isinstance(item, dict):
                _require_whole("".join(item))
        inner = [part for item in level for part in _parts(item)]
        if not inner:
            return
        level = inner
    raise ValueError(TOO_DEEP)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _require_whole(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])[1:-1]
        raise ValueError(f"not valid JSON: {half} is one half of a character without the other") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f'"{twice}" stands twice in one object; keep one')
    return result


def _not_json(name: str) -> Any:
    raise ValueError(f"not valid JSON: {name} is no number of JSON")


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"not valid JSON: {number} is beyond the numbers of a computer")
    return value
