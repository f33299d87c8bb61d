"""The checks in order: programs, devices, system, network, files."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ...base.errors import UserError
from ...base.locking import locked
from ...base.processor import AVX512
from ...base.reading import read_json
from ...base.text import gib
from ...base.units import MIB
from ...launch.gpus import FLASH_VERSION, HOPPER, THIRD, few_cores
from ...launch.hosts import read_hostfile
from ...launch.nodes import LOOPBACK, Nodes
from ...plan import read_plan
from ...plan.check import find_faults
from ...profiles import ProfileFile
from ...profiles.files import LARGEST_BYTES, META_KEY, Meta
from ..findings import Finding, State
from .machine import Machine, PaddleFacts

PYTHONS = ((3, 11), (3, 12))
PADDLES = ((3, 1, 1), (3, 4))  # from the first up to, not with, the second
# Least driver for each CUDA that Paddle is built for (NVIDIA's CUDA compatibility guide, minor version compatibility).
DRIVERS = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
AMPERE = 8  # compute capability
OTHERS_SHARE = 0.05  # of a GPU's memory in use before a run begins
ENOUGH_SHM_MIB = 1024  # NCCL takes about 10 MiB a pair of GPUs, a container has 64 MiB by default
ENOUGH_FILES = 4096  # sockets and files of a rank with hundreds of communicators
ENOUGH_FREE_MIB = 10 * 1024
OLD_DAYS = 90
NETWORK_FILESYSTEMS = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cephfs", "glusterfs", "cifs", "9p")
MOST_PROFILES = 50
KINDS = ("_profiling_", "bandwidth", "sp_time_", "overlap_coefficient")  # in the names of profile files
MOST_HOSTS, SHOWN_HOSTS = 64, 3  # names that are looked up, and shown
LOCK_S = 1.0  # a run that writes there holds it


Found = Iterator[Finding]


@dataclass(frozen=True, slots=True)
class Files:
    """Files and folders that a run reads and writes."""

    output: Path
    profiles: Path
    plan: Path | None
    hostfile: Path | None = None


def examine(machine: Machine, files: Files) -> list[Finding]:
    """Findings of all checks; no run is started."""
    findings: list[Finding] = []

    def add(subject: str, check: Callable[[], Found]) -> None:
        try:
            findings.extend(check())
        except Exception as error:  # a check that breaks is a finding, too, and the others continue
            what = " ".join(str(error).split()) or type(error).__name__
            findings.append(Finding(subject, what, State.FAILED, f"fix the fault that {subject} reports"))

    add("Python", lambda: _python(machine))
    add("processor", lambda: _processor(machine))
    add("compiler", lambda: _compiler(machine))
    add("search core", lambda: _core(machine))
    paddle: list[PaddleFacts | None] = [None]

    def of_paddle() -> Found:
        paddle[0] = machine.paddle()
        return _paddle(machine, paddle[0])

    add("Paddle", of_paddle)
    gpus = machine.gpus()
    add("GPUs", lambda: _gpus(gpus, paddle[0]))
    if gpus:
        add("driver", lambda: _driver(gpus, paddle[0]))
        add("NCCL", lambda: _nccl(paddle[0]))
        add("FlashAttention", lambda: _flash(gpus, paddle[0]))
        if len(gpus) > 1:
            add("links", lambda: _links(machine))
        add("cores", lambda: _cores(machine, len(gpus)))
    add("shared memory", lambda: _shared_memory(machine, len(gpus or ())))
    add("limits", lambda: _limits(machine))
    add("host name", lambda: _host(machine))
    add("nodes", lambda: _nodes(machine))
    if files.hostfile:
        hostfile = files.hostfile
        add("hosts", lambda: _hosts(machine, hostfile))
    add("output folder", lambda: _output(machine, files.output))
    add("profiles", lambda: _profiles(files.profiles, [gpu["name"] for gpu in gpus or ()], paddle[0]))
    if files.plan:
        plan = files.plan
        add("plan", lambda: _plan(plan, len(gpus or ())))
    return findings


def _python(machine: Machine) -> Found:
    shown = ".".join(map(str, machine.python))
    if machine.python[:2] in PYTHONS:
        yield Finding("Python", shown)
    else:
        yield Finding("Python", shown, State.FAILED, "install Python 3.11 or 3.12; make PYTHON=/path/to/python3.11")


def _processor(machine: Machine) -> Found:
    if machine.lacks("avx"):
        remedy = "planning works; Paddle's builds for x86-64 need AVX: train on another machine"
        yield Finding("processor", "without AVX", State.WARNING, remedy)
    elif machine.lacks(AVX512):
        yield Finding("processor", "without AVX-512: Paddle's RMSNorm kernel for CPUs, which needs it, is not used")
    else:
        yield Finding("processor", "has the instructions that Paddle's CPU kernels need")


def _compiler(machine: Machine) -> Found:
    name = machine.environment.get("CXX", "c++")
    if machine.run(name, "-std=c++17", "-fsyntax-only", "-x", "c++", "-", stdin="int main() {}") is None:
        remedy = "only needed to rebuild: install g++ (Debian: apt-get install g++), or set CXX"
        yield Finding("compiler", f"{name} compiles no C++17", State.WARNING, remedy)
    else:
        version = (machine.run(name, "--version") or name).splitlines()
        yield Finding("compiler", version[0] if version else name)


def _core(machine: Machine) -> Found:
    if machine.has_module("galvatron_dp_core"):
        yield Finding("search core", "compiled")
    else:
        yield Finding("search core", "not compiled", State.FAILED, "build it: make setup, or pip install .")


def _paddle(machine: Machine, paddle: PaddleFacts | None) -> Found:
    if paddle is None:
        remedy = "planning works; training needs it: docs/en/installation.md"
        yield Finding("Paddle", "not installed", State.WARNING, remedy)
        return
    numbers = tuple(int(part) for part in re.findall(r"\d+", paddle.version)[:3])
    build = f"built for CUDA {paddle.cuda}" if paddle.cuda else "built for CPUs"
    known = PADDLES[0] <= numbers < PADDLES[1]
    remedy = "" if known else "tested are 3.1.1 up to 3.3: install one of them"
    yield Finding("Paddle", f"{paddle.version}, {build}", State.OK if known else State.WARNING, remedy)
    if not machine.has_module("paddlenlp"):
        yield Finding(
            "PaddleNLP",
            "not installed",
            State.FAILED,
            "pip install --no-deps paddlenlp==3.0.0b4; docs/en/installation.md",
        )


def _gpus(gpus: list[dict[str, str]] | None, paddle: PaddleFacts | None) -> Found:
    if not gpus:
        built = paddle is not None and paddle.cuda is not None
        remedy = "Paddle is built for GPUs: install the driver, or give the container its GPUs (--gpus all)"
        yield Finding("GPUs", "none", State.WARNING if built else State.OK, remedy if built else "")
        return
    for number, gpu in enumerate(gpus):
        if "memory.total" not in gpu:  # a message in place of a row: of a GPU that is lost, or of none
            yield Finding(f"GPU {number}", gpu["name"], State.FAILED, "run nvidia-smi by hand; restart the node")
            continue
        total, used = _number(gpu["memory.total"]), _number(gpu.get("memory.used", ""))
        size = "its memory is not reported" if total is None else f"{gib(total)} GiB"
        size += "" if total is None or used is None else f", {gib(used)} in use"
        busy = total is not None and used is not None and used > OTHERS_SHARE * total
        yield Finding(
            f"GPU {number}",
            f"{gpu['name']}, {size}",
            State.WARNING if busy else State.OK,
            f"others use it: end them, or galvatron search --context_mib {used:.0f}" if busy else "",
        )
    if paddle is None:
        return
    if paddle.cuda is None:
        remedy = "install Paddle's GPU build: https://www.paddlepaddle.org.cn/en/install/quick"
        yield Finding("GPUs", f"{len(gpus)}, but Paddle is built for CPUs", State.FAILED, remedy)
    elif paddle.gpus < len(gpus):
        remedy = "look at CUDA_VISIBLE_DEVICES, and whether driver and CUDA fit"
        state = State.WARNING if paddle.gpus else State.FAILED
        yield Finding("GPUs", f"Paddle can use {paddle.gpus} of {len(gpus)}", state, remedy)


def _number(text: str) -> float | None:
    """MiB; None where nvidia-smi says none: [N/A], [Not Supported], ERR!."""
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else None


def _driver(gpus: list[dict[str, str]], paddle: PaddleFacts | None) -> Found:
    version = gpus[0].get("driver_version", "")
    numbers = tuple(map(int, re.findall(r"\d+", version)))  # 580.105 is newer than 580.65
    if not numbers or paddle is None or paddle.cuda is None:
        yield Finding("driver", version or "its version is not reported")
        return
    least = DRIVERS.get(int(paddle.cuda.split(".")[0]))
    if least and numbers < least:
        needed = "{}.{}".format(*least)
        remedy = f"CUDA {paddle.cuda} needs {needed} or newer: update the driver, or take Paddle for an older CUDA"
        yield Finding("driver", version, State.FAILED, remedy)
    else:
        yield Finding("driver", f"{version}, enough for CUDA {paddle.cuda}")


def _nccl(paddle: PaddleFacts | None) -> Found:
    if paddle is None or paddle.cuda is None:
        return
    if paddle.nccl:
        number = paddle.nccl
        yield Finding("NCCL", f"{number // 10000}.{number // 100 % 100}.{number % 100}")
    else:
        yield Finding("NCCL", "Paddle is built without", State.FAILED, "install a build of Paddle that has NCCL")


def _flash(gpus: list[dict[str, str]], paddle: PaddleFacts | None) -> Found:
    """The versions of this build that every GPU can run: 2 from Ampere on, 3 on Hopper alone."""
    kinds = {int(number) for gpu in gpus if (number := _number(gpu.get("compute_cap", ""))) is not None}
    if paddle is None or paddle.cuda is None or not kinds:
        return
    runs = {2: min(kinds) >= AMPERE, 3: kinds == {HOPPER}}
    if has := [version for version in paddle.flash if runs[version]]:
        more = f", by {FLASH_VERSION}={THIRD}" if has[-1] == int(THIRD) else ""
        yield Finding("FlashAttention", " and ".join(map(str, has)) + more)
    else:
        remedy = "attention's memory grows with the length's square: galvatron train --use_flash_attention 0"
        yield Finding("FlashAttention", "neither for this build nor these GPUs", State.WARNING, remedy)


def _links(machine: Machine) -> Found:
    """nvidia-smi's matrix: NV# NVLink, PIX and PXB PCIe switches, PHB, NODE and SYS through the CPU."""
    shown = machine.run("nvidia-smi", "topo", "-m")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown or "")
    rows = [line.split() for line in plain.splitlines() if re.match(r"GPU\d+\s", line)]
    kinds = {cell for row in rows for cell in row[1 : len(rows) + 1] if cell != "X"}
    if not kinds:
        yield Finding("links", "nvidia-smi topo does not answer", State.WARNING, "run nvidia-smi topo -m by hand")
        return
    slow = {kind for kind in kinds if kind in ("SYS", "NODE", "PHB")}
    remedy = "these pairs talk through the CPU: measure them (galvatron profile hardware), so that plans know"
    yield Finding("links", ", ".join(sorted(kinds)), State.WARNING if slow else State.OK, remedy if slow else "")


