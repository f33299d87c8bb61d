"""A run that ends for lack of memory says so: by the rank, its peak, and the prediction."""

import json
import resource
import signal
from dataclasses import replace

import pytest

pytest.importorskip("paddle")

import numpy as np
import paddle
from forked_ranks import fork_command
from paddle.autograd import PyLayer
from small_model import small_config

from paddlenlp_galvatron.launch import faults, out_of_memory
from paddlenlp_galvatron.launch.out_of_memory import ended_out_of_memory, is_out_of_memory, peak_mib_in
from paddlenlp_galvatron.launch.processes import LaunchError, OutOfMemory, launch
from paddlenlp_galvatron.launch.status import lost_a_peer
from paddlenlp_galvatron.options.uniform import uniform_plan
from paddlenlp_galvatron.plan import Assumptions, write_plan

TIMEOUT_S = 600.0
HELD_MIB = 130  # weights of either stage: half of 70 million, fp32
MIB = 2**20
LIMIT_MIB = 900  # a process of Paddle begins with some 500 MiB
# 59 million weights: 0.9 GiB with gradients and moments
MODEL = small_config(hidden=1024, inner=2048, heads=8, vocab=24_000)


@pytest.mark.parametrize(
    ("rank", "room_mib"),
    [(0, 100), pytest.param(1, 300, marks=pytest.mark.slow)],  # the latter by `gpu-check`, too
    ids=["gradients", "moments"],
)
def test_a_rank_that_runs_out_is_named_with_what_it_had_reached(tmp_path, rank, room_mib):
    with pytest.raises(OutOfMemory, match=f"rank {rank} ran out of memory") as caught:
        launch(
            "paddlenlp_galvatron.check.gpu.faults",
            ["starve", str(rank), str(room_mib), "1"],
            2,
            tmp_path / "log",
            TIMEOUT_S,
        )
    assert caught.value.rank == rank
    assert "ResourceExhausted" in str(caught.value)
    assert caught.value.peak_mib is not None
    assert HELD_MIB < caught.value.peak_mib < HELD_MIB + room_mib + 100


def test_a_run_ends_with_predicted_beside_measured_memory(tmp_path):
    """The command under a limit, as `ulimit -d` sets one."""
    assumed = Assumptions(seq_length=16)
    plan = uniform_plan(layers=2, world_size=2, global_train_batch_size=2, pp_deg=2, chunks=2, assumed=assumed)
    stages = [{"memory_mib": 300.0}, {"memory_mib": 600.0}]
    write_plan(replace(plan, metadata={"predicted": {"stages": stages}}), tmp_path / "plan.json")
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    words = ["train", "plan.json", "--model", "model.json", "--max_steps", "2", "--input_dir", "random"]
    limit = (LIMIT_MIB * MIB, LIMIT_MIB * MIB)
    command = fork_command(words, tmp_path / "out", tmp_path)
    resource.prlimit(command.pid, resource.RLIMIT_DATA, limit)  # its ranks inherit it
    assert command.wait(TIMEOUT_S) == 1
    out = (tmp_path / "out").read_text()
    assert "ran out of memory" in out
    title, *rows = (line.split() for line in out.splitlines() if "  " in line)
    assert title == ["stage", "predicted", "GiB", "measured", "GiB"]
    assert [row[:2] for row in rows] == [["0", "0.293"], ["1", "0.586"]]
    (starved,) = (row for row in rows if row[3:] and row[3] == "rank")
    assert 1024 * float(starved[2]) > HELD_MIB
    assert "galvatron search --memory_constraint" in out


class Backward(PyLayer):  # type: ignore[misc]
    """The identity, whose backward does something."""

    @staticmethod
    def forward(ctx, x, work):
        ctx.work = work
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.work()
        return grad


@pytest.mark.parametrize(
    "allocate", [lambda: paddle.empty([2**50]), lambda: np.empty(2**50)], ids=["Paddle's", "numpy's"]
)
def test_failed_allocations_are_known_wherever_they_fail(allocate, capsys):
    x = paddle.ones([1])
    x.stop_gradient = False
    for work in (allocate, Backward.apply(x, allocate).backward):
        with pytest.raises((MemoryError, OSError)) as caught:
            work()
        assert is_out_of_memory(caught.value)
        out_of_memory.report_out_of_memory(caught.value, 12.34)
        reported = capsys.readouterr().err.splitlines()
        assert len(reported) == 1 and ("allocate" in reported[0] or "ResourceExhausted" in reported[0])
        assert peak_mib_in(reported[0]) == 12.3


