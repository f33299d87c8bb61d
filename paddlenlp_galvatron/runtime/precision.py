"""Number types of a run: of stored and sent values, of computation in layers, of gradient sums.

With bf16 or fp16, weights, activations between layers and messages are 16-bit, and the optimizer works on fp32 master
weights, sharded as ZeRO says. A GPU computes in the stored type. Paddle's CPU kernels have no 16-bit arithmetic:
there every layer casts at its edge and computes in fp32, while everything stored and sent stays 16-bit.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import paddle

from ..base.errors import UserError
from ..plan.precision import NumberTypes, Precision
from . import device


def on_device(numbers: NumberTypes, compute: Precision | None = None) -> NumberTypes:
    """The number types with the compute type of this device; `compute`: a requested type. Raises UserError if the
    device cannot compute in it."""
    if device.on_gpu():
        return replace(numbers, computed=compute or numbers.computed)
    if compute and compute.mixed:
        raise UserError(
            f"compute_precision: Paddle has no {compute} arithmetic on CPU; leave it out: weights and messages "
            f"are {numbers.stored} then, and layers compute in fp32"
        )
    return replace(numbers, computed=Precision.FP32)


def has_dtype(tensor: Any, dtype: Any) -> bool:
    """Whether a tensor is of a type, given by name or as Paddle's."""
    return bool(tensor.dtype == (getattr(paddle, dtype) if isinstance(dtype, str) else dtype))


def cast(tensor: Any, dtype: Any) -> Any:
    """The tensor in a type; the same tensor if it already has it."""
    return tensor if has_dtype(tensor, dtype) else tensor.astype(dtype)


@paddle.no_grad()  # type: ignore[untyped-decorator]
def add(total: Any, term: Any, dtype: str) -> Any:
    """Sum of two tensors in a type; `total` may be changed, None: nothing yet. 16-bit numbers are added in fp32."""
    if total is None:
        return cast(term, dtype)
    if dtype == "float32":  # Paddle's GPU kernel adds 16-bit numbers without an fp32 copy
        return total.add_(term if device.on_gpu() else cast(term, dtype))
    return (total.astype("float32") + term.astype("float32")).astype(dtype)


class LossScaler:
    """Factor on the loss that keeps fp16 gradients from vanishing: halved on overflow, doubled after a while without
    overflow."""

    def __init__(self, scale: float, patience: int = 2000):
        """The initial `scale`, and the number of steps without overflow after which it doubles (as Paddle's
        GradScaler)."""
        self.scale, self._patience, self._good = scale, patience, 0

    @property
    def state(self) -> list[float]:
        """State that a checkpoint keeps."""
        return [self.scale, self._good]

    @state.setter
    def state(self, state: Sequence[float]) -> None:
        self.scale, self._good = float(state[0]), int(state[1])

    def update(self, overflow: bool) -> None:
        """Adjust the scale to a step's gradients."""
        self._good = 0 if overflow else self._good + 1
        if overflow:
            self.scale = max(self.scale / 2, 1.0)
        elif self._good == self._patience:
            self.scale, self._good = self.scale * 2, 0
