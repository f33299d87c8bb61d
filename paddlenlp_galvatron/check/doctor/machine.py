"""Reads the facts of this machine. Tests replace them."""

import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ...base import MIB, processor

FLASH_LIBRARIES = {2: "libflashattn.so", 3: "libflashattnv3.so"}  # Paddle's libraries, by FlashAttention version
COMMAND_S = 20.0  # limit for a program: a hanging driver counts as missing


@dataclass(frozen=True, slots=True)
class PaddleFacts:
    """Facts of the installed Paddle."""

    version: str
    cuda: str | None  # CUDA version of the build; None: built for CPUs
    nccl: int  # 22203 is 2.22.3; 0: built without NCCL
    gpus: int  # number of GPUs that it can use
    flash: tuple[int, ...] = ()  # FlashAttention versions of the build


class Machine:
    """Facts about this machine."""

    environment: Mapping[str, str] = os.environ
    python: tuple[int, ...] = sys.version_info[:3]

    def run(self, *words: str, stdin: str = "") -> str | None:
        """Output of a program; None where it is missing, fails or hangs."""
        try:
            ran = subprocess.run(words, input=stdin, capture_output=True, text=True, timeout=COMMAND_S)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return None if ran.returncode else ran.stdout

    def lacks(self, instructions: str) -> bool:
        return processor.lacks(instructions)

    def has_module(self, name: str) -> bool:
        return find_spec(name) is not None

    def paddle(self) -> PaddleFacts | None:
        """Paddle's version and devices; None: not installed. Raises the error of a failing import."""
        if not self.has_module("paddle"):
            return None
        import paddle

        cuda = str(paddle.version.cuda()) if paddle.is_compiled_with_cuda() else None
        gpus = int(paddle.device.cuda.device_count()) if cuda else 0
        libraries = Path(paddle.__file__).parent / "libs"
        flash = tuple(version for version, name in FLASH_LIBRARIES.items() if (libraries / name).exists())
        return PaddleFacts(str(paddle.__version__), cuda, int(paddle.version.nccl() or 0) if cuda else 0, gpus, flash)

    def gpus(self) -> list[dict[str, str]] | None:
        """The driver's list of GPUs, by nvidia-smi's fields, which may be [N/A]; None: no driver answers."""
        fields: Sequence[str] = ("name", "driver_version", "memory.total", "memory.used", "compute_cap")
        output = self.run("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
        if output is None:
            return None
        return [
            dict(zip(fields, (cell.strip() for cell in line.split(",")), strict=False)) for line in output.splitlines()
        ]

    def shared_memory_mib(self) -> float | None:
        """Size of /dev/shm; None: there is none."""
        try:
            return shutil.disk_usage("/dev/shm").total / MIB
        except OSError:
            return None

    def free_mib(self, folder: Path) -> float:
        """Free space on the disk of a folder. Raises OSError."""
        return shutil.disk_usage(folder).free / MIB

    def limit(self, name: str, hard: bool = False) -> int:
        """The soft limit of a resource such as RLIMIT_NOFILE, or the hard limit, to which a process may raise it; -1:
        none."""
        return resource.getrlimit(getattr(resource, name))[hard]

    def cores(self) -> int:
        return processor.cores()

    def has_infiniband(self) -> bool:
        return any(Path("/sys/class/infiniband").glob("*"))

    def hostname(self) -> str:
        return socket.gethostname()

    def address_of(self, host: str) -> str | None:
        """The address of a host; None: the name is not known."""
        try:
            return socket.gethostbyname(host)
        except OSError:
            return None

    def address_towards(self, address: str) -> str | None:
        """This node's address on the route to another; None: no route."""
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((address, 1))  # sends nothing, only chooses a route
                return str(probe.getsockname()[0])
        except OSError:
            return None

    def listens(self, address: str, port: int) -> str | None:
        """The error when listening there; None: it works."""
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((address, port))
        except OSError as error:
            return error.strerror or str(error)
        return None

    def filesystem_of(self, folder: Path) -> str:
        """The file system of a folder, such as ext4 or nfs4; `unknown` where the kernel does not list it."""
        best, kind = "", "unknown"
        try:
            lines = Path("/proc/mounts").read_text(errors="replace").splitlines()
        except OSError:
            return kind
        for line in lines:
            _, mounted_at, kind_there, *_ = line.split(" ")
            inside = mounted_at == "/" or f"{folder}/".startswith(f"{mounted_at}/")
            if inside and len(mounted_at) >= len(best):
                best, kind = mounted_at, kind_there
        return kind
