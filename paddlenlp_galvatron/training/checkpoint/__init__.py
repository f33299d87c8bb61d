"""Checkpoints: whole or not at all, for any plan; and Hugging Face directories."""
