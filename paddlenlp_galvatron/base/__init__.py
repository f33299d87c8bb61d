"""The base of every package. It imports no other package.

`errors` end a command; `limits` bound the numbers that users and files may give. `file_kind` and `reading` read files
from outside; `writing` writes our files under a lock. Terminal: `printing`, `text`; `process` for signals, closed
streams and work in a process with limits. `processor` lists the CPU's instructions. `tracing` writes Chrome traces;
`caching` keeps results.
"""

from .caching import once
from .errors import Faults, GalvatronError, Infeasible, UserError, member, plain_fault, reported, within
from .reading import LARGEST_OPTIONS, parse_json, read_json, read_yaml
from .text import Note, count, gib, near, no_note, plain, printable, shortened, without_prefix
from .units import FP32_BYTES, GB_PER_S, GIB, GIB_MIB, MIB, MS_PER_S
