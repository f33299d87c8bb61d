"""Every option and part of the profilers stands in both documents."""

from pathlib import Path

import pytest

from paddlenlp_galvatron.profiler.options import HardwareOptions, HardwarePart, PointOptions, ProfileMode

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_option_is_described(language):
    text = (DOCS / language / "profile.md").read_text()
    for name in {**HardwareOptions.model_fields, **PointOptions.model_fields}:
        assert f"`{name}`" in text, name
    for word in (*HardwarePart, *ProfileMode):
        assert word in text
