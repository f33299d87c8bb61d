"""`galvatron gpu-check`: test in ten minutes whether this node's devices train correctly."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddlenlp_galvatron.base.errors import UserError, reported
from paddlenlp_galvatron.base.limits import Positive, Ranks
from paddlenlp_galvatron.base.printing import Console, say
from paddlenlp_galvatron.base.writing import locked
from paddlenlp_galvatron.check.findings import EXIT_CODES, Finding, Outcome, counts, findings_json, findings_table
from paddlenlp_galvatron.check.gpu.setting import PARTS
from paddlenlp_galvatron.launch import gpus
from paddlenlp_galvatron.options.group import Options

from .command import App

if TYPE_CHECKING:
    from paddlenlp_galvatron.launch.processes import Device

app = App()

PROCESSES = 2  # ranks on a machine without GPUs
SUMMARY: dict[Outcome, str] = {
    "ok": "ok: all checks passed",
    "failed": "failed",
    "incomplete": "incomplete: nothing failed, but some had no time; give more --minutes, or run those --parts alone",
}


class GpuCheckOptions(Options):
    """Options: checks to run, and their output."""

    nproc: Ranks | None = None
    parts: str | None = None
    minutes: Positive = 10
    output: Path = Path("gpu-check")


@app.command(GpuCheckOptions)
def gpu_check(values: dict[str, Any], json: bool) -> int:
    """Train small models on 2 ranks, then on all, and compare with one process, the prediction and PaddleNLP.

    Exit code 1 if something failed, 4 if nothing did but some had no time. Failures are packed into a file that you
    can send with a report.
    """
    args = GpuCheckOptions.from_values(values)
    nproc, output = args.nproc, args.output
    wanted = [name for name in (args.parts or ",".join(PARTS)).replace(" ", "").split(",") if name]
    if unknown := [name for name in wanted if name not in PARTS]:
        raise UserError(f"parts: {unknown[0]!r} is unknown; choose some of {', '.join(PARTS)}")
    if nproc and nproc > 1 and nproc % 2:
        raise UserError(f"nproc: {nproc} is odd, but the check runs pipelines of two stages; give 1 or an even number")
    from paddlenlp_galvatron.check.gpu import run
    from paddlenlp_galvatron.launch.nodes import environment_nodes
    from paddlenlp_galvatron.launch.processes import devices_of

    device: Device = "gpu" if gpus.gpu_count() else "cpu"
    ranks = nproc or (gpus.gpu_count() if device == "gpu" else PROCESSES)
    ranks -= ranks > 1 and ranks % 2
    devices_of(ranks)
    nodes = environment_nodes(needed=("node_rank",))
    if nodes.get("num_nodes", 1) != 1:  # each node is tested separately, possibly in a shared folder
        output = output / f"node-{nodes.get('node_rank', 0)}"
    with reported(f"output: {output} cannot be made"):
        output.mkdir(parents=True, exist_ok=True)
    with locked(output):
        run.renew(output)
        return _checked(wanted, ranks, device, output, 60 * args.minutes, json)


def _checked(parts: list[str], ranks: int, device: Device, output: Path, seconds: float, as_json: bool) -> int:
    """Check and print the findings; returns the exit code."""
    from paddlenlp_galvatron.check.gpu import run

    console = Console(soft_wrap=True)
    findings: list[Finding] = []
    if not as_json:
        console.print(f"{', '.join(parts)} on {' and '.join(map(str, run.worlds(ranks)))} ranks ({device}): {output}")
    for finding in run.check(parts, ranks, device, output, seconds):
        findings.append(finding)
        if not as_json:
            console.print(f"{finding.state:8}  {finding.part}: {finding.subject}: {finding.found}")
    outcome = run.write_result(output, device, findings)
    if as_json:
        say(dumps(findings_json(findings, device=device)))
    else:
        console.print(findings_table(findings))
        console.print(counts(findings))
        console.print(SUMMARY[outcome])
    if outcome == "failed":
        say(f"note: {run.bundle(output)} shows the failures: please send it with a report", err=True)
    return EXIT_CODES[outcome]
