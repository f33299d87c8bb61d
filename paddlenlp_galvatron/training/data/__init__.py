"""From text to batches: tokens on disk, their order, and the global batch of each step.

Pretraining: `corpus` with a `tokenizer` writes the files of a `dataset`, which orders their samples; a `source` gives
the batches. Fine-tuning: `templates` turn a line's `fields` into `conversations` or pairs, which `tuning` packs into
rows. Both read the special tokens of a tokenizer.json from the files next to it.
"""
