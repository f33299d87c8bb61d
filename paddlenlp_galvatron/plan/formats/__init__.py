"""Plans in the files and arguments of other programs and versions."""