def _cores(machine: Machine, gpus: int) -> Found:
    shown = few_cores(machine.cores(), gpus)
    if shown:
        yield Finding(
            "cores", shown, State.WARNING, "let a job have all cores of its node; look at taskset and cgroups"
        )
    else:
        yield Finding("cores", f"{machine.cores()}")


def _shared_memory(machine: Machine, gpus: int) -> Found:
    mib = machine.shared_memory_mib()
    if mib is None:
        yield Finding("shared memory", "no /dev/shm", State.FAILED, "mount it; in a container: --shm-size 8g")
    elif mib < ENOUGH_SHM_MIB:
        state = State.FAILED if gpus > 1 else State.WARNING
        yield Finding("shared memory", f"{gib(mib)} GiB", state, "ranks need more: in a container --shm-size 8g")
    else:
        yield Finding("shared memory", f"{gib(mib)} GiB")


def _limits(machine: Machine) -> Found:
    files = machine.limit("RLIMIT_NOFILE", hard=True)  # a launch raises its own as far
    few = 0 <= files < ENOUGH_FILES
    yield Finding(
        "open files", "unlimited" if files < 0 else str(files), State.WARNING if few else State.OK,
        f"many ranks and groups need more: ulimit -Hn {ENOUGH_FILES}, or nofile in limits.conf" if few else "",
    )  # fmt: skip
    locked_bytes = machine.limit("RLIMIT_MEMLOCK")
    bound = locked_bytes >= 0 and machine.has_infiniband()
    yield Finding(
        "locked memory",
        "unlimited" if locked_bytes < 0 else f"{gib(locked_bytes / MIB)} GiB",
        State.FAILED if bound else State.OK,
        "InfiniBand needs it unlimited: ulimit -l unlimited, in a container --ulimit memlock=-1" if bound else "",
    )


