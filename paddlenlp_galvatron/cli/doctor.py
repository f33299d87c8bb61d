"""`galvatron doctor`: whether this machine can plan and train, with a remedy for what is wrong."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from paddlenlp_galvatron.base.printing import Console, say, table
from paddlenlp_galvatron.check.doctor import Machine, State, examine
from paddlenlp_galvatron.check.doctor.checks import Files

from .conventions import App

app = App(help="Check whether this machine can plan and train.")


@app.command()
def doctor(
    output_dir: Annotated[Path, typer.Option(help="folder that a run would write to")] = Path("output"),
    profiles: Annotated[Path, typer.Option(help="folder of the profile files")] = Path("configs"),
    plan: Annotated[Path | None, typer.Option(help="a plan file to check against this machine")] = None,
    hostfile: Annotated[
        Path | None,
        typer.Option(help="file with one node address per line, as for the profiler", envvar="HOSTFILE"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> int:
    """Check programs, devices, system, network and files: exit code 0, or 1 if something will not work."""
    findings = examine(Machine(), Files(output_dir, profiles, plan, hostfile))
    faults = sum(finding.state is State.FAULT for finding in findings)
    if as_json:
        say(json.dumps({"ok": not faults, "findings": [asdict(finding) for finding in findings]}))
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
