"""From text to batches: tokens on disk, their order, and the global batch of each step.

Pretraining: `corpus` with a `tokenizer` writes `token_files`, a `dataset` has their samples by a `sample_index`, a
`source` the batches. Fine-tuning: `conversations` by `templates`, or pairs (`preferences`), are laid into rows
(`packing`, `tuning`). `map_dataset` takes a user's own.
"""
