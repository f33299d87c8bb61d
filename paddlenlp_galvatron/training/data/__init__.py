"""From text to batches: tokens on disk, their order, and the global batch of each step.

Pretraining: `corpus` with a `tokenizer` writes the files of a `dataset`, which has their samples by a `sample_index`; a
`source` has the batches. Fine-tuning: a line's `fields` become `conversations` by `templates`, also pairs, which are
laid into rows (`tuning`). Both find the `special_tokens` of a tokenizer.json beside it.
"""
