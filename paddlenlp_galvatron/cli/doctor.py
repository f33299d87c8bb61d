"""`galvatron doctor`: whether this machine can plan and train, with a remedy for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from paddlenlp_galvatron.base.printing import Console, say
from paddlenlp_galvatron.check.doctor import Files, Machine, examine
from paddlenlp_galvatron.check.findings import EXIT_CODES, counts, findings_json, findings_table, outcome_of

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
    if as_json:
        say(json.dumps(findings_json(findings)))
    else:
        Console().print(findings_table(findings))
        say(counts(findings))
    return EXIT_CODES[outcome_of(findings)]
