"""This machine's processors: their instructions, as Linux lists them, and how many of them this process may use."""

import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CPUINFO, CGROUP, CGROUPS = Path("/proc/cpuinfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
AVX512 = "avx512f"  # needed by Paddle's CPU kernel of RMSNorm; the x86-64 build does not check for it


def lacks(instructions: str) -> bool:
    """Whether x86-64 instructions such as `avx512f` would crash a process: the processor does not list them. Builds for
    other architectures don't use them."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    try:
        lines = CPUINFO.read_text(errors="replace").splitlines()
    except OSError:
        return True
    return not any(line.startswith("flags") and instructions in line.split() for line in lines)


def cores() -> int:
    """Processors that this process may use: the smaller of its affinity and its cgroup quota (docker's --cpus,
    Kubernetes' limits)."""
    return max(1, int(min([len(os.sched_getaffinity(0)), *_quotas()])))


def _quotas() -> Iterator[float]:
    """CPU seconds a second that this process's cgroups and their parents allow: cpu.max of version 2, cfs_quota of
    version 1. A container may see its own group as the root."""
    with suppress(OSError):
        for line in CGROUP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            group = Path(path.lstrip("/"))
            for folder in {CGROUPS / controllers / each for each in (group, *group.parents)}:
                with suppress(OSError, ValueError):  # no such file, or no quota: max
                    if controllers:
                        quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
                    else:
                        quota, period = (folder / "cpu.max").read_text().split()
                    if int(quota) > 0:
                        yield int(quota) / int(period)
