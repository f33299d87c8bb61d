"""From text to batches: tokens on disk, their order, and the global batch of each step."""
