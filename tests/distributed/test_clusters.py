"""Nodes by the variables of a cluster's launcher."""

import json
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.check.validation.work import ValidateOptions
from paddlenlp_galvatron.launch.clusters import start_lines
from paddlenlp_galvatron.launch.nodes import Nodes
from paddlenlp_galvatron.measure.options import HardwareOptions

SRUN = {
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "gpu-[07-09]",
    "SLURM_NODEID": "2",
    "SLURM_JOB_ID": "123456",
}
MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
PADDLE = {"PADDLE_NNODES": "2", "PADDLE_GLOBAL_RANK": "1", "PADDLE_LOCAL_SIZE": "1", "PADDLE_MASTER": "10.0.0.1:9071"}
MEETING = {"MASTER_ADDR": "ten", "MASTER_PORT": "71"}


@pytest.mark.parametrize(
    ("variables", "nodes"),
    [
        (SRUN, Nodes(3, 2, "gpu-07", 23456)),
        (SRUN | {"MASTER_PORT": "71", "MASTER_ADDR": "ten"}, Nodes(3, 2, "ten", 71)),
        (SRUN | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "0"}, Nodes()),
        (SRUN | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_JOB_NUM_NODES": "3"}, Nodes()),
        (MPI | MEETING, Nodes(2, 1, "ten", 71)),
        (PADDLE, Nodes(2, 1, "10.0.0.1", 9071)),
        # Leftovers of other programs on this node: another launcher's word for one node, ranks instead of nodes.
        ({"WORLD_SIZE": "1", "RANK": "0", **MEETING}, Nodes()),
        ({"WORLD_SIZE": "8"}, Nodes()),
        ({"RANK": "0", "NODE_RANK": "0", "MASTER_PORT": "71", "MASTER_ADDR": "localhost"}, Nodes()),
        ({"NUM_NODES": "1", "WORLD_SIZE": "8", "RANK": "7", "NODE_RANK": "x", **MEETING}, Nodes()),
        (SRUN | {"WORLD_SIZE": "24", "RANK": "16"}, Nodes(3, 2, "gpu-07", 23456)),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "1", "WORLD_SIZE": "16", "RANK": "1", **MEETING}, Nodes(2, 1, "ten", 71)),
        ({"NUM_NODES": "2", "NODE_RANK": "1", "WORLD_SIZE": "16", "RANK": "8", **MEETING}, Nodes(2, 1, "ten", 71)),
        (
            {"VC_MASTER_NUM": "1", "VC_WORKER_NUM": "1", "WORLD_SIZE": "2", "RANK": "1", **MEETING},
            Nodes(2, 1, "ten", 71),
        ),
        # mpirun in a Slurm job begins its daemons by srun on the other nodes alone.
        (SRUN | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"} | MPI | MEETING, Nodes(2, 1, "ten", 71)),
        (SRUN | MPI | {"OMPI_COMM_WORLD_SIZE": "4"} | MEETING, Nodes(4, 1, "ten", 71)),
        ({"GALVATRON_STORE": "10.0.0.1:71", "PADDLE_TRAINERS_NUM": "8", "PADDLE_TRAINER_ID": "3"}, Nodes()),  # a rank
        ({"JOB_COMPLETION_INDEX": "1", "NUM_NODES": "2", **MEETING}, Nodes(2, 1, "ten", 71)),
    ],
)
def test_nodes_are_those_of_the_launcher(variables, nodes):
    assert Nodes.from_environment(variables) == nodes


