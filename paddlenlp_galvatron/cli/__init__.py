"""The command line: one file a command.

`main` finds the command and ends it; `command` reads its options, whose fields its file names, with `help` and
`completion` from the same fields. `training_run` and `watched` show how long work is doing.
"""
