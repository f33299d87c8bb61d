"""What of a model to measure: batch sizes and sequence lengths by Galvatron's profiling options, and degrees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ..plan import Assumptions, LayerStrategy, ModelShape, Plan, UserError, VocabStrategy
from ..plan.check import require_valid
from ..profiles import Shape
from ..runtime.support import require_supported

MODEL_LENGTH = 2048  # tokens of a sample where nothing is said and the model allows as many


class ProfileMode(StrEnum):
    """What is varied."""

    STATIC = "static"  # nothing: profile_batch_size samples of each length of profile_seq_length_list
    BATCH = "batch"  # the batch size, at each length of profile_seq_length_list
    SEQUENCE = "sequence"  # the length, at profile_batch_size samples


@dataclass(frozen=True)
class Steps:
    """The numbers from `first` to `last` by `step`."""

    first: int
    last: int
    step: int

    def numbers(self, name: str) -> list[int]:
        """Raises UserError, which calls them by `name`, when there are none."""
        if self.first < 1 or self.step < 1 or self.last < self.first:
            raise UserError(
                f"profile_min_{name}: nothing from {self.first} to {self.last} by {self.step}; "
                f"make profile_max_{name} at least profile_min_{name} and both and the step at least 1"
            )
        return list(range(self.first, self.last + 1, self.step))


def points(mode: ProfileMode, batch_size: int, batches: Steps, seq_length_list: str, lengths: Steps) -> list[Shape]:
    """Every (samples, tokens of a sample) to measure. Raises UserError."""
    if batch_size < 1:
        raise UserError(f"profile_batch_size: {batch_size} samples cannot be measured; give at least 1")
    if mode is ProfileMode.SEQUENCE:
        return [Shape(batch_size, length) for length in lengths.numbers("seq_length")]
    sizes = [batch_size] if mode is ProfileMode.STATIC else batches.numbers("batch_size")
    return [Shape(size, length) for length in read_lengths(seq_length_list) for size in sizes]


def read_lengths(text: str) -> list[int]:
    """The numbers of a list such as "512,1024". Raises UserError."""
    try:
        lengths = [int(part) for part in text.strip("[]").split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 1:
        raise UserError(f"profile_seq_length_list: {text!r} is no list of lengths; give one such as 512,1024")
    return lengths


def runnable_degrees(shape: ModelShape, world_size: int, largest: int, lengths: Sequence[int]) -> list[int]:
    """Tensor-parallel degrees up to `largest` that divide the world and that the model and the runtime can split by."""
    return [
        degree
        for degree in range(1, min(world_size, largest) + 1)
        if world_size % degree == 0 and all(_is_runnable(shape, degree, length) for length in lengths)
    ]


def _is_runnable(shape: ModelShape, degree: int, seq_length: int) -> bool:
    plan = Plan(
        world_size=degree,
        global_batch=1,
        micro_batches=1,
        stages=(shape.layers,),
        layers=(LayerStrategy(degree),) * shape.layers,
        vocab=VocabStrategy(degree),
        assumed=Assumptions(sequence_parallel=True, seq_length=seq_length),  # the stricter case
    )
    try:
        require_valid(plan, shape)
        require_supported(plan, shape)
    except UserError:
        if degree == 1:
            raise  # a model that cannot run at all: say why
        return False
    return True
