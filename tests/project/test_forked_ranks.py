"""Ranks may be forked from a process that has imported the project; others are started as a user's."""

import sys

import pytest

pytest.importorskip("paddle")

from forked_ranks import begin_forked, begun_with, fork, imported_modules


def test_a_rank_that_would_differ_from_a_started_one_is_not_forked(tmp_path):
    with pytest.raises(ValueError, match=r"\['LD_PRELOAD'\] cannot be forked: mark the test"):
        begin_forked([sys.executable, "x.py"], begun_with() | {"LD_PRELOAD": "of this rank"}, tmp_path / "log", 0)


IMPORTS = """
import os, socket, sys, threading, time
from importlib import import_module
read = []
for name in [name for name in sys.modules if name.startswith("paddlenlp_galvatron")]:
    del sys.modules[name]

def watch(holder, name):
    original = getattr(holder, name)
    def watched(*arguments, **named):
        file = sys._getframe(1).f_code.co_filename
        file = sys._getframe(2).f_code.co_filename if file == os.__file__ else file
        if "/paddlenlp_galvatron" in file:
            read.append(f"{file}: {name} {arguments[1:]}")
        return original(*arguments, **named)
    setattr(holder, name, watched)

for name in ("__getitem__", "__iter__", "get", "pop"):
    watch(type(os.environ), name)
for name in ("time", "monotonic", "perf_counter", "strftime"):
    watch(time, name)
for holder, name in ((os, "getpid"), (os, "getenv"), (socket, "gethostname"), (threading.Thread, "start")):
    watch(holder, name)
for name in sys.argv[1:]:
    import_module(name)
os.environ.get("X") if len(sys.argv) == 1 else None
print(*read, sep="\\n")
sys.exit(len(read))
"""


def test_importing_the_project_reads_neither_environment_nor_clock(tmp_path):
    """So ranks may be forked from a process that has imported it."""
    program, log = tmp_path / "imports.py", tmp_path / "log"
    program.write_text(IMPORTS)
    assert fork([str(program), *imported_modules()], begun_with(), log).wait(300) == 0, log.read_text()
    program = tmp_path / "paddlenlp_galvatron.py"  # a name of the project's, and no module
    program.write_text(IMPORTS)
    assert fork([str(program)], begun_with(), log).wait(300) == 1, log.read_text()
