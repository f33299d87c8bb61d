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
    "LeaderWorkerSet": lambda number, rank: {
        "LWS_GROUP_SIZE": number,
        "LWS_WORKER_INDEX": rank,
        "LWS_LEADER_ADDRESS": "job-0.job.default",
    },
    "Beaker": lambda number, rank: {
        "BEAKER_REPLICA_COUNT": number,
        "BEAKER_REPLICA_RANK": rank,
        "BEAKER_LEADER_REPLICA_HOSTNAME": "ten",
    },
    "Lepton": lambda number, rank: {"LEPTON_JOB_TOTAL_WORKERS": number, "LEPTON_JOB_WORKER_INDEX": rank},
    "Cray PALS": lambda number, rank: {
        "PMI_SIZE": number,
        "PMI_RANK": rank,
        "PMI_LOCAL_SIZE": "1",
        "PALS_RANKID": rank,
        "PALS_NODEID": rank,
    },
    "jsrun": lambda number, rank: {
        "JSM_NAMESPACE_SIZE": number,
        "JSM_NAMESPACE_RANK": rank,
        "JSM_NAMESPACE_LOCAL_SIZE": "1",
        "PMIX_RANK": rank,
    },
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


def listed(number: str, form: str, between: str = ",") -> str:
    return between.join(form.format(host) for host in range(int(number)))


