"""Reads the nodes from the variables of a cluster's launcher: srun, mpirun, Paddle's launcher, Kubernetes' jobs.

Each starts one process of the command on every node; the command starts the ranks of its node.

Without such variables it refuses to start if other variables indicate several nodes: N nodes that each assume to be
alone would train N times. Launchers name their variables similarly, so rules about names find those of unknown
launchers; HARMLESS has the exceptions. `NUM_NODES=1` overrides the rules. Lists of hosts: Slurm's, and the hostfiles of
MPI, PBS and Grid Engine.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from ipaddress import IPv6Address
from itertools import combinations, product
from math import prod
from pathlib import Path

from ..base import UserError, shortened, within
from ..base.reading import LARGEST_OPTIONS, parse_json, read_json, read_text

MOST_HOSTS = 100_000  # hosts in one item of a list
LOOPBACKS = ("127.0.0.1", "127.0.1.1", "0.0.0.0", "localhost", "::1", "::")  # reach only this host, or any
NO_IPV6 = "IPv6 is not supported; give an IPv4 address, or a name that has one"
_HOST = re.compile(r"[\w.-]+")
_ITEM = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_NUMBERS = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
_SLOTS = re.compile(r":\d+(:\w+)?$")  # MPICH's host:8, MVAPICH's host:8:mlx5_0


def first_host(hosts: str) -> str:
    """First host of a list, as in `listed_hosts`; empty for an empty list. Raises UserError."""
    return next(listed_hosts(hosts), "")


def listed_hosts(hosts: str) -> Iterator[str]:
    """Hosts of a list as Slurm writes it, in its order: `gpu-[07-09,12],rack[1-2]n[1-2]`. Raises UserError."""
    for item in _items(hosts):
        parts = re.split(r"\[(.*?)\]", item)  # odd items were in brackets
        choices = [_numbers(text) if index % 2 else [text] for index, text in enumerate(parts)]
        if not 0 < prod(map(len, choices)) <= MOST_HOSTS:
            raise UserError(
                f"{shortened(item)}: no numbers as in [01-04,07], or too many; write hosts as in gpu[01-04,07]"
            )
        yield from map("".join, product(*choices))


def _items(hosts: str) -> list[str]:
    """The parts between commas, except commas in brackets. Raises UserError."""
    if set(_ITEM.sub("", hosts)) - {","}:
        raise UserError(f"{shortened(hosts)}: a bracket has no partner; write hosts as in gpu[01-04,07]")
    return _ITEM.findall(hosts)


def _numbers(ranges: str) -> list[str]:
    """`07`, `08`, `12` of `07-08,12`; empty if it is no such list or too long."""
    numbers: list[str] = []
    for text in ranges.split(","):
        match = _NUMBERS.fullmatch(text)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not match or not 0 <= last - first < MOST_HOSTS - len(numbers):
            return []
        numbers += [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]
    return numbers


def is_ipv6(address: str) -> bool:
    """Whether it is an IPv6 address, in brackets or without."""
    try:
        IPv6Address(address.partition("]")[0].strip("["))
    except ValueError:
        return False
    return True


def read_hostfile(path: Path) -> list[str]:
    """Hosts of a file without repetitions, in order: one or several a line, with or without slots. Raises UserError."""
    hosts: list[str] = []
    for number, line in enumerate(read_text(path, LARGEST_OPTIONS).removeprefix("\ufeff").splitlines(), 1):
        with within(f"{path}: line {number}"):
            hosts += _hosts_of(line)
    if not hosts:
        raise UserError(f"{path}: names no node; write one address a line, node 0 first")
    return list(dict.fromkeys(hosts))  # PBS repeats a host for each of its slots


def _hosts_of(line: str) -> Iterator[str]:
    listed, *behind = re.sub(r"\s*([,=])\s*", r"\1", line.partition("#")[0]).split() or [""]
    if not (all("=" in word for word in behind) or _is_grid_engine(behind)):
        raise UserError(f"{' '.join(behind)!r} is unknown behind a host; write one host a line, or a,b")
    for item in _items(listed):
        named = item.rpartition("@")[2]  # host without the user's name
        if is_ipv6(named):
            raise UserError(f"{named}: {NO_IPV6}")
        for host in listed_hosts(_SLOTS.sub("", named)):
            if not _HOST.fullmatch(host):
                raise UserError(f"{host!r} is no host; write its name or address")
            yield host


def _is_grid_engine(behind: list[str]) -> bool:
    """Whether the words after a host are a number of slots and at most a queue@host and its processors. Open MPI and
    Torque write slots=8, np=8."""
    return behind[0].isdigit() and all("@" in word for word in behind[1:2])


PORTS = 20_000, 10_000  # first and number of ports for the store of a Slurm job, unless MASTER_PORT is set
INTERACTIVE = "4294967290"  # SLURM_STEP_ID of a shell of salloc, which runs on the first node alone


@dataclass(frozen=True)
class Claim:
    """The nodes by the variables of one launcher; None or empty where they give no value."""

    words: str  # the variables with their values
    num_nodes: int
    node_rank: int | None
    master_addr: str = ""
    master_port: str = ""

    @property
    def values(self) -> dict[str, str | int]:
        """The known values by the names of our options."""
        return {name: value for name, value in asdict(self).items() if name != "words" and value not in (None, "")}


@dataclass(frozen=True)
class Launcher:
    """Names of the variables of a launcher."""

    number: str  # number of processes or nodes
    rank: str  # rank of this process or node
    on_node: str = ""  # number of processes on this node; unset: one
    one_each: str = ""  # command that starts one process on each node
    address: str = ""  # address of the first: host, host:port, or a list
    port: str = ""

    def read(self, environment: Mapping[str, str]) -> Iterator[Claim]:
        """Raises UserError where it started several processes on a node."""
        if not environment.get(self.number):
            return
        if (environment.get(self.on_node) or "1") != "1":
            processes = words(environment, self.on_node)
            raise UserError(f"{processes}: several processes were started on this node; start one: {self.one_each}")
        host, port = environment.get(self.address, "").split(",")[0], environment.get(self.port, "")
        if not self.port:
            host, _, port = host.rpartition(":") if ":" in host else (host, "", "")
        number, rank = _whole(environment, self.number, 1), _whole(environment, self.rank, 0)
        yield Claim(words(environment, self.number, self.rank), number or 1, rank, host, port)


LAUNCHERS = [Launcher(**row) for row in read_json(Path(__file__).with_name("launchers.json"), comments=True)]
# Kubeflow's PyTorchJob, and clouds that follow it, count nodes; torchrun counts processes. MASTER_ADDR is ours, too.
TORCH = Launcher("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "torchrun --nproc_per_node 1")


def launcher_nodes(
    environment: Mapping[str, str], settings: Mapping[str, str | int], needed: Sequence[str]
) -> dict[str, str | int]:
    """Number of nodes, rank of this node, address and port of the first, as far as launchers give them.

    `settings`: those of the user; `needed`: settings required for several nodes. Raises UserError if a launcher started
    several processes on a node, gives too little, or contradicts another launcher.
    """
    claims = [*_slurm(environment), *(claim for launcher in LAUNCHERS for claim in launcher.read(environment))]
    claims += [*_volcano(environment), *_sage_maker(environment)]
    numbers = {int(settings["num_nodes"])} if "num_nodes" in settings else {claim.num_nodes for claim in claims} - {1}
    if {"RANK", "MASTER_ADDR"} & environment.keys():  # WORLD_SIZE without these may be a leftover
        torch = [*TORCH.read(environment)]
        claims += [claim for claim in torch if not any(_counts_ranks(claim, number) for number in numbers)]
    started, claims = bool(claims), [claim for claim in claims if claim.num_nodes > 1]
    if not claims and not numbers:
        require_alone(environment, started)
    for first, other in combinations(claims, 2):
        ranks = {first.node_rank, other.node_rank} - {None}
        if ("num_nodes" not in settings and first.num_nodes != other.num_nodes) or (
            "node_rank" not in settings and len(ranks) > 1
        ):
            raise UserError(f"{first.words} and {other.words} contradict each other; unset one, or {REMEDY}")
    claimed = {
        name: value for claim in reversed(claims) for name, value in claim.values.items() if name not in settings
    }
    if (index := _whole(environment, INDEX, 0)) is not None:
        claimed.setdefault("node_rank", index)
    missing = [name.upper() for name in needed if name not in {**claimed, **settings}]
    if "num_nodes" in claimed and missing:
        raise UserError(f"{', '.join(missing)}: missing, though {claims[0].words} means several nodes; {REMEDY}")
    return claimed


def _slurm(environment: Mapping[str, str]) -> Iterator[Claim]:
    nodes = _whole(environment, "SLURM_STEP_NUM_NODES", 1)  # set by srun; a plain batch script has none
    if nodes is None or "SLURM_HET_SIZE" in environment or environment.get("SLURM_STEP_ID") == INTERACTIVE:
        return
    if environment.get(LAUNCHERS[0].number) == str(nodes + 1):
        return  # Open MPI began its daemons on the other nodes by srun
    if environment.get("SLURM_STEP_NUM_TASKS", str(nodes)) != str(nodes):
        raise UserError("srun: started several processes on a node; start one: srun --ntasks-per-node=1")
    first, number = PORTS
    yield Claim(
        words(environment, "SLURM_STEP_NUM_NODES", "SLURM_NODEID"),
        nodes,
        _whole(environment, "SLURM_NODEID", 0) or 0,
        first_host(environment.get("SLURM_STEP_NODELIST", "")),
        str(first + (_whole(environment, "SLURM_JOB_ID", 0) or 0) % number),
    )


def _volcano(environment: Mapping[str, str]) -> Iterator[Claim]:
    """Volcano numbers the nodes of each task separately; with several tasks the first node is unknown."""
    tasks = sorted(name for name in environment if re.fullmatch(r"VC_\w+_NUM", name))
    number = sum(_whole(environment, name, 0) or 0 for name in tasks)
    if len(tasks) > 1:
        yield Claim(words(environment, *tasks), number, None)
    elif tasks:
        hosts = environment.get(tasks[0].removesuffix("NUM") + "HOSTS", "")
        rank = _whole(environment, "VC_TASK_INDEX", 0)
        yield Claim(words(environment, *tasks, "VC_TASK_INDEX"), number, rank, hosts.split(",")[0])


def _sage_maker(environment: Mapping[str, str]) -> Iterator[Claim]:
    if not environment.get("SM_HOSTS"):
        return
    hosts, this = parse_json(environment["SM_HOSTS"], "SM_HOSTS"), environment.get("SM_CURRENT_HOST")
    if not isinstance(hosts, list) or not hosts:
        raise UserError(f"{words(environment, 'SM_HOSTS')}: is no list of hosts; {REMEDY}")
    rank = hosts.index(this) if this in hosts else None
    yield Claim(words(environment, "SM_HOSTS", "SM_CURRENT_HOST"), len(hosts), rank, str(hosts[0]))


def _counts_ranks(claim: Claim, num_nodes: int) -> bool:
    """Whether its number counts ranks, several on each node."""
    return claim.num_nodes != num_nodes and claim.num_nodes % num_nodes == 0


def _whole(environment: Mapping[str, str], name: str, least: int) -> int | None:
    """A variable's number; None where it is not set. Raises UserError."""
    if not environment.get(name):
        return None
    try:
        number = int(environment[name])
        if number < least:
            raise ValueError
    except ValueError:
        raise UserError(f"{words(environment, name)}: is no whole number from {least} on; {REMEDY}") from None
    return number


