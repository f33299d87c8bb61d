"""Models as config.json has them, that take seconds."""

from typing import Any


def small_config(
    family: str = "llama",
    *,
    layers: int = 2,
    hidden: int = 32,
    inner: int = 64,
    heads: int = 4,
    vocab: int = 64,
    length: int = 16,
    **more: Any,
) -> dict[str, Any]:
    """`inner`: the MLP's width. `length`: positions. `more`: fields as they are."""
    widths = {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads, "vocab_size": vocab}
    return {"model_type": family, "num_hidden_layers": layers, **widths, "max_position_embeddings": length, **more}


MODEL = small_config()
# One with KV heads of its own, that is profiled in seconds.
GROUPED = {"hidden": 64, "inner": 96, "heads": 8, "num_key_value_heads": 4, "vocab": 250, "length": 64}
GROUPED_MODEL = small_config("qwen2", **GROUPED)
# The same with experts.
MIXTURE_MODEL = small_config("qwen3_moe", **GROUPED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
