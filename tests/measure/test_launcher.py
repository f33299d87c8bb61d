"""A profile whose ranks waited too long for one another continues by itself; other failures end it."""

import pytest

from paddlenlp_galvatron.launch.processes import LaunchError
from paddlenlp_galvatron.measure import launcher
from paddlenlp_galvatron.measure.options import ProfileRunOptions


@pytest.mark.parametrize(("waited", "launches"), [(True, 2), (False, 1)])
def test_ranks_that_waited_too_long_begin_once_more(monkeypatch, capsys, waited, launches):
    begun = []

    def end(*arguments: object) -> None:
        begun.append(arguments)
        error = LaunchError("rank 0 has waited for 1800 s in all_reduce")
        error.waited = waited
        raise error

    monkeypatch.setattr(launcher, "_run_once", end)
    with pytest.raises(LaunchError):
        launcher.run_ranks("hardware", "{}", ProfileRunOptions(), "messages")
    assert len(begun) == launches
    assert ("ranks start again; finished measurements are kept" in capsys.readouterr().err) == waited
