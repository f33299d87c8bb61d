"""`galvatron doctor`: whether this machine can plan and train, with a remedy for what is wrong."""

from __future__ import annotations

import os
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Any

from pydantic import Field

from paddlenlp_galvatron.base.printing import Console, say, table
from paddlenlp_galvatron.check.doctor import Machine, State, examine
from paddlenlp_galvatron.check.doctor.checks import Files
from paddlenlp_galvatron.options.group import Options

from .command import App

app = App()


class FileOptions(Options):
    """Files that are checked."""

    output_dir: Path = Field(Path("output"), description="folder that a run would write to")
    profiles: Path = Field(Path("configs"), description="folder of the profile files")
    plan: Path | None = Field(None, description="a plan file to check against this machine")
    hostfile: Path | None = Field(
        default_factory=lambda: Path(os.environ["HOSTFILE"]) if os.environ.get("HOSTFILE") else None,
        description="file with one node address per line, as for the profiler",
    )


@app.command(FileOptions)
def doctor(values: dict[str, Any], json: bool) -> int:
    """Check programs, devices, system, network and files: exit code 0, or 1 if something will not work."""
    given = FileOptions.from_values(values)
    findings = examine(Machine(), Files(given.output_dir, given.profiles, given.plan, given.hostfile))
    faults = sum(finding.state is State.FAULT for finding in findings)
    if json:
        say(dumps({"ok": not faults, "findings": [asdict(finding) for finding in findings]}))
        return int(bool(faults))
    columns = ("subject", "", "found", "remedy")
    shown = table(*columns, left=columns)
    for finding in findings:
        state = "" if finding.state is State.OK else finding.state
        shown.add_row(finding.subject, state, finding.found, finding.remedy)
    Console().print(shown)
    warnings = sum(finding.state is State.WARNING for finding in findings)
    say(f"{faults} faults, {warnings} warnings, {len(findings)} findings")
    return int(bool(faults))
