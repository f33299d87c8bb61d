"""Nodes by the variables of a cluster's launcher."""

from __future__ import annotations

from pathlib import Path

import pytest

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.launch.clusters import first_host, start_lines
from paddlenlp_galvatron.launch.nodes import FIELDS, Nodes
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


def nodes_of(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], **given: int) -> Nodes:
    for name in FIELDS:
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return Nodes.from_environment(**given)


@pytest.mark.parametrize(
    ("variables", "nodes"),
    [
        (SRUN, Nodes(3, 2, "gpu-07", 23456)),
        (SRUN | {"MASTER_PORT": "71", "MASTER_ADDR": "ten"}, Nodes(3, 2, "ten", 71)),
        (SRUN | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "0"}, Nodes()),
        ({"SLURM_JOB_NUM_NODES": "3", "SLURM_NODEID": "0"}, Nodes()),  # a batch script: no srun has begun the command
        (MPI | MEETING, Nodes(2, 1, "ten", 71)),
        (PADDLE, Nodes(2, 1, "10.0.0.1", 9071)),
        ({"PADDLE_NNODES": "2"}, Nodes()),  # what Paddle's launcher takes as its own option
        ({"JOB_COMPLETION_INDEX": "1", "NUM_NODES": "2", **MEETING}, Nodes(2, 1, "ten", 71)),
    ],
)
def test_nodes_are_those_of_the_launcher(monkeypatch, variables, nodes):
    assert nodes_of(monkeypatch, variables) == nodes


def test_what_is_given_goes_first(monkeypatch):
    assert nodes_of(monkeypatch, SRUN, node_rank=1, master_port=9) == Nodes(3, 1, "gpu-07", 9)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (SRUN | {"SLURM_STEP_NUM_TASKS": "24"}, "srun --ntasks-per-node=1"),
        (MPI | MEETING | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, "mpirun --map-by ppr:1:node"),
        (PADDLE | {"PADDLE_LOCAL_SIZE": "8"}, "--nproc_per_node 1"),
        (MPI, "MASTER_PORT: missing"),
    ],
)
def test_several_processes_on_a_node_are_refused(monkeypatch, variables, message):
    with pytest.raises(UserError, match=message):
        nodes_of(monkeypatch, variables)


def test_a_profile_asks_the_launcher_for_what_is_not_given(monkeypatch):
    nodes_of(monkeypatch, SRUN)
    options = HardwareOptions.from_values({"nproc": 8})
    told = (options.num_nodes, options.node_rank, options.master_addr, options.master_port)
    assert told == (3, 2, "gpu-07", 23456) and options.world_size == 24
    assert HardwareOptions.from_values({"num_nodes": 1}).node_rank == 0
    assert HardwareOptions.from_values({"analytic": "h100"}).num_nodes == 1


@pytest.mark.parametrize("page", ["docs/en/train.md", "docs/zh/train.md"])
def test_the_lines_that_start_a_plan_are_in_the_docs(page):
    text = (Path(__file__).parents[2] / page).read_text()
    lines = start_lines("galvatron train plan.json --model my-model/ --input_dir data/mine --nproc 8", 2)
    assert not [line for line in lines.values() if line not in text]


def test_the_first_host_of_slurms_list():
    listed = {"a": "a", "a,b": "a", "gpu-[07-09,12],x": "gpu-07", "n[1,4]": "n1", "r1-[3-4]-ib": "r1-3-ib", "": ""}
    assert {nodes: first_host(nodes) for nodes in listed} == listed
