"""The config.json of a model that trains in seconds."""

MODEL = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 16,
}
