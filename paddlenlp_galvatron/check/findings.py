"""Findings of a check: subject, state, remedy. One record, one table and one JSON form for
`doctor` and `gpu-check`."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Literal

from rich.table import Table

from ..base.printing import table

Outcome = Literal["ok", "failed", "incomplete"]  # incomplete: nothing failed, but time ran out
EXIT_CODES: dict[Outcome, int] = {"ok": 0, "failed": 1, "incomplete": 4}  # 2 and 3 have other meanings in all commands


class State(StrEnum):
    OK = "ok"
    WARNING = "warning"  # works, but may be slow or fail later
    FAILED = "failed"  # does not work
    INFO = "info"  # shown, not checked
    SKIPPED = "skipped"  # cannot be tested on this machine
    NO_TIME = "no time"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a check's result."""

    subject: str
    found: str  # a figure, a fault, or why it was skipped
    state: State = State.OK
    remedy: str = ""  # empty: all is well, or no remedy is known
    part: str | None = None  # part of `gpu-check`
    ranks: int | None = None  # ranks of that part
    seconds: float | None = None


def outcome_of(findings: Sequence[Finding]) -> Outcome:
    """The outcome of all findings."""
    states = {finding.state for finding in findings}
    return "failed" if State.FAILED in states else "incomplete" if State.NO_TIME in states else "ok"


def findings_json(findings: Sequence[Finding], **more: Any) -> dict[str, Any]:
    """Findings as JSON values, without fields that the check does not have."""
    rows = [{name: value for name, value in asdict(finding).items() if value is not None} for finding in findings]
    return {"result": outcome_of(findings), **more, "findings": rows}


def findings_table(findings: Sequence[Finding]) -> Table:
    """A row for each finding and a column for each field in use."""
    rows = [
        {
            "part": finding.part or "",
            "ranks": f"{finding.ranks or ''}",
            "subject": finding.subject,
            "state": str(finding.state),
            "s": "" if finding.seconds is None else f"{finding.seconds:.1f}",
            "found": finding.found,
            "remedy": finding.remedy,
        }
        for finding in findings
    ]
    columns = [name for name in rows[0] if any(row[name] for row in rows)] if rows else []
    shown = table(*columns, left=("subject", "state", "found", "remedy"))
    for row in rows:
        shown.add_row(*(row[name] for name in columns))
    return shown


def counts(findings: Sequence[Finding]) -> str:
    """`2 failed, 14 ok`."""
    numbers = Counter(finding.state for finding in findings)
    return ", ".join(f"{numbers[state]} {state}" for state in State if numbers[state])
