"""The ceiling of lines rises only with a reason, in any state of a repository."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from size import raised


@pytest.mark.parametrize(
    ("before", "messages", "passes"),
    [
        pytest.param({"code": 20, "tests": 30}, "", True, id="same"),
        pytest.param({"code": 25, "tests": 30}, "", True, id="lower"),
        pytest.param({"code": 19, "tests": 30}, "", False, id="higher"),
        pytest.param({"code": 25, "tests": 29}, "", False, id="tests higher while code is lower"),
        pytest.param({"code": 18, "tests": 29}, "Size: +3, because of x", True, id="both with a reason"),
        pytest.param({"code": 18, "tests": 29}, "a\n\nSize: +2, because of x\n\nSize: +1, because y", True, id="two"),
        pytest.param({"code": 18, "tests": 29}, "Size: +2, because of x", False, id="reason for fewer lines"),
        pytest.param({"code": 18, "tests": 29}, "Size: +3, because", False, id="no reason"),
        pytest.param({"code": 18, "tests": 29}, "(Size: +3, because of x)", False, id="within a sentence"),
        pytest.param({}, "", True, id="no ceiling before"),
    ],
)
def test_raised_ceilings_need_a_reason(before, messages, passes):
    assert (raised(before, {"code": 20, "tests": 30}, messages) == []) == passes
