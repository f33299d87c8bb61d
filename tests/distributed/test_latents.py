"""DeepSeek's layers train as in one process, whose attention is PaddleNLP's own and whose experts are plain loops."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("paddle")

from paddlenlp_galvatron.check.parity.parity import Case, compare, write_cases
from paddlenlp_galvatron.launch.processes import launch
from paddlenlp_galvatron.plan import Precision

from . import plans
from .test_experts import cases
from .test_families import disagreements

YARN = {"factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 32, "beta_slow": 1}
YARN |= {"mscale": 0.7, "mscale_all_dim": 0.9}


def with_yarn(case: Case) -> Case:
    return replace(case, shape=replace(case.shape, rope_scaling=(("rope_type", "yarn"), *YARN.items())))


def lite(case: Case) -> Case:
    """As V2-Lite and Moonlight: queries come from the hidden state."""
    assert case.shape.latents
    return replace(case, shape=replace(case.shape, latents=replace(case.shape.latents, q_lora_rank=0)))


def unscaled(case: Case) -> Case:
    """In 16 bits the limits are those of scores that sum to 1, also in the balance loss: of sigmoids it is half of the
    loss, and after one step the rounding of its gradients is seen."""
    wide = case.plan.assumed.mixed_precision is Precision.FP32
    plain = replace(case.shape, routed_scaling_factor=1.0, router_aux_loss_coef=0.0)
    return case if wide else replace(case, shape=plain)


def test_latents_of_two_processes():
    named = [unscaled(case) for case in cases(plans.LATENT_TWO)]
    assert not disagreements([*named, *map(lite, map(with_yarn, named[1:4]))])


def test_latents_of_four_processes():
    named = cases(plans.LATENT_FOUR)
    assert not disagreements([*named[1:], replace(lite(with_yarn(named[0])), packed=True)])


@pytest.mark.slow
def test_other_latents_of_four_processes():
    named = cases(plans.LATENT_FOUR)
    packed = [replace(case, packed=True) for case in named[1:3]]
    assert not disagreements([named[0], *packed, with_yarn(named[0]), *map(lite, named[1:])])


@pytest.mark.slow
@pytest.mark.parametrize("named", [plans.LATENT_SIX, plans.LATENT_EIGHT], ids=["6 ranks", "8 ranks"])
def test_latents_of_more_processes(named):
    assert not disagreements([*cases(named), *map(lite, cases(named))])


@pytest.mark.parametrize(
    ("mistake", "named", "weight"),
    [("shared key", plans.LATENT_TWO[1], "kv_a_proj_with_mqa"), ("down", plans.LATENT_TWO[0], "_a_proj")],
)
def test_a_gradient_that_is_not_summed_is_found(tmp_path, mistake, named, weight):
    [case] = cases([named])
    case = replace(case, steps=1)
    write_cases(tmp_path, [case])
    launch(f"{__package__}.wrong_latents_worker", [str(tmp_path), mistake], 2, tmp_path / "log", timeout_s=300)
    [found] = compare(tmp_path, [case])
    assert found.max_grad_rel_diff > 100 * found.limits[1] and weight in found.worst_gradient, found