def test_what_is_given_goes_first():
    assert Nodes.from_environment(SRUN, node_rank=1, master_port=9) == Nodes(3, 1, "gpu-07", 9)
    assert Nodes.from_environment(SRUN | {"NODE_RANK": "1"}, node_rank=0) == Nodes(3, 0, "gpu-07", 23456)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (SRUN | {"SLURM_STEP_NUM_TASKS": "24"}, "srun --ntasks-per-node=1"),
        (MPI | MEETING | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, "mpirun --map-by ppr:1:node"),
        (PADDLE | {"PADDLE_LOCAL_SIZE": "8"}, "--nproc_per_node 1"),
        (MPI, "MASTER_PORT: missing, though OMPI_COMM_WORLD_SIZE=2, OMPI_COMM_WORLD_RANK=1 means several nodes"),
        (
            {"WORLD_SIZE": "8", "RANK": "3", "LOCAL_WORLD_SIZE": "8"},
            "LOCAL_WORLD_SIZE=8: .* torchrun --nproc_per_node 1",
        ),
        ({"PADDLE_NNODES": "2", "PADDLE_MASTER": "ten:71"}, "NODE_RANK: missing, though PADDLE_NNODES=2"),  # PaddleJob
        ({"PET_NNODES": "1:4", "PET_NODE_RANK": "0"}, "PET_NNODES=1:4: is no whole number"),
        ({"VC_MASTER_NUM": "1", "VC_WORKER_NUM": "2", "VC_TASK_INDEX": "0"}, "though VC_MASTER_NUM=1, VC_WORKER_NUM=2"),
        ({"SM_HOSTS": '"algo-1"'}, "SM_HOSTS=.*: is no list of hosts"),
        ({"SM_HOSTS": '["algo-1", "algo-2"]'}, "NODE_RANK.*: missing, though SM_HOSTS="),
        ({"WORLD_SIZE": "2", **MEETING}, "NODE_RANK: missing, though WORLD_SIZE=2"),
        (SRUN | {"WORLD_SIZE": "4", "RANK": "2"}, "SLURM_STEP_NUM_NODES=3, .* and WORLD_SIZE=4, RANK=2 contradict"),
        (SRUN | {"PET_NNODES": "3", "PET_NODE_RANK": "1"}, "SLURM_NODEID=2 and .*PET_NODE_RANK=1 contradict"),
        ({"JOB_COMPLETION_INDEX": "0"}, "JOB_COMPLETION_INDEX=0: nothing says how many"),
        ({"PMIX_RANK": "1"}, "PMIX_RANK=1: nothing says how many"),
        ({"NODE_RANK": "1"}, "NODE_RANK=1: nothing says how many"),
        ({"MASTER_ADDR": "10.0.0.1"}, "MASTER_ADDR=10.0.0.1: nothing says how many .* or NUM_NODES=1"),
        ({"PMI_SIZE": "16", "PMI_RANK": "9", "PMI_LOCAL_SIZE": "8"}, "PMI_LOCAL_SIZE=8: .* mpiexec --ppn 1"),
        ({"MA_NUM_HOSTS": "2"}, "MA_NUM_HOSTS=2: of a launcher that is not known; set NUM_NODES"),
        ({"SLURM_JOB_NUM_NODES": "3", "SLURM_NODEID": "0"}, "SLURM_JOB_NUM_NODES=3: .* srun .* or NUM_NODES=1"),
        (SRUN | {"SLURM_HET_SIZE": "2"}, "SLURM_HET_SIZE=2: the parts of a heterogeneous job"),
        (
            SRUN | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_ID": "4294967290", "SLURM_NNODES": "3"},  # salloc's shell
            "SLURM_NNODES=3: .* srun",
        ),
        ({"NUM_NODES": "0"}, "NUM_NODES: 0 is no whole number from 1"),
        ({"NUM_NODES": "2", **MEETING}, "NODE_RANK: missing"),
        ({"NUM_NODES": "2", "NODE_RANK": "1", "MASTER_PORT": "71"}, "MASTER_ADDR: missing"),
        *(
            (MPI | MEETING | {"MASTER_ADDR": name}, f"MASTER_ADDR: {name} reaches no other node")
            for name in ("127.0.0.1", "127.0.1.1", "0.0.0.0", "Localhost", "::")
        ),
        (MPI | MEETING | {"MASTER_ADDR": "fd00::12"}, "MASTER_ADDR: fd00::12: IPv6 is not supported"),
        (PADDLE | {"PADDLE_MASTER": "[fd00::12]:9071"}, "IPv6 is not supported"),
    ],
)
def test_too_many_processes_and_too_little_given_are_refused(variables, message):
    with pytest.raises(UserError, match=message):
        Nodes.from_environment(variables)


