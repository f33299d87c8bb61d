"""Tables of options that are data: JSON files of this folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def data(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path(__file__).with_name(f"{name}.json").read_text(encoding="utf-8"))
    return content
