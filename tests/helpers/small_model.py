"""Models as config.json has them, that take seconds."""

MODEL = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 16,
}

# One with KV heads of its own, that is profiled in seconds.
GROUPED_MODEL = {
    "model_type": "qwen2",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 250,
    "max_position_embeddings": 64,
}

# The same with experts.
MIXTURE_MODEL = GROUPED_MODEL | {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
