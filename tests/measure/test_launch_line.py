"""The variable `launch` of PaddleNLP's scripts: nodes and devices of the line that starts Paddle's launcher."""

import os

import pytest

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.measure.nodes import options_of_launch

PADDLE = "python -u -m paddle.distributed.launch"
MASTER = {"master_addr": "192.0.2.1", "master_port": "29"}


@pytest.mark.parametrize(
    ("line", "options"),
    [
        (f"{PADDLE} --nnodes=2 --nproc_per_node 4", {"num_nodes": "2", "num_gpus_per_node": "4"}),
        (f"{PADDLE} --gpus 0,2,5", {"num_gpus_per_node": "3"}),
        (f"{PADDLE} --devices=1 --log_dir logs", {"num_gpus_per_node": "1"}),
        (f"{PADDLE} --master etcd://192.0.2.1:29 --rank 1", MASTER | {"node_rank": "1"}),
        (f"{PADDLE} --ips 127.0.0.1,198.51.100.1", {"num_nodes": "2", "master_addr": "127.0.0.1", "node_rank": "0"}),
        ("torchrun --nnodes 2 --node-rank 1", {"num_nodes": "2", "node_rank": "1"}),
        (PADDLE, {}),
    ],
)
def test_nodes_and_devices_of_a_line(monkeypatch, line, options):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert options_of_launch(line, {}) == options
    devices = {f"{PADDLE} --gpus 0,2,5": "0,2,5", f"{PADDLE} --devices=1 --log_dir logs": "1"}.get(line, "7")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == devices


def test_what_is_given_beside_it_holds():
    assert options_of_launch(f"{PADDLE} --nnodes 2", {"num_nodes": "3"}) == {"num_nodes": "3"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("mpirun -n 4", "launch: 'mpirun -n 4' starts none of paddle.distributed.launch"),
        (f"{PADDLE} --nnodes", "launch: --nnodes: a value is missing"),
        (f"{PADDLE} --elastic_timeout 3", "launch: --elastic_timeout has no counterpart here"),
        (f"{PADDLE} --ips 198.51.100.1,198.51.100.2", "launch: --ips: 0 of its addresses are this node's"),
    ],
)
def test_what_it_cannot_say_is_named(line, message):
    with pytest.raises(UserError, match=message):
        options_of_launch(line, {})