def _host(machine: Machine) -> Found:
    name = machine.hostname()
    address = machine.address_of(name)
    if address is None:
        yield Finding("host name", f"{name} is unknown", State.WARNING, "name it in /etc/hosts with its address")
    else:
        yield Finding("host name", f"{name}, {address}")


def _nodes(machine: Machine) -> Found:
    """The variables that scripts and clusters set, as a launch would read them."""
    try:
        nodes = Nodes.from_environment(machine.environment)
    except UserError as error:
        yield Finding(
            "nodes",
            error.faults[0],
            State.FAILED,
            "set the same variables on all nodes, except NODE_RANK",
        )
        return
    if nodes.num_nodes == 1:
        why = machine.listens(LOOPBACK, 0)
        state = State.FAILED if why else State.OK
        yield Finding(
            "nodes", why or "one; ports of the loopback address are free", state, "free some ports" if why else ""
        )
        return
    address = machine.address_of(nodes.master_addr)
    shown = f"{nodes.num_nodes}, this is {nodes.node_rank}, the first is {nodes.master_addr}"
    if address is None:
        yield Finding(
            "nodes", f"{nodes.master_addr} is unknown", State.FAILED, "name it in /etc/hosts, or give its address"
        )
    elif address.startswith("127."):
        remedy = "other nodes do not reach a loopback address: give the one of the network between them"
        yield Finding("nodes", f"{nodes.master_addr} is {address} here", State.FAILED, remedy)
    elif nodes.node_rank == 0 and (why := machine.listens(address, nodes.master_port or 0)):
        remedy = "MASTER_PORT: name a free one, the same on every node"
        yield Finding("nodes", f"{address}:{nodes.master_port}: {why}", State.FAILED, remedy)
    elif (own := machine.address_towards(address)) is None:
        remedy = f"no route to {address}: look at the network between the nodes"
        yield Finding("nodes", f"{nodes.master_addr} cannot be reached", State.FAILED, remedy)
    else:
        yield Finding("nodes", f"{shown} ({address}:{nodes.master_port}); from here by {own}")


