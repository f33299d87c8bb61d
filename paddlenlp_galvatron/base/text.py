"""Foreign text on a terminal: names and values may contain codes that move the cursor or change titles."""

import re
from collections.abc import Callable
from pathlib import Path

Note = Callable[[str], None]  # shows the user a line about an assumption or an omission

_PREFIX = re.compile(rb"[ -!#-z|~]{1,200}(?={)")  # printable, without quotation marks or braces


def no_note(_: str) -> None:
    """Discard a note."""


def without_prefix(line: bytes) -> bytes:
    """A line with a JSON object, without the prefix of a launcher: `[1,0]<stdout>:`, `0: `, the time."""
    return line[match.end() :] if (match := _PREFIX.match(line)) else line


def printable(text: str) -> str:
    """The printable text: line ends stay, other invisible characters become escapes (\\x1b)."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else _escaped(char) for char in text)


def shortened(text: str, limit: int = 60) -> str:
    """The beginning of a text that may be long."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def count(number: int, single: str, many: str = "") -> str:
    """A number of things: 1 sample, 2 samples. `many`: the plural, where it is not `single` with an s."""
    return f"{number} {single if number == 1 else many or single + 's'}"


def plain(number: float) -> str:
    """Three significant digits without an exponent: 0.0123, 12.3, 1,430."""
    return f"{float(f'{number:.3g}'):,.15g}"


def large(number: float) -> str:
    """A large number of tokens or weights: 15T, 1.5B."""
    for scale, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= scale:
            return f"{number / scale:,.6g}{letter}"
    return f"{number:,.0f}"


def gib(mib: float) -> str:
    """Format MiB as GiB: two decimals, three below 1 GiB."""
    size = mib / 1024
    return f"{size:,.2f}" if abs(size) >= 0.9995 else f"{size:.3f}"


def near(path: Path) -> Path:
    """The path relative to the current folder if it lies below it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode()
