"""The base of every package. It imports no other package.

`errors` end a command; `limits` bound numbers of users and files. Files from outside: `file_kind`, `reading`, and
`limited` for work on them in a process of its own. Files of ours: `writing`, `locking`, `scratch`. Terminal:
`printing`, `text`; `process` for signals and streams that end. `processor` has its instructions. `tracing` writes
Chrome traces.
"""

from .errors import GalvatronError, Infeasible, UserError

__all__ = ["GalvatronError", "Infeasible", "UserError"]
