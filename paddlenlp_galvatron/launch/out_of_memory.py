"""Out of memory: detection by rank and launcher, and the rank's final message in its log."""

import re
import signal
import sys
from pathlib import Path

# The exit code of a rank that ran out of memory: Linux's ENOMEM.
EXIT_CODE = 12
# Words in the message of a failed allocation, for exceptions of other classes: Paddle's; C++'s; Python's inside a
# PyLayer's backward, which becomes an OSError with the traceback as its text; CUDA's (error 2); cuBLAS's, the second
# when creating a handle; and cuDNN's.
WORDS: tuple[str, ...] = (
    "ResourceExhausted",
    "Out of memory error on GPU",
    "std::bad_alloc",
    "MemoryError",
    "CUDA error(2)",
)
WORDS += ("CUBLAS_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED", "CUDNN_STATUS_ALLOC_FAILED")
WORDS += ("DEVICE_ALLOCATION_FAILED", "HOST_ALLOCATION_FAILED")
# NCCL reports any CUDA error as "unhandled cuda error"; its log names the error.
NCCL_MESSAGE = re.compile(r"Cuda failure (\d+ )?'out of memory'")
MESSAGE = "out of memory: tensors held {:.1f} MiB at most"
FOUND = re.compile(re.escape(MESSAGE).replace(r"\{:\.1f\}", r"([0-9.]+)"))
KILLS = Path("/proc/vmstat")  # counts processes killed by the kernel for lack of memory


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: Python's, numpy's, Paddle's on either device, or C++'s."""
    return isinstance(error, MemoryError) or any(word in str(error) for word in WORDS)


def report_out_of_memory(error: BaseException, peak_mib: float) -> None:
    """Write the failed allocation and the peak of the rank's tensors, MiB, to its log."""
    lines = str(error).splitlines()
    what = next((line for line in lines if any(word in line for word in WORDS)), lines[0] if lines else "")
    sys.stderr.write(f"{MESSAGE.format(peak_mib)}: {what.strip()}\n")


def reason_in(log: str) -> str:
    """Returns the failed allocation of a log, after a colon; empty where the log does not name it."""
    patterns = [FOUND, NCCL_MESSAGE, re.compile("|".join(map(re.escape, WORDS)))]
    lines = [line for line in log.splitlines() if any(pattern.search(line) for pattern in patterns)]
    return f": {lines[-1].strip()}" if lines else ""


def peak_mib_in(log: str) -> float | None:
    """Returns the peak, MiB, that `report_out_of_memory` wrote to a log, if it did."""
    match = FOUND.search(log)
    return float(match[1]) if match else None


def kernel_kills() -> int:
    """Processes that the kernel killed for lack of memory since boot; 0 if not reported."""
    try:
        return sum(int(line.split()[1]) for line in KILLS.read_text().splitlines() if line.startswith("oom_kill "))
    except OSError:
        return 0


def ended_out_of_memory(code: int, log: str, killed: bool) -> bool:
    """Whether a rank's exit code (negative: signal) and log show it. `killed`: the kernel killed a process."""
    if code == -signal.SIGABRT:
        return any(word in log for word in WORDS)  # in a thread of C++, where nothing catches it
    if code == 1 and NCCL_MESSAGE.search(log):
        return True
    return code == EXIT_CODE or (killed and code == -signal.SIGKILL)
