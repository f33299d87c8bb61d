"""What the compiled core answers and takes; `tests/planner/test_core.py` holds the module to it."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

class TooHard(MemoryError): ...

class Cancel:
    """Ends searches that run in other threads."""

    def __init__(self) -> None: ...
    def cancel(self) -> None: ...
    @property
    def cancelled(self) -> bool: ...

def step_ms(
    passes: NDArray[np.integer],
    runs: NDArray[np.integer],
    micro_batches: int,
    passes_ms: ArrayLike,  # [kinds of passes, chunks]
    sync_ms: ArrayLike,
    send_ms: ArrayLike,
) -> float: ...

class Pipeline:
    def __init__(
        self,
        *,
        layers: NDArray[np.integer],
        most_first: int | None = None,
        micro_batches: int,
        passes: NDArray[np.integer],
        runs: NDArray[np.integer],
        strategies: NDArray[np.float64],
        layouts: NDArray[np.integer],
        types: NDArray[np.integer],
        change: NDArray[np.float64],
        enter: NDArray[np.float64],
        leave: NDArray[np.float64],
        vocabs: NDArray[np.float64],
        vocab_enter: NDArray[np.float64],
        vocab_leave: NDArray[np.float64],
        middle: NDArray[np.float64],
        in_flight: NDArray[np.integer],
        send: NDArray[np.float64],
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
