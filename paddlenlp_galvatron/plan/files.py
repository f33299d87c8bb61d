"""Reading JSON with errors for people, and writing files whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from .errors import UserError


def read_json(path: str | Path) -> Any:
    """Parse a JSON file. Raises UserError that names the file and the place of the fault."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_not_json)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise UserError(f"{path}: not valid JSON at {where}: {error.msg}; is the file cut off?") from None
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    except RecursionError:
        raise UserError(f"{path}: not valid JSON: nested too deeply") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f'"{twice}" stands twice in one object; keep one')
    return result


def _not_json(name: str) -> Any:
    raise ValueError(f"not valid JSON: {name} is no number of JSON")


def write_text(path: str | Path, text: str) -> None:
    """Write a file whole or not at all, creating its folder."""
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        whole = Path(name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            whole.chmod(0o644)
            whole.replace(target)
        except BaseException:
            whole.unlink()
            raise
    except OSError as error:
        raise UserError(f"{target}: cannot be written: {error.strerror}") from None
