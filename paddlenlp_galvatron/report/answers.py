"""JSON Schemas of the answers that commands print with `--json`: answers.json, by command."""

from functools import cache
from pathlib import Path
from typing import Any

from ..base.reading import read_json


@cache
def answer_schemas() -> dict[str, dict[str, Any]]:
    """Command, such as `plan scale` -> JSON Schema of its answer; numbers have their unit as description."""
    content: dict[str, dict[str, Any]] = read_json(Path(__file__).with_name("answers.json"))
    return content
