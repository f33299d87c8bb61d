"""Runs the parts within their time and keeps a folder with all records of failures."""

import json
import os
import shutil
import tarfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple

from ...base.errors import GalvatronError, UserError
from ...base.reading import read_json
from ...base.writing import LOCK, whole_file, write_text
from ...launch.processes import Device
from ..doctor import Files, Machine, examine
from ..findings import Finding, Outcome, findings_json, outcome_of
from . import faults, kernels, parity, prediction
from .setting import PARTS as NAMES
from .setting import CheckSetting, Part

LEAST_S = 5.0  # a part needs at least this time
MACHINE, RESULT, BUNDLE = "machine.json", "result.json", "gpu-check.tar.gz"
WRITER = {"written_by": "galvatron gpu-check"}  # in MACHINE: the next check may empty this folder
SHOWN_VARIABLES = ("CUDA_", "NCCL_", "FLAGS_", "NVIDIA_", "GLOO_", "OMP_", "LD_LIBRARY_PATH")
PACKAGES = ("paddle", "paddlenlp", "nvidia", "numpy", "galvatron")
COMMANDS = (["nvidia-smi"], ["nvidia-smi", "topo", "-m"], ["uname", "-a"])


class Timed(NamedTuple):
    """A part and its share of the time left when it begins."""

    run: Part
    share: float
    every_world: bool = False  # also run with two ranks


PARTS = {
    "kernels": Timed(kernels.kernels, 0.2),
    "parity": Timed(parity.parity, 0.25, every_world=True),
    "schedules": Timed(parity.schedules, 0.25, every_world=True),
    "resume": Timed(faults.resume, 0.3),
    "memory": Timed(faults.memory, 0.3),
    "later": Timed(faults.later, 0.3),
    "waits": Timed(faults.waits, 0.3),
    "overlap": Timed(faults.overlap, 0.3),
    "prediction": Timed(prediction.prediction, 0.7),
    "stock": Timed(prediction.stock, 1.0),
}
assert tuple(PARTS) == NAMES  # NAMES is used before Paddle is imported


def worlds(ranks: int) -> list[int]:
    """Numbers of ranks that are tried: two, then all."""
    return sorted({min(2, ranks), ranks})


def check(parts: Sequence[str], most_ranks: int, device: Device, folder: Path, seconds: float) -> Iterator[Finding]:
    """Run parts one after the other in a new `folder`. A failed part does not stop the others."""
    end = time.monotonic() + seconds
    write_text(folder / MACHINE, json.dumps(WRITER | _machine(), indent=2) + "\n")
    plain = [(suite, ranks) for suite in parts for ranks in worlds(most_ranks)]
    for suite, ranks in plain:
        if ranks < most_ranks and not PARTS[suite].every_world:
            continue
        left_s = end - time.monotonic()
        part_folder = folder / suite / f"{ranks}-ranks"
        setting = CheckSetting(suite, ranks, device, part_folder, time.monotonic() + PARTS[suite].share * left_s)
        if left_s < LEAST_S:
            yield setting.no_time("all of it", f"no time was left of {seconds:.0f} s")
            continue
        part_folder.mkdir(parents=True)
        yield from _found(setting)


def _found(setting: CheckSetting) -> Iterator[Finding]:
    """Findings of a part, each with its time."""
    since = time.monotonic()

    def timed(finding: Finding) -> Finding:
        return replace(finding, seconds=round(time.monotonic() - since, 1))

    try:
        for finding in PARTS[setting.part].run(setting):
            yield timed(finding)
            since = time.monotonic()
    except GalvatronError as error:
        yield timed(setting.ended("all of it", str(error), time.monotonic() - since))
    except Exception as error:  # from Paddle or the driver; the other parts still run
        (setting.folder / "error.txt").write_text(traceback.format_exc())
        yield timed(setting.found("all of it", False, f"{type(error).__name__}: {error}"))


def write_result(folder: Path, device: Device, findings: Sequence[Finding]) -> Outcome:
    """Write the result, and return its outcome."""
    write_text(folder / RESULT, json.dumps(findings_json(findings, device=device), indent=2) + "\n")
    return outcome_of(findings)


def bundle(folder: Path) -> Path:
    """Pack the folder without its checkpoints into one file inside it; returns the file's path."""
    for checkpoints in folder.rglob("checkpoints"):
        shutil.rmtree(checkpoints)
    path = folder / BUNDLE
    with whole_file(path) as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name in (MACHINE, RESULT, *PARTS):
            if (folder / name).exists():
                archive.add(folder / name, f"{folder.resolve().name}/{name}")
    return path


def renew(folder: Path) -> None:
    """Remove the files of an earlier check. Raises UserError, and removes nothing, if the folder has other files."""
    names = {path.name for path in folder.iterdir()} - {LOCK}
    if names - {MACHINE, RESULT, BUNDLE, *PARTS} or (names and not _is_marked(folder)):
        raise UserError(f"output: {folder} holds other things; name a new folder")
    for name in names:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _is_marked(folder: Path) -> bool:
    try:
        content = read_json(folder / MACHINE)
    except UserError:
        return False
    return isinstance(content, dict) and content.items() >= WRITER.items()


def _machine() -> dict[str, Any]:
    """Versions, settings and the output of programs that describe the devices."""
    machine = Machine()
    versions = {
        name: each.version
        for each in distributions()
        if (name := each.metadata["Name"]) and name.lower().startswith(PACKAGES)
    }
    return {
        "versions": dict(sorted(versions.items())),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(SHOWN_VARIABLES)},
        "doctor": findings_json(examine(machine, Files(Path("output"), Path("configs"), None)))["findings"],
        "commands": {" ".join(words): machine.run(*words) for words in COMMANDS},
    }