MEMORY, PEER, CAUSE = "memory", "peer", "cause"
# Paddle 3.3.1's error for each (enforce.h), with the texts of ncclGetErrorString and of CUDA's libraries.
MESSAGES = {
    "std::bad_alloc": MEMORY,
    "(ResourceExhausted) \n\nOut of memory error on GPU 0. Cannot allocate 2.000000GB memory on GPU 0": MEMORY,
    "(External) CUDA error(2), out of memory. \n  [Hint: 'cudaErrorMemoryAllocation'. The API call failed": MEMORY,
    "(External) CUBLAS error(3). \n  [Hint: 'CUBLAS_STATUS_ALLOC_FAILED'. Resource allocation failed": MEMORY,
    "(External) CUBLAS error(1). \n  [Hint: 'CUBLAS_STATUS_NOT_INITIALIZED'. The cuBLAS library was not": MEMORY,
    "(External) CUDNN error(2), CUDNN_STATUS_ALLOC_FAILED. \n": MEMORY,
    "(External) CUDNN error(4002), CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED. \n": MEMORY,
    "(External) CUDA error(700), an illegal memory access was encountered. \n  [Hint: Please search": CAUSE,
    "(External) CUDA error(716), misaligned address. \n": CAUSE,
    "(External) CUBLAS error(13). \n  [Hint: 'CUBLAS_STATUS_EXECUTION_FAILED'.": CAUSE,
    "(External) NCCL error(1), unhandled cuda error (run with NCCL_DEBUG=INFO for details). ": CAUSE,
    "(External) NCCL error(2), unhandled system error (run with NCCL_DEBUG=INFO for details). ": PEER,
    "(External) NCCL error(3), internal error - please report this issue to the NCCL developers. ": CAUSE,
    "(External) NCCL error(5), invalid usage (run with NCCL_DEBUG=WARN for details). ": CAUSE,
    "(External) NCCL error(6), remote process exited or there was a network error. ": PEER,
    "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:40000": PEER,
    "(InvalidArgument) shapes differ": CAUSE,
}


@pytest.mark.parametrize(("message", "kind"), MESSAGES.items())
def test_a_message_is_taken_for_what_it_is(message, kind):
    assert is_out_of_memory(RuntimeError(message)) == (kind == MEMORY)
    assert lost_a_peer(message) == (kind == PEER)


def test_nccls_reason_stands_in_the_log():
    """In place of the same error of an illegal address."""
    log = "h100:1:2 [0] transport/p2p.cc:260 NCCL WARN Cuda failure 2 'out of memory'\nOSError: unhandled cuda error"
    assert ended_out_of_memory(1, log, killed=False) and "Cuda failure 2" in out_of_memory.reason_in(log)
    assert not ended_out_of_memory(1, log.replace("2 'out of memory'", "700 'an illegal memory access'"), False)
    closed = "h100:1:2 [0] misc/socket.cc:50 NCCL WARN socketProgress: Connection closed by remote peer h101<40000>"
    assert lost_a_peer(f"{closed}\nterminate called after throwing an instance of 'common::enforce::EnforceNotMet'")
    assert peak_mib_in("error: something else") is None


def test_an_end_is_distinguished_from_others_by_code_log_and_kernel():
    assert ended_out_of_memory(out_of_memory.EXIT_CODE, "", killed=False)
    assert ended_out_of_memory(
        -signal.SIGABRT, "terminate called after throwing an instance of 'std::bad_alloc'", False
    )
    assert ended_out_of_memory(-signal.SIGKILL, "", killed=True)
    assert not ended_out_of_memory(-signal.SIGKILL, "", killed=False)
    assert not ended_out_of_memory(-signal.SIGABRT, "free(): invalid pointer", killed=True)
    assert not ended_out_of_memory(1, "", killed=True)


@pytest.mark.parametrize(("kills", "kind"), [([3, 4], OutOfMemory), ([3, 3], LaunchError)], ids=["kernel", "user"])
def test_a_rank_that_the_kernel_ends_is_distinguished_from_one_that_a_user_ends(tmp_path, monkeypatch, kills, kind):
    (tmp_path / "killed_rank.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(faults, "kernel_kills", lambda: kills.pop(0) if len(kills) > 1 else kills[0])
    with pytest.raises(LaunchError) as caught:
        launch("killed_rank", [], 1, tmp_path / "log", TIMEOUT_S)
    assert type(caught.value) is kind
