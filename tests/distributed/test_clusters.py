"""Nodes by the variables of a cluster's launcher."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.check.validation.options import ValidateOptions
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
        ({"SLURM_JOB_NUM_NODES": "3", "SLURM_NODEID": "0"}, Nodes()),  # a batch script: no srun has begun the command
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
        ({"MA_NUM_HOSTS": "2"}, "MA_NUM_HOSTS=2: of a launcher that is not known; set NUM_NODES"),
        ({"SKYPILOT_NUM_NODES": "2"}, "SKYPILOT_NUM_NODES"),
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


LAUNCHERS = {
    "Slurm": lambda number, rank: {
        "SLURM_STEP_NUM_NODES": number,
        "SLURM_STEP_NUM_TASKS": number,
        "SLURM_STEP_NODELIST": f"ten[{10**6}-{10**6 + int(number) - 1}]",
        "SLURM_NODEID": rank,
        "SLURM_JOB_ID": "5",
    },
    "Open MPI": lambda number, rank: {"OMPI_COMM_WORLD_SIZE": number, "OMPI_COMM_WORLD_RANK": rank},
    "MVAPICH": lambda number, rank: {"MV2_COMM_WORLD_SIZE": number, "MV2_COMM_WORLD_RANK": rank},
    "MPICH": lambda number, rank: {"PMI_SIZE": number, "PMI_RANK": rank, "MPI_LOCALNRANKS": "1"},
    "Horovod": lambda number, rank: {"HOROVOD_SIZE": number, "HOROVOD_RANK": rank, "HOROVOD_LOCAL_SIZE": "1"},
    "Paddle": lambda number, rank: PADDLE | {"PADDLE_NNODES": number, "PADDLE_GLOBAL_RANK": rank},
    "paddle-operator": lambda number, rank: {
        "PADDLE_TRAINERS_NUM": number,
        "PADDLE_TRAINER_ID": rank,
        "PADDLE_TRAINER_ENDPOINTS": ",".join(f"w{host}:2379" for host in range(int(number))),
    },
    "torchrun's own": lambda number, rank: {"PET_NNODES": number, "PET_NODE_RANK": rank, "PET_MASTER_ADDR": "other"},
    "scripts": lambda number, rank: {"NNODES": number, "NODE_RANK": rank},
    "PyTorchJob": lambda number, rank: {"WORLD_SIZE": number, "RANK": rank},
    "Volcano": lambda number, rank: {"VC_WORKER_NUM": number, "VC_TASK_INDEX": rank, "VC_WORKER_HOSTS": "w0,w1"},
    "SageMaker": lambda number, rank: {
        "SM_HOSTS": json.dumps([f"algo-{host}" for host in range(int(number))]),
        "SM_CURRENT_HOST": f"algo-{rank}",
    },
    "Kubernetes": lambda number, rank: {"NUM_NODES": number, "JOB_COMPLETION_INDEX": rank},
}  # each called with the number of nodes and this one's, as text


@st.composite
def places(draw) -> tuple[int, int]:
    number = draw(st.integers(1, 2000))
    return number, draw(st.integers(0, number - 1))


@given(st.sampled_from(sorted(LAUNCHERS)), places())
def test_every_launcher_says_its_nodes_and_one_node_is_alone(launcher, place):
    number, rank = place
    variables = LAUNCHERS[launcher](str(number), str(rank)) | MEETING
    assert Nodes.from_environment(variables) == (Nodes(number, rank, "ten", 71) if number > 1 else Nodes())


@given(places(), st.sets(st.sampled_from(sorted(LAUNCHERS)), min_size=2))
def test_launchers_that_say_the_same_agree(place, launchers):
    number, rank = place
    variables = dict(MEETING)
    for launcher in launchers:
        variables |= LAUNCHERS[launcher](str(number), str(rank))
    assert Nodes.from_environment(variables) == (Nodes(number, rank, "ten", 71) if number > 1 else Nodes())


@given(places(), places(), st.sampled_from([*combinations(sorted(LAUNCHERS.keys() - {"Kubernetes", "scripts"}), 2)]))
def test_launchers_that_contradict_each_other_are_refused_by_name(one, other, pair):
    """Unless one of them means this node alone, the ranks of the nodes, or the nodes of Open MPI's daemons."""
    sets = [LAUNCHERS[name](*map(str, place)) for name, place in zip(pair, (one, other), strict=True)]
    numbers = dict(zip(pair, (one[0], other[0]), strict=True))
    nodes = next(number for name, number in numbers.items() if name != "PyTorchJob")
    assume(1 not in numbers.values() and one != other)
    assume(numbers.get("PyTorchJob", nodes) == nodes or numbers["PyTorchJob"] % nodes)
    assume(numbers.get("Open MPI") != numbers.get("Slurm", 0) + 1)
    with pytest.raises(UserError, match="contradict each other") as error:
        Nodes.from_environment(sets[0] | sets[1] | MEETING)
    assert all(any(name in str(error.value) for name in each) for each in sets)


SPOILT = st.sampled_from(
    ["", "0", "-1", "1:4", "x", "2.5", "9" * 5000, "[", "[]", "\u0662", "localhost", "::1", "a:b:c"]
)


@settings(max_examples=300)
@given(st.sampled_from(sorted(LAUNCHERS)), places(), st.data())
def test_spoilt_variables_are_read_or_refused_in_a_line(launcher, place, data):
    variables = LAUNCHERS[launcher](*map(str, place)) | MEETING
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
