"""What the compiled core answers and takes; `tests/planner/test_core.py` holds the module to it."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

_Integers = NDArray[np.integer]
_Floats = NDArray[np.float64]

class TooHard(MemoryError): ...

class Cancel:
    """Ends searches that run in other threads."""

    def __init__(self) -> None: ...
    def cancel(self) -> None: ...
    @property
    def cancelled(self) -> bool: ...

# `passes_ms`: by kind of pass and chunk.
def step_ms(
    passes: _Integers, runs: _Integers, micro_batches: int, passes_ms: ArrayLike, sync_ms: ArrayLike, send_ms: ArrayLike
) -> float: ...

class Pipeline:
    """Pipelines of layers; see paddlenlp_galvatron.planner.core_arrays for the arrays.

    The nine numbers of a strategy, or of a part of the vocabulary: forward, backward, sync (ms), states, activation,
    workspace: own, message, weights, tables (MiB); a change's two: forward, backward (ms). `middle`: of a stage's first
    chunk, of a later one; `most_first`: layers that the first stage has at most, if there are several types;
    `in_flight`: stage and micro-batches of its chunks, by moments.
    """

    def __init__(
        self,
        *,
        layers: _Integers,
        most_first: int | None = None,
        micro_batches: int,
        passes: _Integers,
        runs: _Integers,
        strategies: _Floats,
        layouts: _Integers,
        types: _Integers,
        change: _Floats,
        enter: _Floats,
        leave: _Floats,
        vocabs: _Floats,
        vocab_enter: _Floats,
        vocab_leave: _Floats,
        middle: _Floats,
        in_flight: _Integers,
        send: _Floats,
        budget_mib: float,
    ) -> None: ...
    def bound(self, cancel: Cancel | None = None) -> float: ...
    def tight_bound(self, limit_ms: float, cancel: Cancel | None = None) -> float: ...
    # Time and lower bound in ms, vocabulary strategy, layers of each chunk, strategy of each layer; an infinite time:
    # nothing takes less than the limit.
    def solve(
        self, limit_ms: float, effort: int, cancel: Cancel | None = None, gap: float = 0.0
    ) -> tuple[float, float, int, list[int], list[int]]: ...
    # The same with MiB a device instead of the two times.
    def least_memory(self, cancel: Cancel | None = None) -> tuple[float, int, list[int], list[int]]: ...