def test_a_profile_asks_the_launcher_for_what_is_not_given(monkeypatch):
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    options = HardwareOptions.from_values({"nproc": 8})
    reported = (options.num_nodes, options.node_rank, options.master_addr, options.master_port)
    assert reported == (3, 2, "gpu-07", 23456) and options.world_size == 24
    assert ValidateOptions.from_values({"model_size": "m"}).nodes == Nodes(3, 2, "gpu-07", 23456)
    assert HardwareOptions.from_values({"num_nodes": 1}).node_rank == 0
    assert HardwareOptions.from_values({"analytic": "h100"}).num_nodes == 1


@pytest.mark.parametrize("page", ["docs/en/train.md", "docs/zh/train.md"])
def test_the_lines_that_start_a_plan_are_in_the_docs(page):
    text = (Path(__file__).parents[2] / page).read_text()
    lines = start_lines("galvatron train plan.json --model my-model/ --input_dir data/mine --nproc 8", 2, 8)
    assert not [line for line in lines.values() if line not in text]


# Variables that public launchers set on a node, or do not set for a training, by their documents.
VARIABLES = json.loads((Path(__file__).parents[1] / "fixtures" / "launchers.json").read_text())
LAUNCHERS, REFUSED, HARMLESS = (VARIABLES[name] for name in ("launchers", "refused", "harmless"))


def variables_of(launcher: str, number: int, rank: int) -> dict[str, str]:
    """On node `rank` of `number`. A list stands for all hosts: text before, form of a host, text between and behind."""
    words = {"{number}": number, "{rank}": rank, "{place}": rank + 1, "{last}": 10**6 + number - 1}
    found = {}
    for name, text in (LAUNCHERS | REFUSED)[launcher].items():
        if isinstance(text, list):
            before, form, between, behind = text
            text = before + between.join(form.replace("*", str(host)) for host in range(number)) + behind
        for word, value in words.items():
            text = text.replace(word, str(value))
        found[name] = text
    return found


@st.composite
def places(draw) -> tuple[int, int]:
    number = draw(st.integers(1, 2000))
    return number, draw(st.integers(0, number - 1))


@given(st.sampled_from(sorted(LAUNCHERS)), places())
def test_every_launcher_says_its_nodes_and_one_node_is_alone(launcher, place):
    number, rank = place
    variables = variables_of(launcher, number, rank) | MEETING
    assert Nodes.from_environment(variables) == (Nodes(number, rank, "ten", 71) if number > 1 else Nodes())


@given(places(), st.sets(st.sampled_from(sorted(LAUNCHERS)), min_size=2))
def test_launchers_that_say_the_same_agree(place, launchers):
    number, rank = place
    variables = dict(MEETING)
    for launcher in launchers:
        variables |= variables_of(launcher, number, rank)
    assert Nodes.from_environment(variables) == (Nodes(number, rank, "ten", 71) if number > 1 else Nodes())


@given(places(), places(), st.sampled_from([*combinations(sorted(LAUNCHERS.keys() - {"Kubernetes", "scripts"}), 2)]))
def test_launchers_that_contradict_each_other_are_refused_by_name(one, other, pair):
    """Unless one of them means this node alone, the ranks of the nodes, or the nodes of Open MPI's daemons, or both set
    the same variables, as MPICH and Cray PALS do."""
    sets = [variables_of(name, *place) for name, place in zip(pair, (one, other), strict=True)]
    assume(sets[0].keys().isdisjoint(sets[1]))
    numbers = dict(zip(pair, (one[0], other[0]), strict=True))
    nodes = next(number for name, number in numbers.items() if name != "PyTorchJob")
    assume(1 not in numbers.values() and one != other)
    assume(numbers.get("PyTorchJob", nodes) == nodes or numbers["PyTorchJob"] % nodes)
    assume(numbers.get("Open MPI") != numbers.get("Slurm", 0) + 1)
    with pytest.raises(UserError, match="contradict each other") as error:
        Nodes.from_environment(sets[0] | sets[1] | MEETING)
    assert all(any(name in str(error.value) for name in each) for each in sets)


