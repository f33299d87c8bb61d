"""The checks in order: programs, devices, system, network, files."""

import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ...base import MIB, UserError, gib
from ...base.processor import AVX512
from ...base.reading import read_json
from ...base.writing import locked
from ...launch.clusters import read_hostfile
from ...launch.gpus import FLASH_VERSION, HOPPER, THIRD, few_cores
from ...launch.nodes import LOOPBACK, Nodes
from ...plan import find_faults, read_plan
from ...profiles import ProfileFile
from ...profiles.files import LARGEST_BYTES, META_KEY, Meta
from ..findings import Finding, State
from .machine import Machine, PaddleFacts

PYTHONS = ((3, 11), (3, 12))
PADDLES = ((3, 1, 1), (3, 4))  # from the first up to and without the second
# Oldest driver for each CUDA that Paddle is built for (NVIDIA's CUDA compatibility guide, minor version compatibility).
DRIVERS = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
AMPERE = 8  # compute capability
OTHERS_SHARE = 0.05  # of a GPU's memory in use before a run begins
ENOUGH_SHM_MIB = 1024  # NCCL takes about 10 MiB a pair of GPUs, a container has 64 MiB by default
ENOUGH_FILES = 4096  # sockets and files of a rank with hundreds of communicators
ENOUGH_FREE_MIB = 10 * 1024
OLD_DAYS = 90
NETWORK_FILESYSTEMS = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cephfs", "glusterfs", "cifs", "9p")
MOST_PROFILES = 50
KINDS = ("_profiling_", "bandwidth", "sp_time_", "overlap_coefficient")  # substrings of profile files' names
MOST_HOSTS, SHOWN_HOSTS = 64, 3  # host names to look up, and to show
LOCK_S = 1.0  # wait for a run that writes there


@dataclass(frozen=True, slots=True)
class Files:
    """The files and folders that a run reads and writes."""

    output: Path
    profiles: Path
    plan: Path | None
    hostfile: Path | None = None


@dataclass(slots=True)
class Facts:
    """The machine, the files, and the devices that the driver and Paddle list."""

    machine: Machine
    files: Files
    gpus: list[dict[str, str]]
    paddle: PaddleFacts | None = None  # unset until Paddle is checked


Results = Iterator[Finding]  # findings without a subject take their check's


def examine(machine: Machine, files: Files) -> list[Finding]:
    """Findings of all checks; no run is started."""
    facts = Facts(machine, files, machine.gpus() or [])
    findings: list[Finding] = []
    for subject, check in CHECKS.items():
        if subject in OF_GPUS and not facts.gpus:
            continue
        try:
            for finding in check(facts):
                findings.append(replace(finding, subject=finding.subject or subject))
        except Exception as error:  # a crashed check is also a finding; the others continue
            text = " ".join(str(error).split()) or type(error).__name__
            findings.append(Finding(subject, text, State.FAILED, f"fix the fault that {subject} reports"))
    return findings


def _ok(text: str, subject: str = "") -> Finding:
    return Finding(subject, text)


def _failed(text: str, remedy: str, subject: str = "") -> Finding:
    return Finding(subject, text, State.FAILED, remedy)


def _warning(text: str, remedy: str, subject: str = "") -> Finding:
    return Finding(subject, text, State.WARNING, remedy)


def _unless(fault: bool, text: str, remedy: str, state: State = State.WARNING, subject: str = "") -> Finding:
    """A fact as a finding: at fault with this remedy, or fine."""
    return Finding(subject, text, state, remedy) if fault else Finding(subject, text)


def _python(facts: Facts) -> Results:
    version = facts.machine.python
    remedy = "install Python 3.11 or 3.12; make PYTHON=/path/to/python3.11"
    yield _unless(version[:2] not in PYTHONS, ".".join(map(str, version)), remedy, State.FAILED)


