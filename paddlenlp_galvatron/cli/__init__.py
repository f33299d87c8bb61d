"""The command line: one file a command.

`main` finds and runs the command; `command` reads its options, fields of the groups that its file names. `help` and
`completion` use the same fields. `planning` and `training_run` show progress.
"""
