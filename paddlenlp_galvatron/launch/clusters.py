"""Reads the nodes from the variables of a cluster's own launcher: Slurm's srun, mpirun and Kubernetes' indexed jobs.

Each starts one process of the command on every node; the command starts the ranks of its node.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..plan import UserError

PORTS = 20_000, 10_000  # the first, and how many: where all nodes of a Slurm job meet unless MASTER_PORT says


def told_by_launcher(environment: Mapping[str, str]) -> dict[str, str]:
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
    if index := environment.get("JOB_COMPLETION_INDEX"):  # of a Kubernetes job with completionMode Indexed
        return {"node_rank": index}
    return {}


def first_host(nodes: str) -> str:
    """First host of Slurm's list: `gpu-07` of `gpu-[07-09,12],other`."""
    found = re.match(r"([^\[,]*)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    return "".join(part or "" for part in found.groups()) if found else ""
