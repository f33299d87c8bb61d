"""The instructions that this machine's processor has, as Linux lists them."""

from __future__ import annotations

import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
AVX512 = "avx512f"  # needed by Paddle's CPU kernel of RMSNorm, whose build for x86-64 asks nothing before it runs


def lacks(instructions: str) -> bool:
    """Whether instructions of x86-64, such as `avx512f`, end a process here: the processor lacks them, or does not say.
    Builds for other architectures have none of them."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    try:
        lines = CPUINFO.read_text(errors="replace").splitlines()
    except OSError:
        return True
    return not any(line.startswith("flags") and instructions in line.split() for line in lines)
