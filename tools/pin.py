"""Writes into requirements/*.txt the checksum of every package's file, by which pip refuses any other file.

    python tools/pin.py        after a version was changed there

pip itself is asked which file it would take, for each Python that scripts/setup.sh takes, on Linux on x86-64.
"""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

REQUIREMENTS = Path(__file__).parents[1] / "requirements"
PYTHONS = ("3.11.9", "3.12.9")  # some packages refuse the first patches of one
GLIBC = (5, 12, 17, 24, 26, 27, 28, 31, 34)  # minor versions in names of wheels, manylinux_2_N
PINNED = re.compile(r"^(# )?([\w.-]+)==(\S+)(?: --hash=\S+)*$", re.MULTILINE)  # `# `: setup.sh may choose it
SOURCES = re.compile(r"^--no-binary (\S+)$", re.MULTILINE)


def checksums(requirements: set[str], sources: str, python: str, glibc: Sequence[int]) -> dict[str, str]:
    """sha256 of the file of each `name==version`, by its name in lower case with dashes. `glibc`: the preferred minor
    version first."""
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in glibc]
    platforms += [f"--platform={name}_x86_64" for name in ("manylinux1", "manylinux2010", "manylinux2014", "linux")]
    with TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        words = ["install", "--dry-run", "--no-deps", "--ignore-installed", "--no-build-isolation"]
        words += ["--disable-pip-version-check", f"--report={report}"]
        words += [f"--target={folder}/packages", f"--python-version={python}", *platforms]
        words += ["--only-binary=:all:", f"--no-binary={sources}", *sorted(requirements)]
        subprocess.run([sys.executable, "-m", "pip", *words], check=True, stdout=subprocess.DEVNULL)
        found = json.loads(report.read_text())["install"]
    return {
        canonical(one["metadata"]["name"]): one["download_info"]["archive_info"]["hash"].replace("=", ":")
        for one in found
    }


def canonical(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()


def main() -> None:
    for file in sorted(REQUIREMENTS.glob("*.txt")):
        text = file.read_text()
        sources = SOURCES.search(text)
        found: dict[str, set[str]] = {}
        rounds: list[set[str]] = [set(), set()]  # pip takes one version of a package at a time
        for mark, name, version in PINNED.findall(text):
            rounds[bool(mark)].add(f"{name}=={version}")
        for python, glibc in product(PYTHONS, (GLIBC, GLIBC[::-1])):  # newest and oldest machines
            for requirements in filter(None, rounds):
                of_name = checksums(requirements, sources[1] if sources else "", python, glibc)
                for requirement in requirements:
                    found.setdefault(requirement, set()).add(of_name[canonical(requirement.partition("==")[0])])

        def with_checksums(match: re.Match[str], found: dict[str, set[str]] = found) -> str:
            mark, name, version = match.groups()
            hashes = sorted(found[f"{name}=={version}"])
            return " ".join([f"{mark or ''}{name}=={version}", *(f"--hash={one}" for one in hashes)])

        file.write_text(PINNED.sub(with_checksums, text))


if __name__ == "__main__":
    main()