def _hosts(machine: Machine, hostfile: Path) -> Found:
    """Every node's name, as the hostfile has it: each known, none twice, none a loopback address."""
    try:
        hosts = read_hostfile(hostfile)
    except UserError as error:
        yield Finding("hosts", error.faults[0], State.FAILED, "write one address a line, node 0 first")
        return
    addresses = {host: machine.address_of(host) for host in dict.fromkeys(hosts[:MOST_HOSTS])}
    unknown = [host for host, address in addresses.items() if address is None]
    inside = [host for host, address in addresses.items() if len(hosts) > 1 and (address or "").startswith("127.")]
    known = [address for address in addresses.values() if address]
    if unknown:
        shown = f"{', '.join(unknown[:SHOWN_HOSTS])} unknown ({len(unknown)} of {len(addresses)})"
        yield Finding("hosts", shown, State.FAILED, "name them in /etc/hosts, or write addresses")
    elif inside:
        remedy = "other nodes do not reach a loopback address: write that of the network between the nodes"
        yield Finding("hosts", f"{inside[0]} is {addresses[inside[0]]} here", State.FAILED, remedy)
    elif len(set(known)) < len(hosts[:MOST_HOSTS]):
        yield Finding("hosts", f"{hostfile}: an address stands twice", State.FAILED, "one line a node")
    else:
        yield Finding("hosts", f"{len(hosts)} nodes, each with an address of its own")


