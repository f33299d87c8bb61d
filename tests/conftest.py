from collections.abc import Callable
from typing import NamedTuple

import pytest
from forked_ranks import forking
from hypothesis import HealthCheck, settings

from paddlenlp_galvatron.cli.main import main
from paddlenlp_galvatron.launch import processes as launch

# The machine may be busy: no test is about time.
settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("here")


@pytest.fixture(scope="session", autouse=True)
def forked_ranks():
    """Launches cost no import of Paddle."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "begin_process", forking(begin := launch.begin_process))
        yield begin


@pytest.fixture
def begun_ranks(forked_ranks, monkeypatch):
    """For tests of the launch itself: ranks begin as a user's."""
    monkeypatch.setattr(launch, "begin_process", forked_ranks)


class Ran(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def galvatron(capsys) -> Callable[..., Ran]:
    """Runs a `galvatron` command in this process."""

    def run(*words: object) -> Ran:
        capsys.readouterr()
        code = main([str(word) for word in words])
        return Ran(code, *capsys.readouterr())

    return run
