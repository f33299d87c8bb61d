"""Flags that a user gives beside a plan, held against what the plan was priced under."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..base.errors import UserError
from .check import require_valid
from .strategy import Plan, Precision


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


def with_defaults(plan: Plan, on_gpus: bool) -> Plan:
    """The plan with what it leaves open as training has it: on GPUs, with fused kernels; 16-bit runs sum gradients in
    fp32 there, as small parts of many micro-batches would round away, and have flash attention."""
    default = on_gpus and plan.assumed.mixed_precision is not Precision.FP32
    by_default = replace(
        plan.assumed,
        fp32_gradients=default,
        flash_attention=default,
        fused_rope=on_gpus,
        fused_rms_norm=on_gpus,
        fused_cross_entropy=False,  # its communicator is made in a way that has not run on GPUs
    )
    return replace(plan, assumed=plan.assumed.completed(by_default))
