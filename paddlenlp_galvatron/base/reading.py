"""Reads foreign files: bounded in size and depth, plain values only, with errors for users."""

import hashlib
import json
import math
import os
import re
import stat
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from .errors import UserError, reported
from .file_kind import HEAD_BYTES, kind_of
from .text import shortened
from .units import MIB

LARGEST_BYTES = 64 * MIB  # largest file that is read whole; a tokenizer of 250,000 words has 17 MB
LARGEST_OPTIONS = MIB  # bytes of a file that is written by hand
DEEPEST = 64  # nesting of objects and lists; our files and Galvatron's nest at most 6
MOST_DIGITS = 40  # of an integer; converting its decimal form takes time quadratic in its length
MOST_PARTS = 100_000  # names and values of a YAML file; PyYAML reads that many in a second
LITERALS = ("true", "false", "null", "-")  # a truncated file may end within these
TOO_DEEP = f"more than {DEEPEST} objects and lists within one another"
_STRING = r'("(?:[^"\\\n]|\\.)*+"?)'  # an unterminated string ends with its line, so matching takes linear time
_STRING_OR_COMMENT = re.compile(_STRING + r"|//[^\n]*")
_STRING_OR_LAST_COMMA = re.compile(_STRING + r"|,(?=\s*[}\]])")
BLOCK_BYTES = 1 << 20


def open_file(path: str | Path) -> BinaryIO:
    """A regular file, open for reading. Raises UserError."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer would wait for ever
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise UserError(f"{path}: is not a regular file")
    return os.fdopen(handle, "rb")


def read_bytes(path: str | Path, limit: int = LARGEST_BYTES) -> bytes:
    """A regular file's content, of at most `limit` bytes. Raises UserError."""
    content = bytearray()  # grows with the file: `read(limit)` would allocate `limit` bytes at once
    with open_file(path) as file, reported(f"{path}: cannot be read"):
        while len(content) <= limit and (block := file.read(BLOCK_BYTES)):
            content += block
    if len(content) > limit:
        raise UserError(f"{path}: has more than {limit:,} bytes; is it the right file?")
    return bytes(content)


def read_text(path: str | Path, limit: int = LARGEST_BYTES) -> str:
    """Read a UTF-8 text without NULs, as `read_bytes` does; drop its byte order mark. Raises UserError."""
    content = read_bytes(path, limit)
    if kind := kind_of(content[:HEAD_BYTES]):
        raise UserError(f"{path}: cannot be read: it {kind.fault}; {kind.remedy}")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: cannot be read: byte {error.start:,} is not UTF-8 text") from None
    if "\0" in text:
        raise UserError(f"{path}: cannot be read: character {text.index(chr(0)):,} is a NUL; is the file damaged?")
    return text


def read_json(path: str | Path, limit: int = LARGEST_BYTES, comments: bool = False) -> Any:
    """Parse a JSON file. Raises UserError that names the file and the place of the fault.

    `comments`: allow `// …` comments and a comma after the last entry.
    """
    text = read_text(path, limit)
    return parse_json(without_comments(text) if comments else text, str(path))


def without_comments(text: str) -> str:
    """The text with comments and trailing commas replaced by spaces, so that lines and columns do not change."""
    plain = _STRING_OR_COMMENT.sub(lambda match: match[1] or " " * len(match[0]), text)
    return _STRING_OR_LAST_COMMA.sub(lambda match: match[1] or " ", plain)


def parse_json(text: str, source: str) -> Any:
    """Parse a text that came from `source`, as `read_json` does."""
    try:
        value = json.loads(
            text,
            object_pairs_hook=_without_duplicates,
            parse_constant=_not_json,
            parse_float=_finite,
            parse_int=_of_few_digits,
        )
        _require_plain(value)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        rest = text[error.pos :].strip()
        ends_early = error.msg.startswith("Unterminated") or any(word.startswith(rest) for word in LITERALS)
        hint = "; is the file cut off?" if ends_early else ""
        raise UserError(f"{source}: not valid JSON at {where}: {error.msg}{hint}") from None
    except ValueError as error:
        raise UserError(f"{source}: not valid JSON: {error}") from None
    except RecursionError:
        raise UserError(f"{source}: not valid JSON: {TOO_DEEP}") from None
    return value


YAML_INT = "tag:yaml.org,2002:int"
YAML_NUMBERS = {  # YAML 1.2.2, 10.3.2: the core schema
    YAML_INT: re.compile(r"[-+]?[0-9]+$|0o[0-7]+$|0x[0-9a-fA-F]+$"),
    "tag:yaml.org,2002:float": re.compile(
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
    ),
}


def read_yaml(path: str | Path, limit: int = LARGEST_OPTIONS) -> Any:
    """Parse a YAML file of JSON's types: no tags, no aliases. Raises UserError as `read_json` does."""
    import yaml  # imported here: few commands need it

    text = read_text(path, limit)
    try:
        _require_simple(yaml.parse(text, _yaml_loader()))
        value = yaml.load(text, _yaml_loader())
        _require_plain(value)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{path}: not valid YAML{where}: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid YAML: {error}") from None
    return value


