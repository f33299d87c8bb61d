"""What a node with GPUs is told and given, as far as none is needed: devices and environment are faked."""

from __future__ import annotations

import os
import queue
import threading
from unittest.mock import Mock

import pytest

pytest.importorskip("paddle")

import paddle
from paddle.base import core

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.base.printing import Console
from paddlenlp_galvatron.check.parity import parity_worker
from paddlenlp_galvatron.cli.training_run import TrainingRun
from paddlenlp_galvatron.launch import gpus, processes
from paddlenlp_galvatron.launch.nodes import ONE_NODE, Nodes
from paddlenlp_galvatron.launch.processes import devices_of
from paddlenlp_galvatron.plan import Assumptions, ModelShape, uniform_plan
from paddlenlp_galvatron.runtime import collectives, cpu_backend, device


@pytest.fixture
def node(tmp_path, monkeypatch):
    """A folder of device files with a GPU's, none of which is hidden."""
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(gpus, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def test_a_build_for_cpus_is_refused_beside_gpus(node, monkeypatch):
    with pytest.raises(UserError, match=r"nvidia0.*install paddlepaddle-gpu"):
        devices_of(2)
    assert devices_of(2, "cpu")[0]["PADDLE_DISTRI_BACKEND"] == "gloo"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert len(devices_of(2)) == 2
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    (node / "nvidia0").unlink()
    assert len(devices_of(2)) == 2


def test_a_gpu_that_is_asked_for_must_be_there():
    with pytest.raises(UserError, match="device: gpu, but Paddle finds no GPU"):
        devices_of(2, "gpu")


def test_ranks_on_gpus_connect_at_once_and_those_on_cpus_see_none(monkeypatch):
    monkeypatch.setattr(gpus, "gpu_count", lambda: 8)
    ranks = devices_of(2)
    assert [rank["FLAGS_selected_gpus"] for rank in ranks] == ["0", "1"]
    assert ranks[0]["NCCL_RUNTIME_CONNECT"] == "0" and "PADDLE_DISTRI_BACKEND" not in ranks[0]
    assert ranks[0]["FLAGS_embedding_deterministic"] == "1"
    monkeypatch.setenv("FLAGS_embedding_deterministic", "0")  # the user's word holds
    assert devices_of(2)[0]["FLAGS_embedding_deterministic"] == "0"
    assert devices_of(9, "cpu")[0]["CUDA_VISIBLE_DEVICES"] == ""  # more ranks than GPUs
    with pytest.raises(UserError, match="9 processes on a node with 8 GPUs"):
        devices_of(9)


def test_a_proof_computes_in_fp32_where_it_says_so(monkeypatch):
    """CUDA reads the variable when it starts: before any group or tensor is made."""
    found = []
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    monkeypatch.setattr(parity_worker.sys, "argv", ["", "folder"])
    monkeypatch.setattr(parity_worker, "read_cases", lambda _: [])
    monkeypatch.setattr(
        parity_worker, "start_world", lambda: (found.append(os.environ["NVIDIA_TF32_OVERRIDE"]) or 0, 1)
    )
    parity_worker.main()
    assert found == ["0"]


def test_nothing_of_gloo_is_set_up_for_nccl(monkeypatch):
    """Behind NAT and in pods the address that others use is no interface of this node."""
    monkeypatch.setenv("PADDLE_CURRENT_ENDPOINT", "203.0.113.7:6000")
    monkeypatch.delenv("PADDLE_DISTRI_BACKEND", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(core, "is_compiled_with_cuda", lambda: True)
    monkeypatch.delattr(core.ProcessGroupGloo, "galvatron_installed", raising=False)
    cpu_backend.install()
    assert not hasattr(core.ProcessGroupGloo, "galvatron_installed")


def test_nccl_listens_on_the_loopback_of_one_node_and_where_it_is_told_to(monkeypatch):
    monkeypatch.delenv(interface := "NCCL_SOCKET_IFNAME", raising=False)
    assert {rank[interface] for rank in Nodes().environment(2)} == {"lo"}
    assert interface not in Nodes(2, 0, "127.0.0.2", 6000).environment(1)[0]
    monkeypatch.setenv(interface, "eth7")
    assert Nodes().environment(1)[0][interface] == "eth7"


def test_the_watchdog_asks_its_ranks_own_gpu(monkeypatch):
    """CUDA lets a new thread ask the first one, where 8 ranks would take 4 GiB for their contexts."""
    asked: queue.Queue[tuple[int, int]] = queue.Queue()
    monkeypatch.setattr(paddle.device, "get_device", lambda: "gpu:5")

    def use(gpu):
        asked.put((gpu, threading.get_ident()))

    monkeypatch.setattr(core, "set_cuda_current_device_id", use, raising=False)
    monkeypatch.setattr(collectives, "oldest", lambda: None)
    collectives.watch(limit_s=1800)
    gpu, thread = asked.get(timeout=60)
    assert gpu == 5 and thread != threading.get_ident()


def test_one_process_computes_on_the_cpu_whatever_is_there():
    with device.on_cpu():
        assert paddle.device.get_device() == "cpu"


def test_messages_between_stages_hold_few_multiprocessors_unless_the_user_says_otherwise(tmp_path, monkeypatch):
    def variables(**options):
        plan = uniform_plan(layers=2, world_size=4, global_train_batch_size=4, **options)
        return gpus.variables_of(plan.pipeline > 1, plan.has_ulysses)

    monkeypatch.delenv(gpus.P2P_CHANNELS, raising=False)
    assert variables(pp_deg=2) == {"NCCL_MAX_P2P_NCHANNELS": "4"}
    assert variables() == {}
    assert variables(pp_deg=2, use_ulysses=True, global_tp_deg=2) == {}  # all-to-alls need them
    monkeypatch.setenv(gpus.P2P_CHANNELS, "8")
    assert variables(pp_deg=2) == {"NCCL_MAX_P2P_NCHANNELS": "8"}
    assert gpus.slowed_by_a_receive(132) == pytest.approx(132 / 124)
    assert gpus.slowed_by_a_receive(4) == 2.0

    class Begun(Exception):
        pass

    def begin(command, environment, log, descriptor):
        raise Begun(environment[gpus.P2P_CHANNELS])

    monkeypatch.setattr(processes, "begin_process", begin)
    launch = processes.Launch("x", [], 1, tmp_path, 1.0, variables={gpus.P2P_CHANNELS: "5"})
    with pytest.raises(Begun, match="5"), launch:
        pass


@pytest.mark.parametrize("visible", ["3,1", "GPU-5d1a,GPU-77c0", "MIG-0f2e,MIG-9b1d"])
def test_ranks_count_visible_gpus_and_the_driver_is_asked_by_their_own_names(visible, tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n[ -e {tmp_path}/broken ] && exit 9\necho 1234\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(gpus, "gpu_count", lambda: 2)
    ranks = devices_of(2)
    assert [rank["FLAGS_selected_gpus"] for rank in ranks] == ["0", "1"]  # Paddle counts those that are visible
    assert not any("CUDA_VISIBLE_DEVICES" in rank for rank in ranks)  # so that ranks inherit it as it is
    assert [gpus.used_mib(gpu) for gpu in (0, 1)] == [1234.0, 1234.0]
    asked = (tmp_path / "asked").read_text().splitlines()
    assert [line.split()[-1] for line in asked] == visible.split(",")
    (tmp_path / "broken").touch()
    assert gpus.used_mib(0) is None
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert gpus.used_mib(0) is None


def test_a_training_run_tells_its_ranks(tmp_path, monkeypatch):
    plan = uniform_plan(layers=2, world_size=2, global_train_batch_size=2, pp_deg=2, assumed=Assumptions(seq_length=8))
    settings = Mock(output_dir=tmp_path, rank_logs=tmp_path, log=tmp_path / "log.jsonl", world_size=2, peak_tflops=1.0)
    told = {}

    class Told(Exception):
        pass

    def launch(*_, variables, **__):
        told.update(variables)
        raise Told

    monkeypatch.delenv(gpus.P2P_CHANNELS, raising=False)
    monkeypatch.setattr(processes, "Launch", launch)
    shape = ModelShape("small", "llama", 2, 32, 48, 4, 4, 64, 8)
    with pytest.raises(Told):
        TrainingRun(Console(), settings, plan, shape, 1).start(["module"], 1.0, ONE_NODE, 1.0)
    assert told == {"NCCL_MAX_P2P_NCHANNELS": "4"}
