"""The proof that a plan trains what one process trains."""
