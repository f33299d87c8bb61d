"""A step that fits by the bound fits after the first one, too, in an allocator that grows chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.importorskip("paddle")

import paddle
from hypothesis import given
from hypothesis import strategies as st

from paddlenlp_galvatron.runtime import device
from paddlenlp_galvatron.training.recipe import Recipe

from .allocator import ALIGNED, AutoGrowth, OutOfMemory

KIB = 1024


def second_step(
    limit: int, weights: list[int], kept: list[int], in_flight: int, states_first: bool, loads: Sequence[float] = (1.0,)
) -> int:
    """Bytes that steps take from a device: the first with one micro-batch at a time, as a pipeline begins; the
    reserve; others with some in flight. Raises OutOfMemory.

    `weights`: bytes of each layer's, with a gradient and two moments as large; `kept`: bytes that a layer keeps for its
    backward pass, of each tensor. `loads`: share of it that a micro-batch keeps in each later step, as experts get
    other rows."""
    memory = AutoGrowth(limit)

    def moments() -> list[tuple[int, int]]:
        return [memory.allocate(size) for size in weights for _ in range(2)]

    def step(micro_batches: int, load: float = 1.0) -> None:
        sizes = [int(load * size) for _ in weights for size in kept]
        held = [[memory.allocate(size) for size in sizes] for _ in range(micro_batches)]
        gradients = []
        for number, micro_batch in enumerate(held):
            for tensor in reversed(micro_batch):
                memory.free(tensor)
            if not number:
                gradients = [memory.allocate(size) for size in weights]
        if not states and not states_first:
            states.extend(moments())
        for tensor in gradients:
            memory.free(tensor)

    [memory.allocate(size) for size in weights]
    states = moments() if states_first else []
    step(1)
    memory.empty_cache()
    most = in_flight * sum(-(-size // ALIGNED) * ALIGNED for size in kept) * len(weights) + sum(weights)
    memory.free(memory.allocate(most))  # as `Headroom.reserve`: in one piece
    for load in loads:
        step(in_flight, load)
    return memory.taken


@given(
    weights=st.lists(st.integers(1, 64).map(lambda n: n * KIB), min_size=1, max_size=6),
    kept=st.lists(st.integers(1, 96).map(lambda n: n * KIB), min_size=1, max_size=6),
    in_flight=st.integers(1, 4),
    loads=st.lists(st.integers(1, 8).map(lambda n: n / 8), min_size=1, max_size=4),
)
def test_what_fits_by_the_bound_fits_in_the_second_step(weights, kept, in_flight, loads):
    """And in later ones, whose experts get fewer rows than the bound has, in which the first step ran."""
    bound = 4 * sum(weights) + in_flight * sum(kept) * len(weights)  # states, and activations in flight
    assert second_step(bound, weights, kept, in_flight, states_first=True, loads=loads) <= bound


def test_moments_made_behind_the_first_step_would_be_counted_twice():
    weights, kept, in_flight = [64 * KIB] * 4, [96 * KIB] * 3, 2  # moments lie in larger blocks, whose rests are lost
    bound = 4 * sum(weights) + in_flight * sum(kept) * len(weights)
    with pytest.raises(OutOfMemory):
        second_step(bound, weights, kept, in_flight, states_first=False)


@pytest.mark.parametrize("together", [False, True])
def test_an_optimizer_has_its_states_before_its_first_step(together):
    parameter = paddle.create_parameter([64, 64], "float32")
    before = device.allocated_mib()
    optimizer = Recipe(use_multi_tensor=together).over(4).build([parameter], [parameter.name])
    made = device.allocated_mib() - before
    assert made >= 2 * 64 * 64 * 4 / 2**20
    parameter.grad = paddle.ones([64, 64])
    optimizer.step()
    assert device.allocated_mib() - before < made + 1.5 * 64 * 64 * 4 / 2**20  # its gradient alone
