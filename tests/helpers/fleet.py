"""PaddleFleet's own answers and recipes, as data outside of the repository (../shared)."""

import json
from pathlib import Path

import pytest

DATA = Path(__file__).parents[3] / "shared" / "data" / "paddlefleet"


def named(kind: str) -> list:
    """Cases of a kind of vectors.json; none where the data are missing."""
    path = DATA / "vectors.json"
    return (
        [pytest.param(each, id=each["about"]) for each in json.loads(path.read_text())[kind]] if path.exists() else []
    )
