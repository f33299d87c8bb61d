"""What the runtime cannot run yet, refused by name before anything starts."""

from __future__ import annotations

from collections.abc import Iterator

from ..plan import ModelShape, Plan, Precision, UserError


def require_supported(plan: Plan, model: ModelShape) -> None:
    """Raise UserError with every part of the plan or model that this version cannot train."""
    faults = list(_unsupported(plan, model))
    if faults:
        raise UserError(faults)


def _unsupported(plan: Plan, model: ModelShape) -> Iterator[str]:
    if plan.assumed.mixed_precision is not Precision.FP32:
        yield f"mixed_precision: {plan.assumed.mixed_precision} is not trained yet; use fp32"
