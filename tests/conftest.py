import faulthandler
import json
import os
import signal
from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import jsonschema
import pytest
from core_pool import CorePool
from forked_ranks import begin_forked
from hypothesis import HealthCheck, settings
from progress import Progress, pytest_runtest_makereport  # noqa: F401 - a hook

from paddlenlp_galvatron.cli.main import main
from paddlenlp_galvatron.launch import processes as launch
from paddlenlp_galvatron.report.answers import answer_schemas

# The limit of one test with its fixtures, on the slowest machine. Beyond it the test fails by its name, with its stack.
LIMIT_S, SLOW_LIMIT_S = 900, 3600
STUCK_S = 60  # after which a test that does not even take that signal ends the run, with the stack of every thread
STDERR = pytest.StashKey[int]()

# A background shell (`nohup make test &`) passes an ignored Ctrl-C on to all that it starts; tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent
os.environ["PYTHONPATH"] = f"{TESTS / 'helpers'}:{TESTS}"  # for ranks and programs that tests start

# The machine may be busy: no test is about time. `make test` draws the same few examples each time, so that it fails by
# a change alone; `make test-full` draws new ones (--hypothesis-profile=new).
settings.register_profile("new", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("same", settings.get_profile("new"), derandomize=True, database=None, max_examples=15)
settings.load_profile("same")


@pytest.hookimpl(trylast=True)  # behind pytest's own reporter
def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = os.dup(2)  # of the run, before a test's output is captured
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(config))


# Files that take longest, the longest of each folder first: their tests begin while all workers have others to do.
SLOWEST = {
    "distributed": "parity checkpoint tuning deferred loss_pieces states faulty_disk gpu_kernels pretrained surface",
    "gpu_check": "gpu_check",
    "cli": "one_device fit hints quickstart",
    "docs": "blocks docs",
    "planner": "even",
    "calibration": "calibrate",
    "runtime": "streams",
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """One worker begins with launches, which would wait for each other's cores; the others share the other tests, each
    the slowest of its files first. A worker without tests takes some from the end of another's."""
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    slowest = [TESTS / folder / f"test_{name}.py" for folder, of in SLOWEST.items() for name in of.split()]
    ranks = {str(path): rank for rank, path in enumerate(slowest)}
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(str(item.path), []).append(item)
    names = sorted(files, key=lambda name: ranks.get(name, len(ranks)))
    if workers > 1:
        first = [name for name in names if Path(name).parent.name == "distributed"]
        others = [name for name in names if name not in first]
        while others and sum(len(files[name]) for name in first) < len(items) // workers:
            first.append(others.pop())
        names = [*first, *(name for worker in range(workers - 1) for name in others[worker :: workers - 1])]
        items[:] = [item for name in names for item in files[name]]
    for item in items:
        if not item.get_closest_marker("timeout"):
            limit_s = SLOW_LIMIT_S if item.get_closest_marker("slow") else LIMIT_S
            item.add_marker(pytest.mark.timeout(limit_s, method="signal"))  # the tests after it are run


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A crash of the interpreter says in which test.

    Paddle's import puts its own handlers in place of pytest's, and what they say goes where a test's output is
    captured: lost with the process. Disabled and enabled, Python's are in place again.
    """
    stderr, limit = item.config.stash[STDERR], item.get_closest_marker("timeout")
    assert limit
    faulthandler.disable()
    faulthandler.enable(file=stderr)
    faulthandler.dump_traceback_later(limit.args[0] + STUCK_S, exit=True, file=stderr)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session", autouse=True)
def forked_ranks(tmp_path_factory):
    """Launches cost no import of Paddle, and share the cores. Gives the launcher's own function, which starts ranks."""
    run = tmp_path_factory.getbasetemp()
    pool = CorePool((run.parent if "PYTEST_XDIST_WORKER" in os.environ else run) / "cores")
    enter, leave = launch.Launch.__enter__, launch.Launch.__exit__

    def enter_with_cores(self):
        if hasattr(self, "cores"):  # ranks that are started once more keep theirs
            return enter(self)
        with ExitStack() as cores:
            cores.enter_context(pool.ranks(self._world.nproc))
            entered = enter(self)
            self.cores = cores.pop_all()
        return entered

    def leave_cores(self, *error):
        with self.cores:
            leave(self, *error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch.Launch, "__enter__", enter_with_cores)
        patch.setattr(launch.Launch, "__exit__", leave_cores)
        start = launch.begin_process
        patch.setattr(launch, "begin_process", begin_forked)
        yield start


@pytest.fixture(autouse=True)
def isolated(request, monkeypatch, forked_ranks):
    """A test leaves the environment as it was, and Ctrl-C to Python: PaddleNLP's logger takes it. Ranks of a test that
    is marked `started` begin as a user's."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request.node.get_closest_marker("started"):
        monkeypatch.setattr(launch, "begin_process", forked_ranks)
    with mock.patch.dict(os.environ):
        yield


class Ran(NamedTuple):
    """The results of a command."""

    code: int
    out: str
    err: str


@pytest.fixture
def galvatron(capsys, tmp_path, monkeypatch) -> Callable[..., Ran]:
    """Runs a `galvatron` command in this process, in the test's folder."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> Ran:
        capsys.readouterr()
        arguments = [str(word) for word in words]
        ran = Ran(main(arguments), *capsys.readouterr())
        for name, schema in answer_schemas().items():  # of those that list every key
            closed = schema.get("additionalProperties") is False
            if closed and arguments[: len(name.split())] == name.split() and "--json" in arguments and ran.out:
                jsonschema.validate(json.loads(ran.out.splitlines()[-1]), schema)
        return ran

    return run
