"""`galvatron doctor`: whether this machine can plan and train, with a remedy for each fault."""

import os
from json import dumps
from pathlib import Path
from typing import Any

from pydantic import Field

from paddlenlp_galvatron.base.printing import Console, say
from paddlenlp_galvatron.check.doctor import Files, Machine, examine
from paddlenlp_galvatron.check.findings import EXIT_CODES, counts, findings_json, findings_table, outcome_of
from paddlenlp_galvatron.options.group import Options

from .command import App

app = App()


class DoctorOptions(Options):
    """Options: files to check."""

    output_dir: Path = Path("output")
    profiles: Path = Path("configs")
    plan: Path | None = None
    hostfile: Path | None = Field(default_factory=lambda: Path(file) if (file := os.environ.get("HOSTFILE")) else None)


@app.command(DoctorOptions)
def doctor(values: dict[str, Any], json: bool) -> int:
    """Check programs, devices, system, network and files: exit code 0, or 1 if something will not work."""
    args = DoctorOptions.from_values(values)
    findings = examine(Machine(), Files(args.output_dir, args.profiles, args.plan, args.hostfile))
    if json:
        say(dumps(findings_json(findings)))
    else:
        Console().print(findings_table(findings))
        say(counts(findings))
    return EXIT_CODES[outcome_of(findings)]
