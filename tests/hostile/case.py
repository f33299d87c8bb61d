"""A case: files, and a command line that reads them; JSON with text in it as it is."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ESCAPES = "\x1b]0;title\x07\x1b[2J"


@dataclass(frozen=True)
class Case:
    """One try. File names are relative to an empty folder, in which the command is started."""

    words: tuple[str, ...]
    files: Mapping[str, bytes]
    writes: tuple[str, ...] = ()  # files that the command may leave when it ends well: names, or their beginnings
    says: str = ""  # expected text of its errors


class Raw(str):
    """Text that stands in a JSON file as it is."""


def dump(value: Any) -> str:
    """JSON, with Raw text put in as it is."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {dump(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)
