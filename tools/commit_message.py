"""Checks a commit message: `area: Verb object` in at most 72 characters, and a body that says why. A hook runs it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

SUBJECT = re.compile(r"[a-z][\w/. -]*: [A-Z]\S* \S.*")
MOST = 72  # characters: the width of `git log --oneline` in 80 columns
GENERATED = ("Merge ", "Revert ", "fixup! ", "squash! ")


def faults(message: str) -> Iterator[str]:
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    subject, body = (lines or [""])[0], lines[1:]
    if subject.startswith(GENERATED):
        return
    if not SUBJECT.fullmatch(subject):
        yield f"{subject!r}: begin with the area and a verb, such as `runtime: Release gathered weights earlier`"
    if len(subject) > MOST:
        yield f"{subject!r}: has {len(subject)} characters; at most {MOST}"
    if body and body[0].strip():
        yield "leave the second line empty"
    if not any(line.strip() for line in body):
        yield "say in a body why"


if __name__ == "__main__":
    found = list(faults(Path(sys.argv[1]).read_text(encoding="utf-8")))
    sys.exit("\n".join(f"commit message: {fault}" for fault in found))
