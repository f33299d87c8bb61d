"""Files and command lines that nobody means well with, made by grammars from a seed, and what runs them."""
