"""`galvatron doctor`: faults of a machine are reported with their remedies, on simulated machines."""

import json
import os
import time
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from cost_examples import COMPUTATION

from paddlenlp_galvatron.check.doctor import Files, Machine, examine
from paddlenlp_galvatron.check.doctor.machine import PaddleFacts
from paddlenlp_galvatron.check.findings import State
from paddlenlp_galvatron.cli import doctor
from paddlenlp_galvatron.options.uniform import uniform_plan
from paddlenlp_galvatron.plan import write_plan
from paddlenlp_galvatron.profiles.files import Fingerprint, Meta

H100 = "NVIDIA H100 80GB HBM3"
GPU = {"name": H100, "driver_version": "550.54.15", "memory.total": "81559", "memory.used": "4", "compute_cap": "9.0"}
NVLINK = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV18\t0-31\nGPU1\tNV18\t X \t0-31\n\nLegend:\n  X = Self\n"
GOOD: dict[str, Any] = {
    "environment": {}, "python": (3, 11, 7), "lacks": set(), "paddle": PaddleFacts("3.3.1", "12.6", 22203, 2, (2, 3)),
    "gpus": [GPU, GPU], "topology": NVLINK, "modules": {"galvatron_dp_core", "paddlenlp"}, "compiler": "g++ 12.2.0",
    "shm": 8192.0, "cores": 64, "free": 1e6, "limits": {"RLIMIT_NOFILE": 65536, "RLIMIT_MEMLOCK": -1},
    "infiniband": True, "addresses": {"here": "10.0.0.1", "first": "10.0.0.1"}, "listens": None, "route": "10.0.0.1",
    "filesystem": "nfs4",
}  # fmt: skip
SEVERAL = {"NUM_NODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "first", "MASTER_PORT": "2900"}


class StandIn(Machine):
    def __init__(self, **changed: Any):
        self.facts = GOOD | changed
        self.environment, self.python = self.facts["environment"], self.facts["python"]

    def run(self, *words: str, stdin: str = "") -> str | None:
        return self.facts["topology"] if words[0] == "nvidia-smi" else self.facts["compiler"]

    def lacks(self, instructions: str) -> bool:
        return instructions in self.facts["lacks"]

    def has_module(self, name: str) -> bool:
        return name in self.facts["modules"]

    def paddle(self) -> PaddleFacts | None:
        if isinstance(self.facts["paddle"], Exception):
            raise self.facts["paddle"]
        return self.facts["paddle"]

    def gpus(self) -> Any:
        return self.facts["gpus"]

    def shared_memory_mib(self) -> float | None:
        return self.facts["shm"]

    def free_mib(self, folder: Any) -> float:
        return self.facts["free"]

    def limit(self, name: str, hard: bool = False) -> int:
        return self.facts["limits"][name]

    def cores(self) -> int:
        return self.facts["cores"]

    def has_infiniband(self) -> bool:
        return self.facts["infiniband"]

    def hostname(self) -> str:
        return "here"

    def address_of(self, host: str) -> str | None:
        return self.facts["addresses"].get(host)

    def address_towards(self, address: str) -> str | None:
        return self.facts["route"]

    def listens(self, address: str, port: int) -> str | None:
        return self.facts["listens"]

    def filesystem_of(self, folder: Any) -> str:
        return self.facts["filesystem"]


@pytest.fixture
def files(tmp_path):
    meta = Meta(fingerprint=Fingerprint(device=H100, paddle="3.3.1"))
    replace(COMPUTATION, meta=meta).save(tmp_path / "configs")
    write_plan(uniform_plan(layers=2, world_size=4, global_train_batch_size=4), tmp_path / "plan.json")
    return Files(tmp_path / "output", tmp_path / "configs", tmp_path / "plan.json")


def test_a_good_machine_has_nothing_to_mend(files):
    for environment in ({}, SEVERAL):
        findings = examine(StandIn(environment=environment), files)
        assert [finding for finding in findings if finding.state is not State.OK or finding.remedy] == []
        assert {"Python", "compiler", "cores", "search core", "Paddle", "GPU 1", "driver", "NCCL", "links"} <= {
            finding.subject for finding in findings
        }
        sizes = {finding.subject: finding.found for finding in findings if "GiB" in finding.found}
        assert sizes["GPU 1"] == f"{H100}, 79.65 GiB, 0.004 in use" and sizes["shared memory"] == "8.00 GiB"
        assert sizes["output folder"].startswith(f"{files.output}: 976.56 GiB free")


@pytest.mark.parametrize(
    ("capabilities", "built", "shown"),
    [
        pytest.param(("9.0", "9.0"), (2, 3), "2 and 3, by FLAGS_flash_attn_version=3", id="Hopper"),
        pytest.param(("9.0", "9.0"), (2,), "2", id="Hopper, Paddle 3.1"),
        pytest.param(("9.0", "8.0"), (2, 3), "2", id="Hopper and Ampere"),
        pytest.param(("12.0", "12.0"), (2, 3), "2", id="Blackwell"),
    ],
)
def test_the_flash_attention_of_this_build_and_these_gpus_is_named(files, capabilities, built, shown):
    facts = {"gpus": [GPU | {"compute_cap": each} for each in capabilities]}
    machine = StandIn(**facts, paddle=PaddleFacts("3.3.1", "12.6", 22203, 2, built))
    [found] = [one for one in examine(machine, files) if one.subject == "FlashAttention"]
    assert (found.state, found.found) == (State.OK, shown)


def test_a_processor_without_avx512_is_named(files):
    [found] = [one for one in examine(StandIn(lacks={"avx512f"}), files) if one.subject == "processor"]
    assert found.state is State.OK and found.found.startswith("without AVX-512")


FAULT, WARNING = State.FAILED, State.WARNING
CPU_BUILD = PaddleFacts("3.3.1", None, 0, 0)
BAD: dict[str, tuple[dict[str, Any], str, State, str]] = {
    "old Python": ({"python": (3, 9, 1)}, "Python", FAULT, "3.11"),
    "no AVX": ({"lacks": {"avx", "avx512f"}}, "processor", WARNING, "to train, use another machine"),
    "no compiler": ({"compiler": None}, "compiler", WARNING, "g++"),
    "no core": ({"modules": {"paddlenlp"}}, "search core", FAULT, "make setup"),
    "no Paddle": ({"paddle": None}, "Paddle", WARNING, "installation.md"),
    "Paddle that breaks": ({"paddle": ImportError("libcudart.so.12: not found")}, "Paddle", FAULT, ""),
    "old Paddle": ({"paddle": PaddleFacts("2.6.2", "12.6", 22203, 2)}, "Paddle", WARNING, "3.1.1"),
    "no PaddleNLP": ({"modules": {"galvatron_dp_core"}}, "PaddleNLP", FAULT, "paddlenlp==3.0.0b4"),
    "build for CPUs": ({"paddle": CPU_BUILD}, "GPUs", FAULT, "GPU build"),
    "no GPU for a GPU build": ({"gpus": None}, "GPUs", WARNING, "--gpus all"),
    "GPUs that Paddle lacks": ({"paddle": PaddleFacts("3.3.1", "12.6", 22203, 0)}, "GPUs", FAULT, "CUDA_VISIBLE"),
    "a GPU in use": ({"gpus": [GPU, GPU | {"memory.used": "20000"}]}, "GPU 1", WARNING, "context_mib 20000"),
    "old driver": ({"gpus": [GPU | {"driver_version": "470.82.01"}] * 2}, "driver", FAULT, "525.60"),
    "a GPU that is lost": ({"gpus": [GPU, {"name": "Unable to determine"}]}, "GPU 1", FAULT, "restart"),
    "a driver whose number is smaller, read as a decimal": (
        {"gpus": [GPU | {"driver_version": "580.9.01"}] * 2, "paddle": PaddleFacts("3.3.1", "13.0", 22203, 2)},
        "driver", FAULT, "580.65",
    ),
    "a build without FlashAttention": (
        {"paddle": PaddleFacts("3.3.1", "12.6", 22203, 2)}, "FlashAttention", WARNING, "--use_flash_attention 0",
    ),
    "a GPU before Ampere": ({"gpus": [GPU, GPU | {"compute_cap": "7.5"}]}, "FlashAttention", WARNING, "square"),
    "no NCCL": ({"paddle": PaddleFacts("3.3.1", "12.6", 0, 2)}, "NCCL", FAULT, "NCCL"),
    "slow links": ({"topology": NVLINK.replace("NV18", "SYS")}, "links", WARNING, "galvatron profile hardware"),
    "no topology": ({"topology": None}, "links", WARNING, "topo"),
    "small shared memory": ({"shm": 64.0}, "shared memory", FAULT, "--shm-size"),
    "no shared memory": ({"shm": None}, "shared memory", FAULT, "--shm-size"),
    "few files": ({"limits": {"RLIMIT_NOFILE": 256, "RLIMIT_MEMLOCK": -1}}, "open files", WARNING, "ulimit -Hn"),
    "one core, as Slurm gives it": ({"cores": 1}, "cores", WARNING, "all cores"),
    "a core too few": ({"cores": 7}, "cores", WARNING, "all cores"),
    "locked memory": (
        {"limits": {"RLIMIT_NOFILE": 65536, "RLIMIT_MEMLOCK": 65536}}, "locked memory", FAULT, "memlock",
    ),
    "unknown host": ({"addresses": {}}, "host name", WARNING, "/etc/hosts"),
    "no port": ({"listens": "Address already in use"}, "nodes", FAULT, "ports"),
    "port in use": (
        {"environment": SEVERAL, "listens": "Address already in use"}, "nodes", FAULT, "MASTER_PORT",
    ),
    "unknown first node": (
        {"environment": SEVERAL, "addresses": {"here": "10.0.0.1"}}, "nodes", FAULT, "/etc/hosts",
    ),
    "first node on loopback": (
        {"environment": SEVERAL, "addresses": {"here": "10.0.0.1", "first": "127.0.1.1"}}, "nodes", FAULT, "loopback",
    ),
    "no way to the first node": (
        {"environment": SEVERAL | {"NODE_RANK": "1"}, "route": None}, "nodes", FAULT, "network between",
    ),
    "another Paddle": ({"paddle": PaddleFacts("3.2.0", "12.6", 22203, 2)}, "profiles", WARNING, "3.2.0: measure again"),
    "a rank too many": ({"environment": SEVERAL | {"NODE_RANK": "2"}}, "nodes", FAULT, "NODE_RANK"),
    "no number of nodes": ({"environment": {"MASTER_ADDR": "first"}}, "nodes", FAULT, ""),
    "a launcher that says too little": ({"environment": {"PMI_SIZE": "2", "PMI_RANK": "1"}}, "nodes", FAULT, ""),
    "no number": ({"environment": SEVERAL | {"NUM_NODES": "two"}}, "nodes", FAULT, ""),
    "a folder of one node": ({"environment": SEVERAL, "filesystem": "ext4"}, "output folder", WARNING, "one folder"),
    "a full disk": ({"free": 5.0}, "output folder", WARNING, "make room"),
    "another device": ({"gpus": [GPU | {"name": "NVIDIA A100"}] * 2}, "profiles", WARNING, "measure again"),
    "a plan that does not split": (
        {"gpus": [GPU] * 3, "paddle": PaddleFacts("3.3.1", "12.6", 22203, 3)}, "plan", WARNING, "--nproc",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changed", "subject", "state", "remedy"), BAD.values(), ids=BAD)
def test_what_is_wrong_is_reported_with_its_remedy(files, changed, subject, state, remedy):
    findings = [finding for finding in examine(StandIn(**changed), files) if finding.subject == subject]
    reported = [finding for finding in findings if finding.state is not State.OK]
    assert [finding.state for finding in reported[:1]] == [state] and remedy in reported[0].remedy, findings
    assert all(finding.remedy for finding in reported)


@pytest.mark.parametrize(
    ("version", "cuda"),
    [("580.65.06", "13.0"), ("580.105.08", "13.0"), ("525.105.17", "12.6"), ("450.248.02", "11.8"), ("[N/A]", "12.6"),
     ("590", "13.0"), ("1000.1", "13.0")],
)  # fmt: skip
def test_a_driver_that_is_new_enough(files, version, cuda):
    machine = StandIn(gpus=[GPU | {"driver_version": version}] * 2, paddle=PaddleFacts("3.3.1", cuda, 22203, 2))
    [finding] = [one for one in examine(machine, files) if one.subject == "driver"]
    assert finding.state is State.OK and version in finding.found


NOT_GIVEN = ["[N/A]", "N/A", "[Not Supported]", "[Unknown Error]", "ERR!", "", "nan", "inf", "-1"]


@pytest.mark.parametrize("text", NOT_GIVEN)
def test_memory_that_nvidia_smi_does_not_report_is_no_fault(files, text):
    for fields in (["memory.total", "memory.used"], ["memory.used"], ["memory.total"]):
        found = examine(StandIn(gpus=[GPU | dict.fromkeys(fields, text)] * 2), files)
        [finding] = [one for one in found if one.subject == "GPU 0"]
        assert finding.state is State.OK and finding.found.startswith(H100), finding
        assert ("79.65 GiB" in finding.found) == ("memory.total" not in fields) and "in use" not in finding.found


def test_files_that_are_wrong(files, tmp_path):
    def reported(changed: Files, subject: str) -> list[Any]:
        return [finding for finding in examine(StandIn(), changed) if finding.subject == subject]

    old = time.time() - 200 * 86400
    for path in files.profiles.iterdir():
        os.utime(path, (old, old))
    assert reported(files, "profiles")[0].state is WARNING
    next(files.profiles.iterdir()).write_text("{")
    assert reported(files, "profiles")[0].state is FAULT
    (tmp_path / "broken.json").write_text('{"pp_deg": 0}')
    assert reported(replace(files, plan=tmp_path / "broken.json"), "plan")[0].state is FAULT
    (tmp_path / "file").write_text("")
    assert reported(replace(files, output=tmp_path / "file" / "below"), "output folder")[0].state is not FAULT
    assert reported(replace(files, profiles=tmp_path / "nowhere"), "profiles")[0].state is State.OK


HOSTS = {
    "": "write one address",
    "10.0.0.1\nnowhere slots=8\n": "/etc/hosts",
    "first\nhere\n": "one line a node",
    "first\nlocalhost\n": "loopback",
    "# node 0\nfirst slots=8\nsecond\n": "",
}


@pytest.mark.parametrize(("text", "remedy"), HOSTS.items(), ids=range(len(HOSTS)))
def test_every_host_of_a_hostfile_is_looked_up(files, tmp_path, text, remedy):
    (tmp_path / "hosts").write_text(text)
    addresses = dict.fromkeys(("first", "here", "10.0.0.1"), "10.0.0.1")
    machine = StandIn(addresses=addresses | {"second": "10.0.0.2", "localhost": "127.0.0.1"})
    [finding] = [one for one in examine(machine, replace(files, hostfile=tmp_path / "hosts")) if one.subject == "hosts"]
    assert finding.state is (FAULT if remedy else State.OK) and remedy in finding.remedy


@pytest.mark.parametrize(("changed", "code"), [({}, 0), ({"compiler": None}, 0), ({"shm": None}, 1)])
def test_the_exit_code_reports_faults_alone(galvatron, files, tmp_path, changed, code):
    with patch.object(doctor, "Machine", lambda: StandIn(**changed)):
        plain, ran = galvatron("doctor"), galvatron("doctor", "--json", "--plan", "plan.json")
    reported = json.loads(ran.out)
    assert plain.code == ran.code == code and (reported["result"] == "ok") == (code == 0)
    assert all(set(finding) == {"subject", "found", "state", "remedy"} for finding in reported["findings"])
    assert " ok" in plain.out.splitlines()[-1]


def test_this_machine_answers_every_check(tmp_path):
    machine = Machine()
    assert machine.filesystem_of(tmp_path) != "unknown"
    assert machine.listens("127.0.0.1", 0) is None and machine.listens("203.0.113.1", 1)
    assert machine.run("false") is None and machine.run("no-such-program") is None
    assert machine.run("cat", stdin="yes") == "yes"
    assert machine.address_of("localhost") == "127.0.0.1" and machine.limit("RLIMIT_NOFILE") != 0
    most = machine.limit("RLIMIT_NOFILE", hard=True)
    assert machine.cores() >= 1 and (most == -1 or most > 0)
