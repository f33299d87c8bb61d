from dataclasses import replace

import pytest

from paddlenlp_galvatron.plan import ModelShape
from paddlenlp_galvatron.runtime.adapters import load_family


@pytest.fixture(scope="session", params=["llama", pytest.param("qwen2", marks=pytest.mark.slow)])
def shape(request) -> ModelShape:
    return ModelShape(
        name=f"small-{request.param}",
        family=request.param,
        layers=2,
        hidden_size=64,
        intermediate_size=96,
        heads=8,
        kv_heads=4,
        vocab_size=250,
        max_position_embeddings=64,
    )


@pytest.fixture(scope="session")
def family(shape):
    return load_family(shape.family)


@pytest.fixture(scope="session")
def mixture(shape) -> ModelShape:
    """With experts in place of the MLP."""
    return replace(shape, family="qwen3_moe", experts=4, experts_per_token=2, expert_size=48)