def _processor(facts: Facts) -> Results:
    if facts.machine.lacks("avx"):
        remedy = "planning works; to train, use another machine: Paddle's builds for x86-64 need AVX"
        yield _warning("without AVX", remedy)
    elif facts.machine.lacks(AVX512):
        yield _ok("without AVX-512: Paddle's RMSNorm kernel for CPUs, which needs it, is not used")
    else:
        yield _ok("has the instructions that Paddle's CPU kernels need")


def _compiler(facts: Facts) -> Results:
    name = facts.machine.environment.get("CXX", "c++")
    if facts.machine.run(name, "-std=c++17", "-fsyntax-only", "-x", "c++", "-", stdin="int main() {}") is None:
        remedy = "only needed to rebuild: install g++ (Debian: apt-get install g++), or set CXX"
        yield _warning(f"{name} compiles no C++17", remedy)
    else:
        version = (facts.machine.run(name, "--version") or name).splitlines()
        yield _ok(version[0] if version else name)


def _core(facts: Facts) -> Results:
    built = facts.machine.has_module("galvatron_dp_core")
    yield _ok("compiled") if built else _failed("not compiled", "build it: make setup, or pip install .")


def _paddle(facts: Facts) -> Results:
    paddle = facts.paddle = facts.machine.paddle()
    if paddle is None:
        yield _warning("not installed", "planning works; training needs it: docs/en/installation.md")
        return
    numbers = tuple(int(number) for number in re.findall(r"\d+", paddle.version)[:3])
    build = f"built for CUDA {paddle.cuda}" if paddle.cuda else "built for CPUs"
    untested = not PADDLES[0] <= numbers < PADDLES[1]
    yield _unless(untested, f"{paddle.version}, {build}", "tested are 3.1.1 up to 3.3: install one of them")
    if not facts.machine.has_module("paddlenlp"):
        remedy = "pip install --no-deps paddlenlp==3.0.0b4; docs/en/installation.md"
        yield _failed("not installed", remedy, "PaddleNLP")


def _gpus(facts: Facts) -> Results:
    gpus, paddle = facts.gpus, facts.paddle
    if not gpus:
        remedy = "Paddle is built for GPUs: install the driver, or give the container its GPUs (--gpus all)"
        yield _unless(paddle is not None and paddle.cuda is not None, "none", remedy)
        return
    for number, gpu in enumerate(gpus):
        subject = f"GPU {number}"
        if "memory.total" not in gpu:  # a message in place of a row: the GPU is lost, or there is none
            yield _failed(gpu["name"], "run nvidia-smi by hand; restart the node", subject)
            continue
        total, used = _number(gpu["memory.total"]), _number(gpu.get("memory.used", ""))
        size = "its memory is not reported" if total is None else f"{gib(total)} GiB"
        busy = False
        if total is not None and used is not None:
            size, busy = f"{size}, {gib(used)} in use", used > OTHERS_SHARE * total
        remedy = f"others use it: end them, or galvatron search --context_mib {used or 0:.0f}"
        yield _unless(busy, f"{gpu['name']}, {size}", remedy, subject=subject)
    if paddle and paddle.cuda is None:
        remedy = "install Paddle's GPU build: https://www.paddlepaddle.org.cn/en/install/quick"
        yield _failed(f"{len(gpus)}, but Paddle is built for CPUs", remedy)
    elif paddle and paddle.gpus < len(gpus):
        remedy = "look at CUDA_VISIBLE_DEVICES, and whether driver and CUDA fit"
        state = State.WARNING if paddle.gpus else State.FAILED
        yield Finding("", f"Paddle can use {paddle.gpus} of {len(gpus)}", state, remedy)


def _number(text: str) -> float | None:
    """MiB; None where nvidia-smi has no value: [N/A], [Not Supported], ERR!."""
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else None


