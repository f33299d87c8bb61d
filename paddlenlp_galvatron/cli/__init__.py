"""The command line: one file a command.

`main` finds the command and ends it; `command` reads its options, whose fields its file names, with `help` and
`completion` from the same fields. `planning` and `training_run` show how far work is.
"""
