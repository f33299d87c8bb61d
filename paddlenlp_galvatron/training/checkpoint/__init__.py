"""Checkpoints: whole or not at all, for any plan; and Hugging Face directories.

`saving` writes and `loading` reads what `stored` describes, by `resharding`; `choice` finds one. `tensor_file` is
safetensors. Hugging Face: `huggingface` reads, `model_folder` writes, `convert` does both, `pretrained` chooses
between the two kinds. `adapters` are LoRA's.
"""
