"""Files and command lines that nobody means well with, and what runs them under limits."""