def start_lines(command: str, num_nodes: int, gpus_per_node: int) -> dict[str, str]:
    """The line that starts the command on each of several nodes, by launcher. By default Slurm gives a task no GPU and
    one core, and Open MPI binds it to one core; the command's ranks, data threads and NCCL share its cores."""
    values = {"command": command, "num_nodes": num_nodes, "gpus_per_node": gpus_per_node}
    lines: dict[str, str] = read_json(Path(__file__).with_name("start_lines.json"))
    return {launcher: line.format(**values) for launcher, line in lines.items()}


REMEDY = "set NUM_NODES, NODE_RANK, MASTER_ADDR and MASTER_PORT, or NUM_NODES=1 for this node alone"
NO_NUMBER = "nothing says how many nodes there are"
UNKNOWN = "of a launcher that is not known"
NOT_STARTED = "the job has several nodes, and neither srun nor mpirun started this command on each"
INDEX = "JOB_COMPLETION_INDEX"  # set in Kubernetes jobs with completionMode Indexed
DIGITS = 9  # most digits of a number of nodes

_NODE = "(?:NODE|HOST|MACHINE)"
_MEMBER = "(?:NODE|HOST|MACHINE|WORKER|REPLICA|TRAINER|TASK|PROC|PROCESS|RANK|POD|INSTANCE|CONTAINER|ALLOC|PEER)"
_FIRST = f"(?:NUM_OF_|NUMBER_OF_|TOTAL_|NUM_?|N_?(?={_MEMBER}))"
_LAST = "(?:_?COUNT|_CNT|_NUM|_NUMBER|_TOTAL)"
_names = partial(re.compile, flags=re.IGNORECASE)
# Number of nodes: NNODES, NUM_HOSTS, HOST_NUM, PJM_NODES. Programs of one node also have workers, but not WORKER_NUM.
NODES = _names(rf"(?:\w+_)?(?:{_FIRST}?{_NODE}S|{_FIRST}{_NODE}|{_NODE}S?{_LAST}|WORKER_NUM)")
# Rank of this node: NODE_RANK, PALS_RANKID, TASK_INDEX, PBS_NODENUM.
RANK = _names(rf"(?:\w+_)?(?:RANK(?:_?ID)?|{_MEMBER}_?INDEX|NODENUM|TRAINER_ID)|{INDEX}")
# Number of processes and rank of this process: they mean nodes only together, with the same first word, as in
# PAI_TASK_COUNT and PAI_TASK_INDEX. NUM_WORKERS alone belongs to a data loader, WORKER_ID to a server.
SIZE = _names(
    rf"(?:\w+_)?(?:{_FIRST}{_MEMBER}|{_FIRST}?{_MEMBER}E?S|(?:{_MEMBER}S?|GROUP)(?:{_LAST}|_COUNT_\w+|_SIZE)"
    r"|(?:WORLD|GROUP|COMM|CLUSTER|GANG|NAMESPACE|JOB)_?SIZE)"
)
PLACE = _names(rf"(?:\w+_)?(?:RANK(?:_?ID)?|{_MEMBER}?_?(?:INDEX|IDX|ORDINAL))|(?:\w+_{_MEMBER}|PROCESS)_?(?:ID|NO)")
# Numbers within a node, of independent jobs, of a service's cluster, of adapters. Slurm's are in SLURM.
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
    """Raise UserError for a variable that means several nodes. `started`: a known launcher started this process and
    gives one node."""
    for why, names in _signs(environment, started):
        raise UserError(f"{words(environment, *names)}: {why}; {REMEDY}")


def words(environment: Mapping[str, str], *names: str) -> str:
    """Variables that are set, with their values."""
    return ", ".join(f"{name}={shortened(environment[name])}" for name in names if environment.get(name))


def _signs(environment: Mapping[str, str], started: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The reasons, each with the names of the variables."""
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
    """Hosts that a variable lists or whose file it names, or the addresses of all roles."""
    with suppress(UserError, AttributeError, KeyError, TypeError):  # no file, JSON of another form
        if HOST_FILE.fullmatch(name):
            return read_hostfile(Path(value))
        if ROLES.fullmatch(name):
            return [address for role in parse_json(value, name)["cluster"].values() for address in role]
        if HOSTS.fullmatch(name) and not HARMLESS.fullmatch(name):
            listed = {item.partition(":")[0] for item in re.split(r"[\s,;]+", value)}
            return [host for host in listed if host and not host.isdecimal()]  # LSF writes slots between them
    return []
