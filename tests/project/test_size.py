"""The ceiling of lines rises only with a reason, in any state of a repository."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from size import ceiling_faults, raised


@pytest.mark.parametrize(
    ("before", "messages", "passes"),
    [
        pytest.param({"code": 20, "tests": 30}, "", True, id="same"),
        pytest.param({"code": 25, "tests": 30}, "", True, id="lower"),
        pytest.param({"code": 19, "tests": 30}, "", False, id="higher"),
        pytest.param({"code": 25, "tests": 29}, "", False, id="tests higher while code is lower"),
        pytest.param({"code": 18, "tests": 29}, "Size: +3, because of x", True, id="both with a reason"),
        pytest.param(
            {"code": 18, "tests": 29}, "a: B\n\nSize: +2, because of x\n\nSize: +1, because y", True, id="two"
        ),
        pytest.param({"code": 18, "tests": 29}, "Size: +2, because of x", False, id="reason for fewer lines"),
        pytest.param({"code": 18, "tests": 29}, "Size: +3, because", False, id="no reason"),
        pytest.param({"code": 18, "tests": 29}, "(Size: +3, because of x)", False, id="within a sentence"),
        pytest.param({}, "", True, id="no ceiling before"),
    ],
)
def test_raised_ceilings_need_a_reason(before, messages, passes):
    assert (raised(before, {"code": 20, "tests": 30}, messages) == []) == passes


def test_changes_of_a_repository(tmp_path):
    """On a branch, on main with and without commits, in a clone without the branch `main`, and without git."""
    repository, owner = tmp_path / "repository", tmp_path / "ceiling.json"

    def git(*words, root=repository):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *words], cwd=root, check=True, capture_output=True)

    def ceiling(code):
        (repository / "pyproject.toml").write_text(f"[tool.size]\ncode = {code}\ntests = 5\n")

    def faults(code, root=repository, message=""):
        return ceiling_faults({"code": code, "tests": 5}, message, root, owner)

    repository.mkdir()
    ceiling(10)
    assert faults(10) == []  # no git
    git("init", "--initial-branch=main")
    git("add", ".")
    git("commit", "-m", "a")
    assert faults(10) == []  # the first commit
    ceiling(11)
    assert faults(11) and not faults(11, message="Size: +1, because of it")  # on main, before the commit
    git("checkout", "-b", "branch")
    git("commit", "-am", "b: Raise")
    git("commit", "--allow-empty", "-m", "b: Another")
    assert faults(11)  # on a branch
    git("clone", "--quiet", str(repository), str(tmp_path / "clone"), root=tmp_path)
    assert faults(11, tmp_path / "clone")  # only origin/main
    git("checkout", "main")
    git("merge", "--no-ff", "-m", "Merge branch", "branch")
    assert faults(11)  # merged
    git("commit", "--allow-empty", "-m", "c: D\n\nSize: +1, because of it")
    assert faults(11) == []
    owner.write_text(json.dumps({"code": 10, "comment": "mine"}))
    assert faults(11) == ["[tool.size] code: 11 is above the owner's 10"]
