"""Every part and mode of the profilers stands in both documents."""

from pathlib import Path

import pytest

from paddlenlp_galvatron.measure.options import HardwarePart, ProfileMode

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_part_and_mode_is_described(language):
    text = (DOCS / language / "profile.md").read_text()
    for word in (*HardwarePart, *ProfileMode):
        assert word in text