def _driver(facts: Facts) -> Results:
    version = facts.gpus[0].get("driver_version", "")
    numbers = tuple(map(int, re.findall(r"\d+", version)))  # 580.105 is newer than 580.65
    cuda = facts.paddle and facts.paddle.cuda
    if not numbers or not cuda:
        yield _ok(version or "its version is not reported")
    elif (least := DRIVERS.get(int(cuda.split(".")[0]))) and numbers < least:
        needed = "{}.{}".format(*least)
        remedy = f"CUDA {cuda} needs {needed} or newer: update the driver, or take Paddle for an older CUDA"
        yield _failed(version, remedy)
    else:
        yield _ok(f"{version}, enough for CUDA {cuda}")


def _nccl(facts: Facts) -> Results:
    if facts.paddle is None or facts.paddle.cuda is None:
        return
    if number := facts.paddle.nccl:
        yield _ok(f"{number // 10000}.{number // 100 % 100}.{number % 100}")
    else:
        yield _failed("Paddle is built without", "install a build of Paddle that has NCCL")


def _flash(facts: Facts) -> Results:
    """The versions of this build that every GPU can run: 2 from Ampere on, 3 only on Hopper."""
    kinds = {int(number) for gpu in facts.gpus if (number := _number(gpu.get("compute_cap", ""))) is not None}
    if facts.paddle is None or facts.paddle.cuda is None or not kinds:
        return
    runs = {2: min(kinds) >= AMPERE, 3: kinds == {HOPPER}}
    if versions := [version for version in facts.paddle.flash if runs[version]]:
        more = f", by {FLASH_VERSION}={THIRD}" if versions[-1] == int(THIRD) else ""
        yield _ok(" and ".join(map(str, versions)) + more)
    else:
        remedy = "attention's memory grows with the length's square: galvatron train --use_flash_attention 0"
        yield _warning("neither for this build nor these GPUs", remedy)


def _links(facts: Facts) -> Results:
    """nvidia-smi's matrix: NV# NVLink, PIX and PXB PCIe switches, PHB, NODE and SYS through the CPU."""
    if len(facts.gpus) == 1:
        return
    matrix = re.sub(r"\x1b\[[0-9;]*m", "", facts.machine.run("nvidia-smi", "topo", "-m") or "")
    rows = [line.split() for line in matrix.splitlines() if re.match(r"GPU\d+\s", line)]
    kinds = {cell for row in rows for cell in row[1 : len(rows) + 1] if cell != "X"}
    if not kinds:
        yield _warning("nvidia-smi topo does not answer", "run nvidia-smi topo -m by hand")
        return
    remedy = "these pairs talk through the CPU: measure them (galvatron profile hardware), so that plans know"
    yield _unless(bool(kinds & {"SYS", "NODE", "PHB"}), ", ".join(sorted(kinds)), remedy)


def _cores(facts: Facts) -> Results:
    cores = facts.machine.cores()
    few = few_cores(cores, len(facts.gpus))
    yield _unless(bool(few), few or f"{cores}", "give the job all cores of its node; look at taskset and cgroups")


def _shared_memory(facts: Facts) -> Results:
    mib = facts.machine.shared_memory_mib()
    if mib is None:
        yield _failed("no /dev/shm", "mount it; in a container: --shm-size 8g")
        return
    state = State.FAILED if len(facts.gpus) > 1 else State.WARNING
    remedy = "ranks need more: in a container --shm-size 8g"
    yield _unless(mib < ENOUGH_SHM_MIB, f"{gib(mib)} GiB", remedy, state)


def _limits(facts: Facts) -> Results:
    files = facts.machine.limit("RLIMIT_NOFILE", hard=True)  # a launch raises its soft limit to this
    remedy = f"many ranks and groups need more: ulimit -Hn {ENOUGH_FILES}, or nofile in limits.conf"
    text = "unlimited" if files < 0 else str(files)
    yield _unless(0 <= files < ENOUGH_FILES, text, remedy, subject="open files")
    locked_bytes = facts.machine.limit("RLIMIT_MEMLOCK")
    text = "unlimited" if locked_bytes < 0 else f"{gib(locked_bytes / MIB)} GiB"
    remedy = "InfiniBand needs it unlimited: ulimit -l unlimited, in a container --ulimit memlock=-1"
    limited = locked_bytes >= 0 and facts.machine.has_infiniband()
    yield _unless(limited, text, remedy, State.FAILED, "locked memory")


