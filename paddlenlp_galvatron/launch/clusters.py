"""Reads the nodes from the variables of a cluster's launcher: srun, mpirun, Paddle's launcher, Kubernetes' jobs.

Each starts one process of the command on every node; the command starts the ranks of its node.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..base.errors import UserError

PORTS = 20_000, 10_000  # the first, and how many: where all nodes of a Slurm job meet unless MASTER_PORT says


def launcher_nodes(environment: Mapping[str, str]) -> dict[str, str]:
    """Number of nodes, this one's, and, where the launcher knows it, address and port of the first. Raises UserError
    where it started several processes on a node."""
    if nodes := environment.get("SLURM_STEP_NUM_NODES"):  # of a step that srun began; a batch script alone has none
        if environment.get("SLURM_STEP_NUM_TASKS", nodes) != nodes:
            raise UserError("srun: started several processes on a node; start one: srun --ntasks-per-node=1")
        first, number = PORTS
        return {
            "num_nodes": nodes,
            "node_rank": environment.get("SLURM_NODEID", "0"),
            "master_addr": first_host(environment.get("SLURM_STEP_NODELIST", "")),
            "master_port": str(first + int(environment.get("SLURM_JOB_ID", "0")) % number),
        }
    if processes := environment.get("OMPI_COMM_WORLD_SIZE"):
        if environment.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1") != "1":
            raise UserError("mpirun: started several processes on a node; start one: mpirun --map-by ppr:1:node")
        return {"num_nodes": processes, "node_rank": environment.get("OMPI_COMM_WORLD_RANK", "0")}
    if (nodes := environment.get("PADDLE_NNODES")) and "PADDLE_GLOBAL_RANK" in environment:
        if environment.get("PADDLE_LOCAL_SIZE", "1") != "1":
            raise UserError("paddle.distributed.launch: started several processes on a node; give --nproc_per_node 1")
        address, _, port = environment.get("PADDLE_MASTER", "").rpartition(":")
        rank = environment["PADDLE_GLOBAL_RANK"]
        return {"num_nodes": nodes, "node_rank": rank, "master_addr": address, "master_port": port}
    if index := environment.get("JOB_COMPLETION_INDEX"):  # of a Kubernetes job with completionMode Indexed
        return {"node_rank": index}
    return {}


def start_lines(command: str, num_nodes: int) -> dict[str, str]:
    """The line that starts the command on each of several nodes, by launcher."""
    meet = "MASTER_ADDR=NODE0 MASTER_PORT=29500"
    paddle = f"python -m paddle.distributed.launch --nnodes {num_nodes} --nproc_per_node 1 --master NODE0:29500"
    return {
        "by hand": f"NUM_NODES={num_nodes} NODE_RANK=0 {meet} {command}  # NODE_RANK 1, … on the others",
        "Slurm": f"srun --nodes={num_nodes} --ntasks-per-node=1 {command}",
        "mpirun": f"{meet} mpirun -np {num_nodes} --map-by ppr:1:node -x MASTER_ADDR -x MASTER_PORT {command}",
        "Paddle": f"{paddle} {command}",
        "Kubernetes": f"NUM_NODES={num_nodes} {meet} {command}  # in a job with completionMode: Indexed",
    }


def first_host(nodes: str) -> str:
    """First host of Slurm's list: `gpu-07` of `gpu-[07-09,12],other`."""
    found = re.match(r"([^\[,]*)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    return "".join(part or "" for part in found.groups()) if found else ""