RESERVED = [*(name for name in REFUSED if "script" in name), "Moab", "Fujitsu's PJM", "blaunch of LSF"]


def harmless_variables(names: set[str]) -> dict[str, str]:
    return dict(variable.split("=") for name in names for variable in HARMLESS[name].split())


@settings(max_examples=300)
@given(st.sampled_from(sorted(REFUSED)), places(), st.sets(st.sampled_from(sorted(HARMLESS))))
def test_each_node_of_an_unknown_launcher_is_refused_by_name_and_one_node_starts(name, place, harmless):
    variables = variables_of(name, *place)
    assume(name != "the agent of torchrun" or "a recipe" not in harmless)  # whose GROUP_SIZE is a group's by its name
    around = harmless_variables(harmless)
    if place[0] == 1:
        assert Nodes.from_environment(around | variables) == Nodes()
        return
    assume(name not in RESERVED or "mpirun on one node" not in harmless)
    with pytest.raises(UserError, match="or NUM_NODES=1 for this node alone") as refused:
        Nodes.from_environment(around | variables)
    assert any(f"{key}=" in str(refused.value) for key in variables)
    assert Nodes.from_environment(around | variables | {"NUM_NODES": "1"}) == Nodes()


@given(st.sets(st.sampled_from(sorted(HARMLESS)), min_size=1))
def test_sizes_and_ranks_of_other_things_alarm_nobody(names):
    assert Nodes.from_environment(harmless_variables(names)) == Nodes()


def test_the_file_of_a_batch_system_lists_the_nodes(tmp_path):
    hosts = tmp_path / "nodes"
    hosts.write_text("n1\nn1\n")
    script = {"PBS_JOBID": "1.srv", "PBS_NODENUM": "0", "PBS_TASKNUM": "1", "PBS_NODEFILE": str(hosts)}
    assert Nodes.from_environment(script) == Nodes()
    hosts.write_text("n1\nn2\n")
    with pytest.raises(UserError, match=r"PBS_NODEFILE=.* the job has several nodes"):
        Nodes.from_environment(script)
    with pytest.raises(UserError, match="PBS_NODENUM=1"):
        Nodes.from_environment({"PBS_NODENUM": "1", "PBS_VNODENUM": "1", "PBS_TASKNUM": "3"})  # by pbsdsh


@pytest.mark.parametrize("text", ["", "{", "[]", '{"cluster": []}', '{"cluster": {"worker": 3}}', '{"task": {}}', "3"])
def test_a_specification_of_another_form_alarms_nobody(text):
    assert Nodes.from_environment({"TF_CONFIG": text, "CLUSTER_SPEC": text, "PE_HOSTFILE": text}) == Nodes()


SPOILT = st.sampled_from(["", "0", "-1", "1:4", "x", "2.5", "9" * 5000, "[", "[]", "\u0662", "localhost", "::1", "a:b"])


@settings(max_examples=300)
@given(st.sampled_from(sorted(LAUNCHERS)), places(), st.data())
def test_spoilt_variables_are_read_or_refused_in_a_line(launcher, place, data):
    variables = variables_of(launcher, *place) | MEETING
    for name in data.draw(st.sets(st.sampled_from(sorted(variables)), min_size=1)):
        if data.draw(st.booleans()):
            variables[name] = data.draw(SPOILT)
        else:
            del variables[name]
    try:
        nodes = Nodes.from_environment(variables)
    except UserError as error:
        assert len(str(error)) < 400 and "\n" not in str(error)
    else:
        assert 0 <= nodes.node_rank < nodes.num_nodes
