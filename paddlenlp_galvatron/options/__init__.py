"""The options of every command: groups of them, checked field by field; other programs' names for them."""
