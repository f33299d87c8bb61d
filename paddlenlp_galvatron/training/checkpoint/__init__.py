"""Checkpoints: written atomically, loaded under any plan; and Hugging Face directories.

`saving` writes and `loading` reads the files that `stored` describes. Hugging Face:
`huggingface` reads the `weight_files`, `convert` converts both ways, with the `companions`. `adapters` are LoRA's.
"""
