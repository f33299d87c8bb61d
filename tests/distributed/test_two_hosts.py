"""One world over two network namespaces: groups, point-to-point and the launch itself work across hosts."""

import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("paddle")

import forked_ranks
from forked_ranks import begun_with
from small_model import MODEL
from two_nodes import ADDRESSES, two_nodes_or_skip

from paddlenlp_galvatron.check.parity import parity
from paddlenlp_galvatron.check.parity.one_process import train_one_process
from paddlenlp_galvatron.check.parity.parity import compare, small_case, write_cases
from paddlenlp_galvatron.plan import load_model, write_plan
from paddlenlp_galvatron.runtime.weights import SeededWeights
from paddlenlp_galvatron.training.data.source import RandomData
from paddlenlp_galvatron.training.recipe import Recipe
from paddlenlp_galvatron.training.step_log import read_log

from . import plans

TIMEOUT_S = 600.0
MBIT_PER_S = 10_000
PORT = 29_555
STEPS, SEED = 3, 42
LAUNCH = """
import sys
from paddlenlp_galvatron.launch.processes import launch
from paddlenlp_galvatron.launch.nodes import Nodes
folder, rank = sys.argv[1], int(sys.argv[2])
launch({worker!r}, [folder], 2, folder + "/log", {timeout}, Nodes(2, rank, {address!r}, {port}))
"""


@pytest.fixture
def nodes():
    with ExitStack() as stack:
        yield two_nodes_or_skip(stack, MBIT_PER_S)


SCRIPT = Path(__file__).parents[2] / "llm/auto_parallel/galvatron/train_qwen_fine_grained.sh"


def run_on_both(nodes, words):
    """Run the same words, and the node's number, on both nodes to their end."""
    running = [node.start([*words, str(number)], env=begun_with()) for number, node in enumerate(nodes)]
    try:
        return [process.wait(TIMEOUT_S) for process in running]
    finally:
        for process in running:
            process.kill()


@pytest.mark.slow
def test_plans_over_two_hosts_train_as_one_process_does(nodes, tmp_path):
    cases = [
        small_case(plans.plan(4, "2 4r 1z", vocab="4"), "qwen2"),
        small_case(plans.plan(4, "2s 2u 1", (1, 2), vocab="2", micro_batches=4), "llama", "adamw"),
    ]
    write_cases(tmp_path, cases)
    script = LAUNCH.format(worker=parity.WORKER, timeout=TIMEOUT_S, address=ADDRESSES[0], port=PORT)
    assert run_on_both(nodes, [sys.executable, "-c", script, str(tmp_path)]) == [0, 0]
    assert all(result.agrees for result in compare(tmp_path, cases))


def script_on(tmp_path, plan, port, more=""):
    """A command that starts the training script on a node, whose number comes behind."""
    write_plan(replace(plan, assumed=replace(plan.assumed, seq_length=16)), tmp_path / "configs" / "plan.json")
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    each = plan.world_size // 2
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{forked_ranks.__file__}" "$@"\n')
    python.chmod(0o755)
    variables = f"NUM_NODES=2 NUM_GPUS_PER_NODE={each} MASTER_ADDR={ADDRESSES[0]} MASTER_PORT={port} "
    variables += f"PYTHON={python} MODEL=model.json DATA=random MAX_STEPS={STEPS} LEARNING_RATE=1e-3 {more}"
    stated = ">printed.$1 2>&1"
    return ["sh", "-c", f"cd {tmp_path} && export {variables} && NODE_RANK=$1 exec sh {SCRIPT} {stated}", "sh"]


@pytest.mark.slow
def test_a_folder_that_is_not_shared_is_refused_on_both_nodes(nodes, tmp_path):
    words = script_on(tmp_path, plans.plan(2, "2 1z"), PORT + 2, "OUTPUT_DIR=of_node_$1")
    assert run_on_both(nodes, words) == [2, 2]
    for number in (0, 1):
        lines = (tmp_path / f"printed.{number}").read_text().splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        assert "rank 1 does not see what rank 0 writes; name a folder that all nodes share (rank " in errors[0]


@pytest.mark.slow
def test_the_training_script_trains_over_two_hosts_as_one_process_does(nodes, tmp_path):
    plan = plans.plan(4, "2 1z", vocab="2")
    words = script_on(tmp_path, plan, PORT + 1)
    assert run_on_both(nodes, words) == [0, 0]
    traffic = json.loads((tmp_path / "output" / "traffic.json").read_text())
    assert traffic["calls"]["all_gather"] > 0 and len(traffic["groups"]) == 4
    other = (tmp_path / "printed.1").read_text()  # says what node 0's terminal says
    assert "started, " in other and "saved " in other and "done after step" in other
    records = read_log(tmp_path / "output" / "train_log.jsonl")
    shape = load_model(tmp_path / "model.json")
    recipe = Recipe(learning_rate=1e-3, weight_decay=0.01, lr_scheduler_type="cosine", warmup_ratio=0.01).over(STEPS)
    data, weights = RandomData(64, 16, plan.global_batch, SEED), SeededWeights(SEED, shape.initializer_range)
    alone = train_one_process(shape, 16, weights, recipe, (data.batch(step) for step in range(STEPS)))
    assert [record["loss"] for record in records] == pytest.approx([loss for loss, _ in alone], abs=1e-4)
