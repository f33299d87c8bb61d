"""Starts the ranks of a profiler, shows their progress, and describes their device."""

import platform
import re
import sys
from pathlib import Path

from ..base.printing import Bars, say
from ..base.reading import NewLines
from ..base.units import GIB
from ..base.writing import scratch_folder
from ..launch.nodes import ONE_NODE, Nodes
from ..launch.processes import Launch, LaunchError, World
from ..profiles import Device, Fingerprint, Meta
from .options import ProfileRunOptions

PROGRESS = re.compile(r"progress (\d+)/(\d+)")
NOTE = "note "
TIMEOUT_S = 24 * 3600
WIDE = 0.3  # spread above which a number is measured in more rounds
MODULES = {"hardware": "messages", "model": "model"}


def run_ranks(
    profile: str, arguments: str, options: ProfileRunOptions, what: str, timeout_s: float = TIMEOUT_S
) -> None:
    """Run a kind of profile, of MODULES, as the ranks of this node, with progress; its one argument is JSON.

    If ranks waited too long for each other, as on a frozen host, they restart once and keep finished measurements.
    Raises LaunchError.
    """
    try:
        _run_once(profile, arguments, options, what, timeout_s)
    except LaunchError as error:
        if not error.waited or options.num_nodes > 1:  # on several nodes, every node would have to restart
            raise
        say(f"note: {str(error).splitlines()[0]}; ranks start again; finished measurements are kept", err=True)
        _run_once(profile, arguments, options, what, timeout_s)


def _run_once(profile: str, arguments: str, options: ProfileRunOptions, what: str, timeout_s: float) -> None:
    nodes = _nodes(options)
    module, world = f"{__package__}.{MODULES[profile]}", World(options.ranks_per_node, nodes)
    with (
        scratch_folder("galvatron-profile-") as logs,
        Bars() as progress,
        Launch(module, [arguments], world, logs, timeout_s) as running,
    ):
        task = progress.add_task(what, total=None)
        log = NewLines(Path(logs, f"workerlog.{nodes.node_rank * options.ranks_per_node}"))
        for _ in running.wait():
            for line in (line.decode(errors="replace").rstrip("\n") for line in log.read()):
                if match := PROGRESS.fullmatch(line):
                    progress.update(task, completed=int(match[1]), total=int(match[2]))
                elif line.startswith(NOTE):
                    progress.console.print(f"note: {line.removeprefix(NOTE)}", soft_wrap=True)


def _nodes(options: ProfileRunOptions) -> Nodes:
    if options.num_nodes == 1:
        return ONE_NODE
    return Nodes(options.num_nodes, options.node_rank, options.master_addr or "", options.master_port)


def report_progress(done: int, total: int) -> None:
    """Report to the process that started this rank how many of its measurements are done."""
    sys.stdout.write(f"progress {done}/{total}\n")
    sys.stdout.flush()


def report_note(*texts: str) -> None:
    """Show the user something, through the process that started this rank."""
    sys.stdout.write("".join(f"note {text}\n" for text in texts))
    sys.stdout.flush()


def spread_notes(meta: Meta) -> list[str]:
    """Notes for the user about the numbers: impossible bandwidths, and how many spread widely."""
    notes = [f"{key}: {reason}; this cannot be: measure again with --fresh 1" for key, reason in meta.flags.items()]
    wide = [key for key, spread in meta.spread.items() if spread > WIDE]
    if wide:
        notes.append(
            f"{len(wide)} of {len(meta.spread)} numbers spread by more than {WIDE:.0%}, such as {wide[0]}; on a quiet "
            "machine --fresh 1 measures them again"
        )
    return notes


def device_of_rank() -> Device:
    """The device of this rank. A GPU's memory is the driver's total; processors have none, as they share the host's."""
    import paddle  # here, as the command line imports this file

    if not paddle.is_compiled_with_cuda():
        return Device(name=_cpu_name())
    total_bytes = paddle.device.cuda.get_device_properties().total_memory
    return Device.named(paddle.device.cuda.get_device_name(), total_bytes / GIB)


def meta_of_rank(device_count: int, **model: str) -> Meta:
    """Device and software of this rank; `model` and `dtype` where they matter."""
    import paddle

    device, driver = device_of_rank(), "gloo"
    if paddle.is_compiled_with_cuda():
        driver = f"CUDA {paddle.version.cuda()}, NCCL {paddle.version.nccl()}"
    machine = {"device_count": device_count, "driver": driver, "paddle": paddle.__version__}
    return Meta(fingerprint=Fingerprint(device=device.name, **machine, **model), device=device)


def _cpu_name() -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return match[1] if match else platform.machine()
