"""Writes generated pages of the documentation, or checks that they are current."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path


def write_or_check(pages: Mapping[Path, str], source: str) -> int:
    """Write the pages. With `--check` on the command line write nothing, and return 1 where one is not current."""
    if "--check" not in sys.argv[1:]:
        for path, text in pages.items():
            path.write_text(text, encoding="utf-8")
        return 0
    stale = [path for path, text in pages.items() if path.read_text(encoding="utf-8") != text]
    for path in stale:
        sys.stderr.write(f"{path}: differs from {source}; renew it: make pages\n")
    return bool(stale)
