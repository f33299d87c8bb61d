"""DeepSeek's layers train as in one process, whose attention is PaddleNLP's own and whose experts are plain loops."""

from dataclasses import replace

import pytest

pytest.importorskip("paddle")

from paddlenlp_galvatron.check.parity.parity import Case

from . import plans
from .test_parity import disagreements

YARN = {"factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 32, "beta_slow": 1}
YARN |= {"mscale": 0.7, "mscale_all_dim": 0.9}


def with_yarn(case: Case) -> Case:
    return replace(case, shape=replace(case.shape, rope_scaling=(("rope_type", "yarn"), *YARN.items())))


def lite(case: Case) -> Case:
    """As V2-Lite and Moonlight: queries come from the hidden state."""
    assert case.shape.latents
    return replace(case, shape=replace(case.shape, latents=replace(case.shape.latents, q_lora_rank=0)))


def test_scaled_positions_and_plain_queries_train_as_one_process_does():
    assert not disagreements([lite(with_yarn(of.case())) for of in plans.LATENT_TWO[1:4]])


def test_packed_latents_train_as_one_process_does():
    assert not disagreements([replace(lite(with_yarn(plans.LATENT_FOUR[0].case())), packed=True)])


@pytest.mark.slow
@pytest.mark.parametrize("cases", [plans.LATENT_FOUR, plans.LATENT_SIX, plans.LATENT_EIGHT])
def test_plain_queries_under_every_plan_train_as_one_process_does(cases):
    assert not disagreements([lite(of.case()) for of in cases])