REFUSED = {
    "blaunch of LSF": lambda number, rank: {
        "LSB_JOBID": "7", "LSB_DJOB_NUMPROC": "64", "LSB_MCPU_HOSTS": listed(number, "n{} 8", " "),
        "LSF_PM_TASKID": str(int(rank) + 1),
    },
    "a Torque script": lambda number, rank: {
        "PBS_NUM_NODES": number, "PBS_NUM_PPN": "8", "PBS_NP": "64", "PBS_NODENUM": "0", "PBS_TASKNUM": "1",
    },
    "a Grid Engine script": lambda number, rank: {"NHOSTS": number, "NSLOTS": "64", "NQUEUES": "2", "SGE_TASK_ID": "3"},
    "a Slurm script": lambda number, rank: {
        "SLURM_JOB_ID": "7", "SLURM_NNODES": number, "SLURM_JOB_NUM_NODES": number, "SLURM_NODEID": "0",
        "SLURM_NTASKS": "64", "SLURM_PROCID": "0", "SLURM_TASKS_PER_NODE": "8", "SLURM_TASK_PID": "71",
    },
    "Moab": lambda number, rank: {"MOAB_NODECOUNT": number, "MOAB_TASKMAP": "n0:8", "MOAB_JOBARRAYINDEX": "2"},
    "Fujitsu's PJM": lambda number, rank: {"PJM_NODE": number, "PJM_NODES": number, "PJM_MPI_PROC": "64"},
    "HTCondor": lambda number, rank: {"_CONDOR_NPROCS": number, "_CONDOR_PROCNO": rank, "_CONDOR_SLOT": "slot1_2"},
    "Flux": lambda number, rank: {"FLUX_JOB_NNODES": number, "FLUX_JOB_SIZE": number, "FLUX_TASK_RANK": rank},
    "TensorFlow": lambda number, rank: {
        "TF_CONFIG": json.dumps({"cluster": {"worker": listed(number, "w{}:1").split(",")}, "task": {"index": rank}}),
    },
    "Vertex AI": lambda number, rank: {
        "CLUSTER_SPEC": json.dumps(
            {"cluster": {f"workerpool{pool}": ["a:2222"] for pool in range(int(number))}, "environment": "cloud"}
        ),
    },
    "Determined": lambda number, rank: {"DET_NUM_NODES": number, "DET_NODE_RANK": rank, "DET_CHIEF_IP": "10.0.0.1"},
    "OpenPAI": lambda number, rank: {
        "PAI_TASK_ROLE_COUNT": "1", "PAI_TASK_ROLE_TASK_COUNT_worker": number, "PAI_TASK_INDEX": rank,
        "PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX": rank,
    },
    "Nomad": lambda number, rank: {"NOMAD_GROUP_COUNT": number, "NOMAD_ALLOC_INDEX": rank, "NOMAD_CPU_LIMIT": "500"},
    "Tencent": lambda number, rank: {
        "HOST_NUM": number, "INDEX": rank, "CHIEF_IP": "10.0.0.1", "NODE_LIST": listed(number, "10.0.0.{}:8"),
    },
    "AWS Batch": lambda number, rank: {
        "AWS_BATCH_JOB_NUM_NODES": number, "AWS_BATCH_JOB_NODE_INDEX": rank, "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
    },
    "Azure Batch": lambda number, rank: {"AZ_BATCH_NODE_LIST": listed(number, "10.0.0.{}", ";")},
    "TPU pod": lambda number, rank: {"TPU_WORKER_ID": rank, "TPU_WORKER_HOSTNAMES": listed(number, "t{}")},
    "SkyPilot": lambda number, rank: {"SKYPILOT_NUM_NODES": number, "SKYPILOT_NODE_RANK": rank},
    "dstack": lambda number, rank: {"DSTACK_NODES_NUM": number, "DSTACK_NODE_RANK": rank, "DSTACK_GPUS_NUM": "16"},
    "Metaflow": lambda number, rank: {"MF_PARALLEL_NUM_NODES": number, "MF_PARALLEL_NODE_INDEX": rank},
    "volc MLP": lambda number, rank: {"MLP_WORKER_NUM": number, "MLP_ROLE_INDEX": rank, "MLP_WORKER_GPU": "8"},
    "MXNet": lambda number, rank: {"DMLC_NUM_WORKER": number, "DMLC_WORKER_ID": rank, "DMLC_ROLE": "worker"},
    "JAX": lambda number, rank: {"JAX_NUM_PROCESSES": number, "JAX_PROCESS_ID": rank},
    "the agent of torchrun": lambda number, rank: {"GROUP_WORLD_SIZE": number, "GROUP_RANK": rank},
    "ClearML": lambda number, rank: {"CLEARML_NODE_COUNT": number, "CLEARML_NODE_RANK": rank},
    "Google Batch": lambda number, rank: {"BATCH_TASK_COUNT": number, "BATCH_TASK_INDEX": rank},
    "Knative": lambda number, rank: {"REPLICA_COUNT": number, "REPLICA_INDEX": rank},
}  # fmt: skip
# Sizes, ranks, counts and hosts that say nothing of other nodes of this training.
HARMLESS = {
    "a shell": (
        "HISTSIZE=1000 HISTFILESIZE=2000 LINES=50 COLUMNS=200 SHLVL=2 WINDOW=3 XCURSOR_SIZE=24 "
        "XDG_SESSION_ID=7 HOSTNAME=n7 HOSTTYPE=x86_64 GROUP_ID=1000"
    ),
    "threads": (
        "OMP_NUM_THREADS=8 NPROC=64 NUM_WORKERS=8 DATALOADER_NUM_WORKERS=8 MAX_JOBS=4 NUMBER_OF_PROCESSORS=64 "
        "HF_DATASETS_NUM_PROC=8 I_MPI_INFO_NUMA_NODE_NUM=2"
    ),
    "GPUs": (
        "NUM_GPUS=8 GPU_COUNT=8 NPROC_PER_NODE=8 GPUS_PER_NODE=8 WORLD_SIZE=8 LOCAL_WORLD_SIZE=8 LOCAL_RANK=3 "
        "RUNPOD_GPU_COUNT=8 NVIDIA_BUILD_ID=73 NCCL_IB_GID_INDEX=3 NCCL_MIN_NCHANNELS=4 "
        "NCCL_SOCKET_NTHREADS=4 UCX_IB_GID_INDEX=3"
    ),
    "a pod": (
        "KUBERNETES_SERVICE_HOST=10.96.0.1 KUBERNETES_SERVICE_PORT=443 KUBERNETES_NODE_COUNT=12 "
        "REDIS_PORT_6379_TCP_PORT=6379 NODE_NAME=gpu-7 HOST_IP=10.0.0.7 POD_INDEX=0 "
        "WORKERS_SERVICE_HOST=10.96.0.7 MY_RANK_SERVICE_PORT=8080"
    ),
    "Slurm on one node": (
        "SLURM_NNODES=1 SLURM_JOB_NUM_NODES=1 SLURM_NTASKS=8 SLURM_NPROCS=8 SLURM_CPUS_ON_NODE=64 "
        "SLURM_GPUS_ON_NODE=8 SLURM_JOB_NODELIST=n[7] SLURM_ARRAY_TASK_COUNT=10 SLURM_ARRAY_TASK_ID=3 "
        "SLURM_LOCALID=0"
    ),
    "arrays of jobs": (
        "PBS_ARRAY_INDEX=3 SGE_TASK_ID=3 SGE_TASK_LAST=9 LSB_JOBINDEX=3 AWS_BATCH_JOB_ARRAY_INDEX=3 "
        "AWS_BATCH_JOB_ARRAY_SIZE=9 PARALLEL_SEQ=4"
    ),
    "tests in parallel": (
        "CI_NODE_TOTAL=4 CI_NODE_INDEX=2 CIRCLE_NODE_TOTAL=4 CIRCLE_NODE_INDEX=1 "
        "BUILDKITE_PARALLEL_JOB_COUNT=4 BUILDKITE_PARALLEL_JOB=1 JEST_WORKER_ID=2 PYTEST_XDIST_WORKER_COUNT=4 "
        "TEST_WORKER_INDEX=1 GITHUB_RUN_ATTEMPT=2 SEMAPHORE_JOB_COUNT=4 SEMAPHORE_JOB_INDEX=2 "
        "EXECUTOR_NUMBER=3"
    ),
    "servers": (
        "WEB_CONCURRENCY=4 GUNICORN_WORKERS=4 WORKER_ID=2 NODE_VERSION=20 NODE_ID=17 ELASTICSEARCH_HOSTS=a,b "
        "ALLOWED_HOSTS=a,b KAFKA_NODES=a:1,b:1 DB_REPLICA_COUNT=3 NODE_UNIQUE_ID=2 ELECTRON_RUN_AS_NODE=1 "
        "NODE_MAX_OLD_SPACE_SIZE=4096"
    ),
    "a recipe": (
        "LORA_RANK=8 ADAPTER_RANK=16 KV_LORA_RANK=512 GROUP_SIZE=128 BATCH_SIZE=8 BATCH_INDEX=3 MODEL_SIZE=7 "
        "TASK_ID=5 MAX_NUM_NODES=8 INDEX=4"
    ),
    "mpirun on one node": (
        "OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_RANK=0 OMPI_UNIVERSE_SIZE=8 OMPI_MCA_orte_ess_num_procs=4 "
        "OMPI_MCA_orte_num_nodes=4 PMIX_RANK=0"
    ),
}


RESERVED = [*(name for name in REFUSED if "script" in name), "Moab", "Fujitsu's PJM", "blaunch of LSF"]


def harmless_variables(names: set[str]) -> dict[str, str]:
    return dict(variable.split("=") for name in names for variable in HARMLESS[name].split())


@settings(max_examples=300)
@given(st.sampled_from(sorted(REFUSED)), places(), st.sets(st.sampled_from(sorted(HARMLESS))))
def test_each_node_of_an_unknown_launcher_is_refused_by_name_and_one_node_starts(name, place, harmless):
    variables = REFUSED[name](*map(str, place))
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
