"""The initial weights of both sides of a case."""

from ...model.shape import CHOICE_BIAS
from ...runtime.weights import WHOLE, Array, SeededWeights, Slice

LARGEST_BIAS = 0.3  # of a score: as large as the differences between scores


class CaseWeights(SeededWeights):
    """Random weights, including the bias of a router's choice, which is 0 in a new model."""

    def __call__(self, name: str, shape: tuple[int, ...], rank_slice: Slice = WHOLE) -> Array:
        if name.endswith(CHOICE_BIAS):
            return self.uniform(name, shape, rank_slice, LARGEST_BIAS)
        return super().__call__(name, shape, rank_slice)
