"""The same plans under a backend that does everything as late as it may, without a word between host and device."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from deferred import require_same_calls
from random_cases import random_cases

from paddlenlp_galvatron.check.parity.parity import WORKER, Case, compare, write_cases
from paddlenlp_galvatron.launch.processes import launch
from paddlenlp_galvatron.plan import Precision, write_plan
from paddlenlp_galvatron.training.checkpoint.stored import whole_checkpoints

from . import plans, test_checkpoint, test_surface
from .covering import chosen

STEPS = 2  # of random plans


def deferring(folder: Path, seed: int) -> Callable[..., None]:
    """`launch`, under the deferred backend; `folder`: of the ranks' messages, of which none may be left."""
    folder.mkdir()

    def deferred(module: str, arguments: Sequence[str], nproc: int, log_folder: Path, timeout_s: float) -> None:
        messages = folder / str(len(list(folder.iterdir())))
        messages.mkdir()
        worker = Path(__file__).with_name("deferred_worker.py")
        launch(str(worker), [str(messages), str(seed), module, *arguments], nproc, log_folder, timeout_s)
        require_same_calls(messages, nproc)

    return deferred


def disagreements(folder: Path, cases: list[Case], seed: int) -> list[str]:
    results = folder / "results"
    results.mkdir()
    write_cases(results, cases)
    start = deferring(folder / "messages", seed)
    start(WORKER, [str(results)], cases[0].plan.world_size, folder / "log", timeout_s=580)
    return [
        f"case {number}: loss {result.max_loss_diff:.1e}, gradient {result.max_grad_rel_diff:.1e} "
        f"{result.worst_gradient}"
        for number, result in enumerate(compare(results, cases))
        if not result.agrees
    ]


@pytest.mark.parametrize("ranks", [2, 4])
def test_plans_train_as_one_process_does(tmp_path, ranks):
    _, late = chosen()
    assert not disagreements(tmp_path, [case.case() for case in late if case.plan.world_size == ranks], seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
def test_every_plan_trains_as_one_process_does(tmp_path, ranks):
    every = [case.case() for case in plans.EVERY if case.plan.world_size == ranks]
    assert not disagreements(tmp_path, every, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [4, 6, 8])
def test_random_plans_train_as_one_process_does(tmp_path, world_size):
    cases = random_cases(16, world_size, seed=3, steps=STEPS)
    cases += random_cases(4, world_size, seed=4, precision=Precision.BF16, steps=STEPS)
    assert not disagreements(tmp_path, cases, seed=2)


def evaluated(folder: Path, world: int, names: list[str]) -> dict:
    """As the reports of `test_surface`: trained, evaluated, saved and continued by the trainer."""
    (folder / "model.json").write_text(json.dumps(test_surface.MODEL))
    for name in names:
        of = test_surface.PLANS[world][name]
        write_plan(replace(of, assumed=replace(of.assumed, seq_length=16)), folder / f"{name}.json")
    words = [str(folder), *names]
    deferring(folder / "messages", 5)(f"{__package__}.surface_worker", words, world, folder / "log", timeout_s=580)
    return {
        (world, name): [
            json.loads((folder / f"{name}.{rank}.json").read_text()) | {"folder": folder} for rank in range(world)
        ]
        for name in names
    }


@pytest.mark.parametrize(
    ("world", "names"),
    [(2, ["layerwise"]), pytest.param(4, ["uniform", "layerwise", "stages"], marks=pytest.mark.slow)],
)
def test_evaluation_and_going_on_by_the_trainer(tmp_path, world, names):
    found = evaluated(tmp_path, world, names)
    for name in names:
        test_surface.test_a_saved_model_is_the_one_that_was_evaluated_and_a_run_continues(found, world, name)


@pytest.mark.slow
def test_checkpoints_of_any_plan_go_on_under_any_other(tmp_path, monkeypatch):
    monkeypatch.setattr(test_checkpoint, "launch", deferring(tmp_path / "messages", 6))
    first, second = tmp_path / "saved", tmp_path / "loaded"
    for folder in (first, second):
        folder.mkdir()
    jobs = [(name, "", test_checkpoint.BEFORE, test_checkpoint.AFTER) for name in test_checkpoint.SAVED]
    losses = test_checkpoint.run(first, [*test_checkpoint.SAVED.values()], jobs)
    saved = {name: whole_checkpoints(first / name)[0] for name in test_checkpoint.SAVED}
    test_checkpoint.test_any_plan_continues_where_another_stopped(second, (saved, losses), every=False)
