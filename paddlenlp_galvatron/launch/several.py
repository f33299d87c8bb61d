"""Refuses to start on one node where variables that `clusters` does not read mean that there are several.

N nodes, each of which takes itself for the only one, would train N times. Launchers name their variables in similar
ways, so rules about names find those of unknown ones, and HARMLESS has the exceptions. `NUM_NODES=1` overrules them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from ..base.errors import UserError
from ..base.reading import parse_json
from ..base.text import shortened
from .hosts import LOOPBACKS, read_hostfile

REMEDY = "set NUM_NODES, NODE_RANK, MASTER_ADDR and MASTER_PORT, or NUM_NODES=1 for this node alone"
NO_NUMBER = "nothing says how many nodes there are"
UNKNOWN = "of a launcher that is not known"
NOT_STARTED = "the job has several nodes, and neither srun nor mpirun started this command on each"
INDEX = "JOB_COMPLETION_INDEX"  # of a Kubernetes job with completionMode Indexed
DIGITS = 9  # of a number of nodes, at most

_NODE = "(?:NODE|HOST|MACHINE)"
_MEMBER = "(?:NODE|HOST|MACHINE|WORKER|REPLICA|TRAINER|TASK|PROC|PROCESS|RANK|POD|INSTANCE|CONTAINER|ALLOC|PEER)"
_FIRST = f"(?:NUM_OF_|NUMBER_OF_|TOTAL_|NUM_?|N_?(?={_MEMBER}))"
_LAST = "(?:_?COUNT|_CNT|_NUM|_NUMBER|_TOTAL)"
_names = partial(re.compile, flags=re.IGNORECASE)
# How many nodes: NNODES, NUM_HOSTS, HOST_NUM, PJM_NODES. Programs of one node have workers, too, but not WORKER_NUM.
NODES = _names(rf"(?:\w+_)?(?:{_FIRST}?{_NODE}S|{_FIRST}{_NODE}|{_NODE}S?{_LAST}|WORKER_NUM)")
# Which of several this is: NODE_RANK, PALS_RANKID, TASK_INDEX, PBS_NODENUM.
RANK = _names(rf"(?:\w+_)?(?:RANK(?:_?ID)?|{_MEMBER}_?INDEX|NODENUM|TRAINER_ID)|{INDEX}")
# How many processes, and which of them this is: they mean nodes only together, under names that begin with the same
# word, as PAI_TASK_COUNT and PAI_TASK_INDEX. NUM_WORKERS alone is of a data loader, and WORKER_ID of a server.
SIZE = _names(
    rf"(?:\w+_)?(?:{_FIRST}{_MEMBER}|{_FIRST}?{_MEMBER}E?S|(?:{_MEMBER}S?|GROUP)(?:{_LAST}|_COUNT_\w+|_SIZE)"
    r"|(?:WORLD|GROUP|COMM|CLUSTER|GANG|NAMESPACE|JOB)_?SIZE)"
)
PLACE = _names(rf"(?:\w+_)?(?:RANK(?:_?ID)?|{_MEMBER}?_?(?:INDEX|IDX|ORDINAL))|(?:\w+_{_MEMBER}|PROCESS)_?(?:ID|NO)")
# Numbers within a node; of jobs that are independent; of a service's cluster; of adapters. Slurm's are in SLURM.
HARMLESS = _names(
    r"(?:\w+_)?(?:\w*(?:LOCAL|LORA|LORE|DORA|PEFT|ADAPTER)\w*|PER|NUMA|MAX|MIN|LOW|ARRAY|MCA|KUBERNETES|K8S"
    r"|CI|CIRCLE|BUILDKITE|SEMAPHORE|TEST|PYTEST|VITEST|JEST)(?:_\w+)?|SLURM\w*"
)
# A batch system sets these on the first node, before anything starts on the others.
BATCH = _names(rf"(?:PBS|LSB|MOAB|PJM|OAR|COBALT)_\w+|NHOSTS|(?:\w+_)?{_NODE}_?FILE")
SLURM = "SLURM_JOB_NUM_NODES", "SLURM_NNODES"
HOSTS = _names(rf"(?:\w+_)?{_NODE}_?LIST|LSB_(?:MCPU_)?HOSTS|(?!VC_|PADDLE_)(?:\w+_)?WORKER_HOST(?:NAME)?S")
HOST_FILE = _names(rf"(?:\w+_)?{_NODE}_?FILE")
ROLES = _names(r"(?:\w+_)?(?:TF_CONFIG|CLUSTER_SPEC)")  # JSON with a list of addresses for each role


def require_alone(environment: Mapping[str, str], started: bool) -> None:
    """Raise UserError for a variable that means several nodes. `started`: by a known launcher there is one."""
    for why, names in _signs(environment, started):
        raise UserError(f"{words(environment, *names)}: {why}; {REMEDY}")


def words(environment: Mapping[str, str], *names: str) -> str:
    """Variables that are set, with their values."""
    return ", ".join(f"{name}={shortened(environment[name])}" for name in names if environment.get(name))


def _signs(environment: Mapping[str, str], started: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Why, and the names of the variables."""
    numbers = {name: int(value) for name, value in environment.items() if value.isdecimal() and len(value) <= DIGITS}
    if numbers.get("SLURM_HET_SIZE", 1) > 1:
        yield "the parts of a heterogeneous job do not know one another", ("SLURM_HET_SIZE",)
    plain = {name: number for name, number in numbers.items() if not HARMLESS.fullmatch(name)}
    sizes = {name: number for name, number in plain.items() if number > 1 and SIZE.fullmatch(name)}
    for name, number in plain.items():
        if number > 1 and NODES.fullmatch(name) and not BATCH.fullmatch(name):
            yield UNKNOWN, (name,)
        for size in sizes if PLACE.fullmatch(name) else ():
            if number <= sizes[size] and _begins(size) == _begins(name):
                yield UNKNOWN, (size, name)
        if (number and RANK.fullmatch(name)) or (name == INDEX and not started):
            yield NO_NUMBER, (name,)
    for name, value in environment.items():
        if len(_addresses(name, value)) > 1 and not (started and BATCH.fullmatch(name)):
            yield NOT_STARTED, (name,)
        if not started and numbers.get(name, 1) > 1 and (name in SLURM or (name in plain and NODES.fullmatch(name))):
            yield NOT_STARTED, (name,)
    if not started and environment.get("MASTER_ADDR", "") not in ("", *LOOPBACKS):
        yield NO_NUMBER, ("MASTER_ADDR",)


def _begins(name: str) -> str:
    """First word of a name, without its number: LWS, PROC of NPROCS and PROCESS_ID."""
    return re.sub(f"^_*{_FIRST}?", "", name.upper()).partition("_")[0].rstrip("ES")


def _addresses(name: str, value: str) -> Sequence[str]:
    """Hosts that a variable lists, or the file that it names; or addresses of all roles."""
    with suppress(UserError, AttributeError, KeyError, TypeError):  # no file, JSON of another form
        if HOST_FILE.fullmatch(name):
            return read_hostfile(Path(value))
        if ROLES.fullmatch(name):
            return [address for role in parse_json(value, name)["cluster"].values() for address in role]
        if HOSTS.fullmatch(name) and not HARMLESS.fullmatch(name):
            listed = {item.partition(":")[0] for item in re.split(r"[\s,;]+", value)}
            return [host for host in listed if host and not host.isdecimal()]  # LSF writes slots between them
    return []
