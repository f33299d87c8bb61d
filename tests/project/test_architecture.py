"""Rules of the project as a whole: who imports whom, the length of files, and names that no file may have."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LONGEST_FILE = 600  # lines; a file with one subject seldom passes 400


def project_files() -> list[Path]:
    """Files that git tracks or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("this copy has no git, which knows the project's files", allow_module_level=True)
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]


FILES = project_files()
SOURCES = [path for path in FILES if path.suffix in (".py", ".cpp", ".hpp", ".h", ".sh")]


PLANNING = (
    *("base", "model", "plan", "options", "profiles", "cost_model", "planner", "report"),
    *("cli.main", "cli.plan"),
)


@pytest.mark.parametrize("package", PLANNING)
def test_planning_runs_without_paddle(package):
    """In a process in which importing Paddle fails, as on a machine that has none."""
    program = (
        "import sys, importlib, pkgutil\n"
        "sys.modules.update(dict.fromkeys(['paddle', 'paddlenlp']))\n"
        f"package = importlib.import_module('paddlenlp_galvatron.{package}')\n"
        "for module in pkgutil.walk_packages(getattr(package, '__path__', []), package.__name__ + '.'):\n"
        "    importlib.import_module(module.name)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert ran.returncode == 0, ran.stderr


PRIVATE = re.compile(
    r"\bpaddle\.base import core|\b_C_ops\b|\b_hcg\b|_HYBRID_PARALLEL_GROUP|\._(share_buffer_to|slice|clear_data"
    r"|set_dims|parameters|learning_rate|accumulators|master_weights|new_process_group_impl|is_cpuonly)\b"
)
MAY_BE_PRIVATE = {"paddle_private.py", "cpu_backend.py", "store.py"}  # store: its client of the TCP store


def test_private_paddle_is_called_in_few_files():
    """Private names of Paddle, which a new version may change silently, are used in one place."""
    package = (ROOT / "paddlenlp_galvatron").rglob("*.py")
    found = {path.name for path in package if PRIVATE.search(path.read_text())}
    assert found == MAY_BE_PRIVATE


def test_files_are_short():
    long = {str(p.relative_to(ROOT)): n for p in SOURCES if (n := len(p.read_text().splitlines())) > LONGEST_FILE}
    assert not long


def test_the_pinned_set_is_exact_and_has_what_pyproject_asks_for():
    lines = (ROOT / "requirements" / "pinned.txt").read_text().splitlines()
    pins = [Requirement(line.partition(" --hash")[0]) for line in lines if line and not line.startswith(("#", "--"))]
    versions = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in pins}
    assert all(str(pin.specifier) == f"=={versions[canonicalize_name(pin.name)]}" for pin in pins)
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = asked["project"]
    extras = [line for extra in project["optional-dependencies"].values() for line in extra]
    for wanted in map(Requirement, [*asked["build-system"]["requires"], *project["dependencies"], *extras]):
        if wanted.name == project["name"]:  # an extra that has another one
            continue
        assert wanted.specifier.contains(versions[canonicalize_name(wanted.name)]), str(wanted)


FORBIDDEN = {
    "the host of a package registry": r"pypi\.|pythonhosted|\bindex-url|\bfind-links|\.bcebos\.|mirrors?\.[a-z]+\.",
    "a path of somebody's machine": r"(?<![\w.])/(home|root|work|mnt|Users)/\w",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_names(what):
    found = []
    for path in FILES:
        if path == Path(__file__) or path.suffix in (".png", ".svg"):
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if re.search(FORBIDDEN[what], line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not found


def test_what_is_installed_beside_paddles_gpu_build_is_no_paddle():
    """paddlepaddle-gpu and paddlepaddle are two distributions of one folder: the second would be written over it."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {canonicalize_name(Requirement(line).name) for line in extras["gpu"]}
    assert names and not any(name.startswith("paddlepaddle") for name in names)
    assert {Requirement(line).name for line in extras["paddle"]} == {"paddlenlp-galvatron", "paddlepaddle"}
    assert any(Requirement(line).extras == {"gpu"} for line in extras["paddle"])
