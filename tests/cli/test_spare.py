"""`galvatron plan spare` and `galvatron train --spare`: plans for fewer nodes, ready before a node fails."""

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from small_model import MODEL

from paddlenlp_galvatron.plan import read_plan
from paddlenlp_galvatron.training.step_log import read_log

TRAIN = "--model_size=model.json --seq=16 --input_dir=random --max_steps=4 --save_steps=2"


@pytest.fixture
def spares(tmp_path, monkeypatch, galvatron) -> Path:
    """Plans of 3 nodes of 2 GPUs, and of 2 nodes and 1."""
    monkeypatch.chdir(tmp_path)
    Path("model.json").write_text(json.dumps(MODEL))
    words = "--device h100 --num_nodes 3 --num_gpus_per_node 2 --batch 12 --seq 16 -o plan.json"
    assert galvatron("search", "model.json", *words.split()).code == 0
    made = galvatron("plan", "spare", "plan.json", "--nodes", "2,1", "--json")
    answer = json.loads(made.out)
    assert [one["gpus"] for one in answer["spares"]] == [4, 2] and made.code == 0
    assert all(one["lost"] < 1 for one in answer["spares"])
    return Path(answer["folder"])


def test_the_batch_is_kept_and_a_number_that_is_not_less_is_refused(spares, galvatron):
    plans = {path.name: read_plan(path) for path in spares.glob("*.json")}
    assert {name: plan.world_size for name, plan in plans.items()} == {
        "2gpus.json": 2,
        "4gpus.json": 4,
        "6gpus.json": 6,
    }
    assert {plan.global_batch for plan in plans.values()} == {12}
    refused = galvatron("plan", "spare", "plan.json", "--nodes", "3")
    assert refused.code == 2 and "below 3" in refused.err


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        pytest.param("--nproc 3", "no plan for 3 GPUs, but for 2, 4, 6", id="processes without a plan"),
        pytest.param("", "nproc: missing", id="no number of processes"),
        pytest.param("--nproc 2 --tp 2", "", id="degrees are ignored with a note"),
    ],
)
def test_a_run_takes_the_plan_that_fits_or_says_why_not(words, fault, spares, galvatron):
    ran = galvatron("train", "--spare", spares, *TRAIN.split(), *words.split(), "--dry_run")
    assert (ran.code, fault in ran.err) == (2 if fault else 0, True)
    assert fault or f"the plan for 2 processes is {spares}/2gpus.json" in ran.out


@pytest.mark.slow
def test_fewer_nodes_resume_with_the_losses_of_a_run_under_that_plan(spares, galvatron):
    assert galvatron("train", "--spare", spares, *TRAIN.split(), "--nproc", 6, "--output_dir", "run").code == 0
    (last,) = Path("run/checkpoints").glob("*4")
    shutil.rmtree(last)  # the run was killed after step 2 was saved
    shutil.copytree("run", "other")
    assert galvatron("train", "--spare", spares, *TRAIN.split(), "--nproc", 4, "--output_dir", "run").code == 0
    plan = spares / "4gpus.json"
    assert galvatron("train", plan, *TRAIN.split(), "--nproc", 4, "--output_dir", "other").code == 0
    losses = [[record["loss"] for record in read_log(Path(run) / "train_log.jsonl")] for run in ("run", "other")]
    assert losses[0] == losses[1] and len(losses[0]) == 4
