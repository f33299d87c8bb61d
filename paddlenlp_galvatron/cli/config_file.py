"""A file of options, YAML or JSON, for commands that have many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paddlenlp_galvatron.base.reading import LARGEST_OPTIONS, read_json, read_yaml
from paddlenlp_galvatron.plan import UserError

MOST_OPTIONS = 500


def read_options(path: Path) -> dict[str, Any]:
    """Options by the names in the file, those in sections beside the rest. Raises UserError.

    A section is an object under a name of its own, such as SearchEngineArgs; it is for the eye alone.
    """
    content = read_json(path, LARGEST_OPTIONS) if path.suffix == ".json" else read_yaml(path)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds no options; write one a line, as memory_constraint: 36")
    result: dict[str, Any] = {}
    for name, value in content.items():
        for key, inner in value.items() if isinstance(value, dict) else [(name, value)]:
            if key in result:
                raise UserError(f"{path}: {key} stands there twice; keep one")
            result[key] = inner
    if len(result) > MOST_OPTIONS:
        raise UserError(f"{path}: names {len(result)} options, and no command has {MOST_OPTIONS}; right file?")
    return result
