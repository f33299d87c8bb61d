"""Flags that a user gives beside a plan, held against what the plan was priced under."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..base.errors import UserError
from .check import require_valid
from .strategy import Plan


def with_assumptions(plan: Plan, **given: Any) -> Plan:
    """The plan with these assumptions where its file names none; None stands for a flag that was not given.

    Raises UserError for a flag that contradicts the file, or that makes the plan invalid.
    """
    flags = {name: value for name, value in given.items() if value is not None}
    faults = [
        f"{name}: the plan was searched for {getattr(plan.assumed, name)} but {value} is given; "
        "leave the flag out or search a plan for it"
        for name, value in flags.items()
        if name in plan.stated and getattr(plan.assumed, name) != value
    ]
    if faults:
        raise UserError(faults)
    changed = replace(plan, assumed=replace(plan.assumed, **flags), stated=plan.stated | set(flags))
    require_valid(changed)
    return changed