def _host(facts: Facts) -> Results:
    name = facts.machine.hostname()
    address, remedy = facts.machine.address_of(name), "name it in /etc/hosts with its address"
    yield _ok(f"{name}, {address}") if address else _warning(f"{name} is unknown", remedy)


def _nodes(facts: Facts) -> Results:
    """The variables that scripts and clusters set, as a launch would read them."""
    machine = facts.machine
    try:
        nodes = Nodes.from_environment(machine.environment)
    except UserError as error:
        yield _failed(error.faults[0], "set the same variables on all nodes, except NODE_RANK")
        return
    if nodes.num_nodes == 1:
        refusal = machine.listens(LOOPBACK, 0)
        text = refusal or "one; ports of the loopback address are free"
        yield _unless(bool(refusal), text, "free some ports", State.FAILED)
        return
    first, address = nodes.master_addr, machine.address_of(nodes.master_addr)
    if address is None:
        yield _failed(f"{first} is unknown", "name it in /etc/hosts, or give its address")
    elif address.startswith("127."):
        remedy = "other nodes do not reach a loopback address: give the one of the network between them"
        yield _failed(f"{first} is {address} here", remedy)
    elif nodes.node_rank == 0 and (refusal := machine.listens(address, nodes.master_port or 0)):
        remedy = "MASTER_PORT: name a free one, the same on every node"
        yield _failed(f"{address}:{nodes.master_port}: {refusal}", remedy)
    elif (source := machine.address_towards(address)) is None:
        remedy = f"no route to {address}: look at the network between the nodes"
        yield _failed(f"{first} cannot be reached", remedy)
    else:
        text = f"{nodes.num_nodes}, this is {nodes.node_rank}, the first is {first}"
        yield _ok(f"{text} ({address}:{nodes.master_port}); from here by {source}")


def _hosts(facts: Facts) -> Results:
    """Checks the hostfile: every name resolves, none is listed twice, none is a loopback address."""
    if facts.files.hostfile is None:
        return
    try:
        hosts = read_hostfile(facts.files.hostfile)
    except UserError as error:
        yield _failed(error.faults[0], "write one address a line, node 0 first")
        return
    addresses = {host: facts.machine.address_of(host) for host in dict.fromkeys(hosts[:MOST_HOSTS])}
    unknown = [host for host, address in addresses.items() if address is None]
    loopback = [host for host, address in addresses.items() if len(hosts) > 1 and (address or "").startswith("127.")]
    if unknown:
        text = f"{', '.join(unknown[:SHOWN_HOSTS])} unknown ({len(unknown)} of {len(addresses)})"
        yield _failed(text, "name them in /etc/hosts, or write addresses")
    elif loopback:
        remedy = "other nodes do not reach a loopback address: write that of the network between the nodes"
        yield _failed(f"{loopback[0]} is {addresses[loopback[0]]} here", remedy)
    elif len({*addresses.values()}) < len(hosts[:MOST_HOSTS]):
        yield _failed(f"{facts.files.hostfile}: an address stands twice", "one line a node")
    else:
        yield _ok(f"{len(hosts)} nodes, each with an address of its own")


