"""Arguments and environment of ranks on a node with GPUs, as far as none is needed: devices are faked."""

import os
import queue
import threading
from dataclasses import replace

import pytest

pytest.importorskip("paddle")

import paddle
from paddle.base import core

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.check.parity import parity_worker
from paddlenlp_galvatron.launch import gpus
from paddlenlp_galvatron.launch.nodes import Nodes
from paddlenlp_galvatron.launch.processes import devices_of
from paddlenlp_galvatron.options.uniform import uniform_plan
from paddlenlp_galvatron.plan import Assumptions, ModelShape
from paddlenlp_galvatron.plan.communicators import all_to_alls
from paddlenlp_galvatron.runtime import collectives, cpu_backend, device, engine
from paddlenlp_galvatron.runtime.setup import ModelSetup


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


def test_ranks_on_gpus_see_their_own_one_and_those_on_cpus_none(monkeypatch):
    monkeypatch.setattr(gpus, "gpu_count", lambda: 8)
    ranks = devices_of(2)
    assert [rank["CUDA_VISIBLE_DEVICES"] for rank in ranks] == ["0", "1"]  # its own one alone
    assert {rank["FLAGS_selected_gpus"] for rank in ranks} == {"0"} and "PADDLE_DISTRI_BACKEND" not in ranks[0]
    assert all(gpus.ON_GPUS.items() <= rank.items() for rank in ranks)  # Paddle reads some when it is imported
    assert {rank["OMP_NUM_THREADS"] for rank in ranks} == {"1"}  # as torchrun
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    assert devices_of(2)[0]["OMP_NUM_THREADS"] == "6"
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


def test_nccl_listens_on_the_loopback_of_one_node_and_where_it_is_asked_to(monkeypatch):
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


QWEN = ModelShape("small", "qwen3", 2, 32, 48, 4, 4, 64, 8)
EXPERTS = replace(QWEN, family="qwen3_moe", experts=4, experts_per_token=2, expert_size=16)


@pytest.mark.parametrize(
    ("shape", "options", "channels"),
    [
        (QWEN, {"pp_deg": 2}, "4"),
        (QWEN, {}, None),  # no messages between stages
        (QWEN, {"pp_deg": 2, "use_ulysses": True, "global_tp_deg": 2}, None),  # all-to-alls need them
        (EXPERTS, {"pp_deg": 2, "global_ep_deg": 2}, None),
        (EXPERTS, {"pp_deg": 2}, "4"),  # every rank has all experts
        (QWEN, {"pp_deg": 2, "global_tp_deg": 2, "sequence_parallel": True}, "4"),
        (
            QWEN,
            {"pp_deg": 2, "world_size": 8, "global_tp_deg": 2, "global_tp_consec": 0, "sequence_parallel": True},
            None,
        ),
    ],
)
def test_messages_between_stages_hold_few_multiprocessors_where_nothing_else_needs_channels(
    monkeypatch, shape, options, channels
):
    assumed = Assumptions(sequence_parallel=options.pop("sequence_parallel", False), seq_length=8)
    plan = uniform_plan(**{"layers": 2, "world_size": 4, "global_train_batch_size": 4, "assumed": assumed} | options)
    limits = plan.pipeline > 1 and not all_to_alls(plan, shape, 8)
    gpus.set_defaults(limits)
    assert not {gpus.P2P_CHANNELS, *gpus.ON_GPUS} & set(os.environ)  # on CPUs nothing reads them
    monkeypatch.setattr(gpus, "gpu_count", lambda: 1)
    monkeypatch.setattr(paddle, "set_flags", lambda flags: set_flags.update(flags))
    set_flags: dict[str, int] = {}
    gpus.set_defaults(limits)
    assert os.environ.get(gpus.P2P_CHANNELS) == channels
    assert {name: os.environ[name] for name in gpus.ON_GPUS} == gpus.ON_GPUS  # for any launcher of this rank
    assert set_flags == {"FLAGS_embedding_deterministic": 1, "FLAGS_use_auto_growth_pinned_allocator": 1}


def test_what_the_user_sets_holds_and_an_engine_asks_before_its_first_group(monkeypatch):
    monkeypatch.setenv(gpus.P2P_CHANNELS, "8")
    monkeypatch.setenv("FLAGS_embedding_deterministic", "0")
    monkeypatch.setattr(gpus, "gpu_count", lambda: 1)
    monkeypatch.setattr(paddle, "set_flags", lambda _: None)
    gpus.set_defaults(True)
    assert [os.environ[name] for name in (gpus.P2P_CHANNELS, [*gpus.ON_GPUS][2])] == ["8", "0"]
    asked = []

    class Asked(Exception):
        pass

    def create(self, wanted, *_):
        raise Asked

    monkeypatch.setattr(gpus, "set_defaults", asked.append)
    monkeypatch.setattr(engine, "start_world", lambda: (0, 2))
    monkeypatch.setattr(engine.Groups, "create", create)
    plan = uniform_plan(layers=2, world_size=2, global_train_batch_size=2, pp_deg=2, assumed=Assumptions(seq_length=8))
    with pytest.raises(Asked):
        engine.Engine(ModelSetup.of(plan, QWEN, 8))
    assert asked == [True]


def test_a_receive_slows_what_is_computed_beside_it(monkeypatch):
    monkeypatch.setenv(gpus.P2P_CHANNELS, "8")
    assert gpus.slowed_by_a_receive(132) == pytest.approx(132 / 124)
    assert gpus.slowed_by_a_receive(4) == 2.0


@pytest.mark.parametrize("visible", ["3,1", "GPU-5d1a,GPU-77c0", "MIG-0f2e,MIG-9b1d"])
def test_ranks_take_visible_gpus_and_the_driver_is_asked_by_their_own_names(visible, tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n[ -e {tmp_path}/broken ] && exit 9\necho 1234\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(gpus, "gpu_count", lambda: 2)
    ranks = devices_of(2)
    assert [rank["CUDA_VISIBLE_DEVICES"] for rank in ranks] == visible.split(",")
    assert {rank["FLAGS_selected_gpus"] for rank in ranks} == {"0"}  # Paddle counts those that are visible
    assert [gpus.used_mib(gpu) for gpu in (0, 1)] == [1234.0, 1234.0]
    asked = (tmp_path / "asked").read_text().splitlines()
    assert [line.split()[-1] for line in asked] == visible.split(",")
    (tmp_path / "broken").touch()
    assert gpus.used_mib(0) is None
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert gpus.used_mib(0) is None
