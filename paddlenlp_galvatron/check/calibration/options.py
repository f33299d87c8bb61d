"""Options of `galvatron calibrate`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from ...options.group import Options, Paths


class CalibrateOptions(Options):
    """Measured runs, and the files to write."""

    runs: Paths = Field(description="train_log.jsonl files, a validation.json, or tables (CSV), joined by commas")
    plans: Paths = Field((), description="the plan of each train_log.jsonl, in their order, joined by commas")
    device: str | None = Field(
        None, description="data sheet to start from: name of a shipped one, or a file; unset: as a table says"
    )
    model_size: str | None = Field(
        None, description="a preset's name, a config.json, or its folder; unset: the plan's model"
    )
    output: Path = Field(Path("node.json"), description="data sheet to write, which --device of other commands takes")