def _output(facts: Facts) -> Results:
    output = folder = facts.files.output
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    folder = folder.resolve()
    try:
        if folder == output.resolve():
            with locked(folder, wait_s=LOCK_S):
                pass
        elif not os.access(folder, os.W_OK):
            raise UserError(f"{folder}: is not writable")
        free = facts.machine.free_mib(folder)
    except (UserError, OSError) as error:
        yield _failed(str(error).split("\n")[0], "give another: galvatron train --output_dir")
        return
    kind, several = facts.machine.filesystem_of(folder), int(facts.machine.environment.get("NUM_NODES") or 1) > 1
    text = f"{output}: {gib(free)} GiB free, {kind}"
    if free < ENOUGH_FREE_MIB:
        yield _warning(text, "checkpoints take 16 bytes a parameter: make room")
    else:
        remedy = "all nodes write there: it must be one folder of all of them"
        yield _unless(several and kind not in NETWORK_FILESYSTEMS, text, remedy)


def _profiles(facts: Facts) -> Results:
    folder, devices, paddle = facts.files.profiles, [gpu["name"] for gpu in facts.gpus], facts.paddle
    files = sorted(path for path in folder.glob("*.json") if any(kind in path.name for kind in KINDS))
    if not files:
        state = State.WARNING if folder.exists() else State.OK
        remedy = "measure: galvatron profile all; or name their folder: --profiles"
        yield Finding("", f"none in {folder}", state, remedy)
        return
    fine: dict[str, list[str]] = {}  # origin of the profiles -> file names
    for path in files[:MOST_PROFILES]:
        content = read_json(path, LARGEST_BYTES)
        meta = Meta.model_validate(content[META_KEY]) if isinstance(content, dict) and META_KEY in content else Meta()
        days = (time.time() - path.stat().st_mtime) / 86400
        device = meta.fingerprint.device
        origin = f", {'derived for' if meta.analytic else 'of'} {device}" if device else ""
        text = f"{path.name}: {days:.0f} days old{origin}"
        if device and devices and not meta.analytic and device not in devices:
            yield _warning(text, "measured on another device: measure again on this one (galvatron profile all)")
        elif paddle and meta.fingerprint.paddle not in (None, paddle.version) and not meta.analytic:
            text += f", with Paddle {meta.fingerprint.paddle}"
            yield _warning(text, f"this is Paddle {paddle.version}: measure again")
        elif days > OLD_DAYS:
            yield _warning(text, "driver and libraries may have changed: measure again")
        else:
            fine.setdefault(origin, []).append(path.name)
    for origin, names in sorted(fine.items()):
        yield _ok((f"{len(names)} files in {folder}" if len(names) > 1 else names[0]) + origin)


def _plan(facts: Facts) -> Results:
    path, gpus = facts.files.plan, len(facts.gpus)
    if path is None:
        return
    try:
        plan = read_plan(path, smallest_world=True)
        faults = find_faults(plan, None)
    except UserError as error:
        faults = list(error.faults)
    if faults:
        yield from (_failed(fault, "galvatron plan check says it in full") for fault in faults[:5])
        return
    misfits = bool(gpus and plan.world_size % gpus)
    remedy = f"galvatron search --num_gpus_per_node {gpus}, or galvatron train --nproc {gpus}"
    yield _unless(misfits, f"{path}: for {plan.world_size} ranks", f"this node has {gpus} GPUs: {remedy}")
    for changed in ProfileFile.changed((plan.metadata.get("searched_from") or {}).get("profiles")):
        yield _warning(f"{changed} has changed since the search", "search again for the best plan")


CHECKS: dict[str, Callable[[Facts], Results]] = {
    "Python": _python,
    "processor": _processor,
    "compiler": _compiler,
    "search core": _core,
    "Paddle": _paddle,
    "GPUs": _gpus,
    "driver": _driver,
    "NCCL": _nccl,
    "FlashAttention": _flash,
    "links": _links,
    "cores": _cores,
    "shared memory": _shared_memory,
    "limits": _limits,
    "host name": _host,
    "nodes": _nodes,
    "hosts": _hosts,
    "output folder": _output,
    "profiles": _profiles,
    "plan": _plan,
}
OF_GPUS = ("driver", "NCCL", "FlashAttention", "links", "cores")  # checks that only a machine with GPUs needs