def _output(machine: Machine, output: Path) -> Found:
    folder = output
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    folder = folder.resolve()
    try:
        if folder == output.resolve():
            with locked(folder, wait_s=LOCK_S):
                pass
        elif not os.access(folder, os.W_OK):
            raise UserError(f"{folder}: nothing can be written there")
        free = machine.free_mib(folder)
    except (UserError, OSError) as error:
        yield Finding(
            "output folder", str(error).split("\n")[0], State.FAILED, "give another: galvatron train --output_dir"
        )
        return
    kind, several = machine.filesystem_of(folder), int(machine.environment.get("NUM_NODES") or 1) > 1
    shown = f"{output}: {gib(free)} GiB free, {kind}"
    if free < ENOUGH_FREE_MIB:
        yield Finding("output folder", shown, State.WARNING, "checkpoints take 16 bytes a parameter: make room")
    elif several and kind not in NETWORK_FILESYSTEMS:
        yield Finding(
            "output folder", shown, State.WARNING, "all nodes write there: it must be one folder of all of them"
        )
    else:
        yield Finding("output folder", shown)


def _profiles(folder: Path, devices: list[str], paddle: PaddleFacts | None) -> Found:
    files = sorted(path for path in folder.glob("*.json") if any(kind in path.name for kind in KINDS))
    if not files:
        yield Finding("profiles", f"none in {folder}", State.OK if not folder.exists() else State.WARNING,
                      "measure: galvatron profile all; or name their folder: --profiles")  # fmt: skip
        return
    fine: dict[str, list[str]] = {}  # origin -> names
    for path in files[:MOST_PROFILES]:
        content = read_json(path, LARGEST_BYTES)
        meta = Meta.model_validate(content[META_KEY]) if isinstance(content, dict) and META_KEY in content else Meta()
        days = (time.time() - path.stat().st_mtime) / 86400
        device = meta.fingerprint.device
        origin = "derived for" if meta.analytic else "of"
        shown = f"{path.name}: {days:.0f} days old" + (f", {origin} {device}" if device else "")
        if device and devices and not meta.analytic and device not in devices:
            remedy = "measured on another device: measure again on this one (galvatron profile all)"
            yield Finding("profiles", shown, State.WARNING, remedy)
        elif paddle and meta.fingerprint.paddle not in (None, paddle.version) and not meta.analytic:
            shown += f", with Paddle {meta.fingerprint.paddle}"
            yield Finding("profiles", shown, State.WARNING, f"this is Paddle {paddle.version}: measure again")
        elif days > OLD_DAYS:
            yield Finding("profiles", shown, State.WARNING, "driver and libraries may have changed: measure again")
        else:
            fine.setdefault(f", {origin} {device}" if device else "", []).append(path.name)
    for origin, names in sorted(fine.items()):
        yield Finding("profiles", (f"{len(names)} files in {folder}" if len(names) > 1 else names[0]) + origin)


def _plan(path: Path, gpus: int) -> Found:
    try:
        plan = read_plan(path, smallest_world=True)
        faults = find_faults(plan, None)
    except UserError as error:
        faults = list(error.faults)
    if faults:
        yield from (
            Finding("plan", fault, State.FAILED, "galvatron plan check says it in full") for fault in faults[:5]
        )
        return
    shown = f"{path}: for {plan.world_size} ranks"
    if gpus and plan.world_size % gpus:
        remedy = (
            f"this node has {gpus} GPUs: galvatron search --num_gpus_per_node {gpus}, or galvatron train --nproc {gpus}"
        )
        yield Finding("plan", shown, State.WARNING, remedy)
    else:
        yield Finding("plan", shown)
    for changed in ProfileFile.changed((plan.metadata.get("searched_from") or {}).get("profiles")):
        yield Finding(
            "plan", f"{changed} has changed since the search", State.WARNING, "search again for the best plan"
        )
