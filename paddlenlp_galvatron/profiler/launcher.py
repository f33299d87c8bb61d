"""Starts the ranks of a profiler, shows how far they are, and says what they ran on."""

from __future__ import annotations

import json
import platform
import re
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..profiles import Fingerprint
from ..runtime.launch import Launch

PROGRESS = re.compile(r"^progress (\d+)/(\d+)$", re.MULTILINE)
TIMEOUT_S = 3600


def run_ranks(module: str, options: Any, nproc: int, what: str) -> None:
    """Run a module of this package as `nproc` ranks, with progress; its options (a dataclass) are its one argument, as
    JSON.

    Raises LaunchError.
    """
    columns = (TextColumn(what), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    command = (f"{__package__}.{module}", [json.dumps(asdict(options))], nproc)
    with (
        tempfile.TemporaryDirectory(prefix="galvatron-profile-") as logs,
        Progress(*columns, console=Console(stderr=True)) as progress,
        Launch(*command, logs, TIMEOUT_S) as running,
    ):
        task = progress.add_task(what, total=None)
        for _ in running.wait():
            reported = PROGRESS.findall(Path(logs, "workerlog.0").read_text(errors="replace"))
            if reported:
                done, total = map(int, reported[-1])
                progress.update(task, completed=done, total=total)


def report_progress(done: int, total: int) -> None:
    """Tell whoever started this rank how many of its measurements are done."""
    sys.stdout.write(f"progress {done}/{total}\n")
    sys.stdout.flush()


def fingerprint(device_count: int, **model: str) -> Fingerprint:
    """What this rank runs on; `model` and `dtype` where they matter."""
    import paddle  # here, as the command line imports this file

    if paddle.is_compiled_with_cuda():
        device = paddle.device.cuda.get_device_name()
        driver = f"CUDA {paddle.version.cuda()}, NCCL {paddle.version.nccl()}"
    else:
        device, driver = _cpu_name(), "gloo"
    return Fingerprint(device=device, device_count=device_count, driver=driver, paddle=paddle.__version__, **model)


def _cpu_name() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else platform.machine()
