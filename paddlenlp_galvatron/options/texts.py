"""Texts of options, in English and Chinese: texts.json, by an option's name.

An option with another meaning in a group has the key `Group.name`; a switch of one command, `function.name`.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from ..base.reading import read_json


@cache
def texts() -> dict[str, dict[str, str]]:
    """Key -> language, `en` or `zh` -> text. Read at first use: no search needs one."""
    content: dict[str, dict[str, str]] = read_json(Path(__file__).with_name("texts.json"))
    return content


def key_of(owner: type | Callable[..., Any], name: str) -> str:
    """The key of an option of a group, or of a switch of a command's function."""
    keys = (f"{kind.__name__}.{name}" for kind in getattr(owner, "__mro__", (owner,)))
    return next((key for key in keys if key in texts()), name)


def text_of(owner: type | Callable[..., Any], name: str, language: str = "en") -> str:
    return texts()[key_of(owner, name)][language]