def _yaml_loader() -> Any:
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        """Reads numbers by YAML 1.2's core schema: PyYAML follows 1.1, where `010` is 8 and `1:30` is 90. Refuses
        duplicate keys, which YAML forbids but PyYAML accepts."""

        yaml_implicit_resolvers: ClassVar = {
            first: [(tag, pattern) for tag, pattern in pairs if tag not in YAML_NUMBERS]
            for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            _require_once([key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
            return super().construct_mapping(node, deep)

    def whole_number(_: Any, node: Any) -> int:
        base = {"0o": 8, "0x": 16}.get(node.value[:2], 10)
        return int(node.value, base) if len(node.value) <= MOST_DIGITS else _of_few_digits(node.value)

    for tag, pattern in YAML_NUMBERS.items():
        Loader.add_implicit_resolver(tag, pattern, list("-+.0123456789"))
    Loader.add_constructor(YAML_INT, whole_number)
    return Loader


def _require_simple(events: Iterable[Any]) -> None:
    """Raise ValueError for YAML that grows while it is read (aliases), makes objects (tags) or is too large or deep."""
    import yaml

    depth = 0
    for number, event in enumerate(events):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"*{event.anchor} repeats another part of the file; write it out")
        if getattr(event, "tag", None):
            raise ValueError(f"{shortened(event.tag)} is a tag; write the value without")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise ValueError(TOO_DEEP)
        if number > MOST_PARTS:
            raise ValueError(f"more than {MOST_PARTS:,} names and values; is it the right file?")


def digest(path: str | Path, limit: int = LARGEST_BYTES) -> str:
    """SHA-256 of a regular file of at most `limit` bytes, as hexadecimal digits. Raises UserError."""
    return hashlib.sha256(read_bytes(path, limit)).hexdigest()


def _require_plain(value: Any) -> None:
    """Raise ValueError for a value that JSON or YAML allows but we do not: half characters, deep nesting, dates,
    infinities."""
    level = [value]
    for _ in range(DEEPEST + 1):
        for item in level:
            if isinstance(item, str) and not item.isascii():
                _require_whole(item)
            elif isinstance(item, dict):
                for name in item:
                    if not isinstance(name, str):
                        raise ValueError(f"{shortened(repr(name))} is a name, but no text; put it in quotes")
                _require_whole("".join(item))
            elif isinstance(item, float):
                _finite(item)
            elif not isinstance(item, str | int | list | None):
                raise ValueError(f"{shortened(repr(item))} is neither text, number, list nor object; put it in quotes")
        inner = [token for item in level for token in _parts(item)]
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
        raise ValueError(f"{half} is one half of a character without the other") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        _require_once([name for name, _ in pairs])
    return result


def _require_once(names: Sequence[str]) -> None:
    if len(set(names)) != len(names):
        (twice, _), *_ = Counter(names).most_common(1)
        raise ValueError(f'"{shortened(twice)}" stands twice in one object; keep one')


def _not_json(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _finite(number: str | float) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{shortened(str(number))} is beyond the numbers of a computer")
    return value


def _of_few_digits(number: str) -> int:
    if len(number) > MOST_DIGITS:
        raise ValueError(f"{shortened(number)} has {len(number)} digits; is it a slip of the pen?")
    return int(number)


class LargeFile:
    """A regular file, open for reading at any offset. It stays open if another file takes its name."""

    def __init__(self, path: str | Path):
        """Raises UserError."""
        self.path = Path(path)
        self._file = open_file(path)
        self.size_bytes = self.state().st_size  # size at opening

    def state(self) -> os.stat_result:
        return os.fstat(self._file.fileno())

    def read(self, first: int, count: int) -> bytes:
        """Bytes from `first` on. Raises UserError: the file ends before, or cannot be read."""
        if first < 0 or count < 0 or first + count > self.size_bytes:
            raise UserError(f"{self.path}: has {self.size_bytes:,} bytes, not {count:,} from byte {first:,} on")
        parts: list[bytes] = []
        while count:
            with reported(f"{self.path}: cannot be read at byte {first:,}"):
                chunk = os.pread(self._file.fileno(), count, first)
            if not chunk:
                raise UserError(f"{self.path}: ends before byte {first:,}: it was cut off after it had been opened")
            parts.append(chunk)
            first, count = first + len(chunk), count - len(chunk)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def checksum(self, most: int | None = None) -> int:
        """CRC-32 of all blocks of BLOCK_BYTES, or of `most` of them, including the first and the last. Raises
        UserError."""
        count = -(-self.size_bytes // BLOCK_BYTES)
        few = most is not None and most < count
        checksum = 0
        for block in (n * (count - 1) // (most - 1) for n in range(most)) if few and most else range(count):
            first = block * BLOCK_BYTES
            checksum = zlib.crc32(self.read(first, min(BLOCK_BYTES, self.size_bytes - first)), checksum)
        return checksum


class NewLines:
    """New complete lines of a growing file, each once."""

    def __init__(self, path: Path):
        self._path, self._position = path, 0

    def read(self) -> list[bytes]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < self._position:
                self._position = 0  # a new file took its place
            file.seek(self._position)
            lines = [line for line in file.readlines() if line.endswith(b"\n")]
        self._position += sum(map(len, lines))
        return lines
