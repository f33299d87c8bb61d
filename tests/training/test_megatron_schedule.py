"""Megatron-LM's schedule by its names, against its definition; PaddleNLP's warm-up as its Trainer counts."""

import math

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.options.group import canonical_options
from paddlenlp_galvatron.training.recipe import Recipe

HIGHEST, LOWEST, BATCH = 1e-3, 1e-4, 8


def megatron_rate(step: int, style: str, steps: int, decay: int | None, fraction: float | None, warmup: int) -> float:
    """The rate after `step` steps, which Megatron-LM counts in samples."""
    last = (decay or steps) * BATCH
    rising = warmup * BATCH if fraction is None else fraction * last
    samples = step * BATCH
    if rising > 0 and samples <= rising:
        return HIGHEST * samples / rising
    if style == "constant":
        return HIGHEST
    if samples > last:
        return LOWEST
    share = (samples - rising) / (last - rising)
    left = 1 - share if style == "linear" else (1 + math.cos(math.pi * share)) / 2
    return LOWEST + (HIGHEST - LOWEST) * left


@given(
    style=st.sampled_from(["linear", "cosine", "constant"]),
    steps=st.integers(2, 30),
    decay=st.none() | st.integers(2, 40),
    fraction=st.none() | st.sampled_from([0.0, 0.002, 0.1, 0.29, 0.5, 0.9]),
    warmup=st.integers(0, 12),
)
@example(style="cosine", steps=20, decay=10, fraction=0.5, warmup=0)  # ended its warm-up at step 10
@example(style="constant", steps=20, decay=None, fraction=None, warmup=5)  # had no warm-up
def test_a_schedule_by_megatron_names_is_megatrons(style, steps, decay, fraction, warmup):
    assume(fraction is None or warmup == 0)
    assume(warmup < (decay or steps))  # Megatron-LM refuses others
    stated = {"lr": HIGHEST, "min_lr": LOWEST, "lr_decay_style": style, "lr_decay_iters": decay}
    stated |= {"lr_warmup_iters": warmup, "lr_warmup_fraction": fraction}
    recipe = Recipe.from_values(canonical_options(stated, Recipe.model_fields)).over(steps)
    first = 0 if style == "constant" else 1  # the rate that Megatron-LM logs for a step is that of the next one
    for step in range(steps):
        expected = megatron_rate(step + first, style, steps, decay, fraction, warmup)
        assert recipe.rate_at(step) == pytest.approx(expected, rel=1e-9), step


@pytest.mark.parametrize(
    ("ratio", "steps", "warmup"),
    [
        pytest.param(0.03, 50, 1, id="1.5 steps"),
        pytest.param(0.29, 100, 28, id="28.999… as a product of floats"),
        pytest.param(0.1, 30, 3, id="3 steps"),
        pytest.param(0.01, 50, 0, id="half a step"),
    ],
)
def test_warmup_ratio_counts_as_paddlenlps_trainer(ratio, steps, warmup):
    assert Recipe(warmup_ratio=ratio).over(steps).warmup_steps == warmup == int(ratio * steps)


@pytest.mark.parametrize("other", [{"warmup_steps": 3}, {"warmup_ratio": 0.1}])
def test_two_lengths_of_the_warm_up_are_refused(other):
    with pytest.raises(UserError, match="lr_warmup_fraction: is given with warmup_steps or warmup_ratio"):
        Recipe.from_values({"lr_warmup_fraction": 0.1, **other})
