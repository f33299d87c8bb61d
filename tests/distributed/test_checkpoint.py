"""A checkpoint under one plan is the same training under every other, and whole or not at all."""

import json
from dataclasses import replace
from functools import partial
from itertools import cycle, product
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("paddle")

from paddlenlp_galvatron.check.parity.parity import Case, write_cases
from paddlenlp_galvatron.launch.processes import launch
from paddlenlp_galvatron.plan import DataParallel, ModelShape, Plan
from paddlenlp_galvatron.runtime.weights import WHOLE
from paddlenlp_galvatron.training.checkpoint.loading import StoredNumbers, WeightPiece
from paddlenlp_galvatron.training.checkpoint.stored import MOMENTS, WEIGHT, open_checkpoint, whole_checkpoints

from .plans import having as with_experts
from .plans import plan

SEQ = 16
SHAPE = ModelShape("tiny", "qwen2_moe", 4, 64, 96, 8, 4, 251, SEQ, experts=4, experts_per_token=2, expert_size=24)
SHAPE = replace(SHAPE, shared_size=96, dense_layers=(1,))
having = partial(with_experts, dense=SHAPE.dense_layers)
BEFORE, AFTER = 2, 2
SAVED = {
    "tp, Megatron-SP": having(plan(4, "2 4 1 1", vocab="4"), "4 2x2 1 2"),
    "zero3 with Ulysses": having(plan(4, "1zh2 2uz 4u 1", vocab="2z"), "2z 1zh2 1x4 4"),
    "two stages, zero2": having(
        plan(4, "1 2 1 1", (1, 3), vocab="2", micro_batches=4, default=DataParallel.ZERO2), "1 2 1x2 1z"
    ),
    "strided, plain tp": plan(4, "2s 4 2sz 2", megatron_sp=False),
    "two stages of two chunks": plan(4, "1 2z 2 1r", (1,) * 4, vocab="2", micro_batches=4, chunks=2),
}
GROWN = ("zero3 with Ulysses", "strided, plain tp")  # continue where two ranks have continued and saved
LOADED = {
    8: [having(plan(8, "8 2z 4u 2", vocab="8"), "4x2 2z 4 1x2"), plan(8, "1zh2 2 4 1", (1, 3), vocab="2z")],
    2: [
        plan(2, "1 1r 1 1", (2, 2), micro_batches=4),
        plan(2, "1 1r 1 1", (1,) * 4, micro_batches=4, chunks=2),
        having(plan(2, "1 2 1z 2u"), "2 1x2 1z 2"),
    ],
    1: [plan(1, "1 1 1 1")],
}


def case_of(of: Plan) -> Case:
    return Case(replace(of, assumed=replace(of.assumed, seq_length=SEQ)), SHAPE, "adamw")


def run(folder: Path, plans: list[Plan], jobs: list[tuple[str, str, int, int]]) -> dict[str, list[float]]:
    write_cases(folder, [case_of(of) for of in plans])
    (folder / "jobs.json").write_text(json.dumps(jobs))
    launch(f"{__package__}.checkpoint_worker", [str(folder)], plans[0].world_size, folder / "log", timeout_s=600)
    return {name: json.loads((folder / f"{name}.json").read_text()) for name, *_ in jobs}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[dict[str, Path], dict[str, list[float]]]:
    """Checkpoints by the plan's name, and the losses before and after."""
    folder = tmp_path_factory.mktemp("saved")
    losses = run(folder, list(SAVED.values()), [(name, "", BEFORE, AFTER) for name in SAVED])
    return {name: whole_checkpoints(folder / name)[0] for name in SAVED}, losses


def numbers(folder: Path) -> dict[str, np.ndarray]:
    """Every weight and its moments, whole and flat, in fp32."""
    checkpoint = open_checkpoint(folder, SHAPE)
    stored, found = StoredNumbers(checkpoint), {}
    shapes = {
        part.weight: part.shape for file in checkpoint.index.files for tensor in file.tensors for part in tensor.parts
    }
    for name, shape in shapes.items():
        for kind in (WEIGHT, *MOMENTS):
            array = found[f"{kind} of {name}"] = np.zeros(int(np.prod(shape)), np.float32)
            stored.fill_part(WeightPiece(name, shape, WHOLE, 0, array.size), kind, array)
    return found


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some pairs", "all pairs"])
def test_any_plan_continues_where_another_stopped(tmp_path, saved, every):
    folders, losses = saved
    on_two_ranks = {}
    for world_size, plans in LOADED.items():
        if world_size == 8 and not every:  # more ranks continue below, where two stopped
            continue
        pairs = list(product(SAVED, plans) if every else zip(SAVED, cycle(plans), strict=False))
        pairs = pairs if every or world_size > 1 else pairs[:1]  # two ranks read every checkpoint already
        jobs = [(f"{world_size}-{k}", str(folders[name]), 0, AFTER) for k, (name, _) in enumerate(pairs)]
        for (name, _), (job, after) in zip(pairs, run(tmp_path, [of for _, of in pairs], jobs).items(), strict=True):
            assert after == pytest.approx(losses[name][BEFORE:], abs=1e-5), (name, job)
            again = whole_checkpoints(tmp_path / job)[0]
            before, numbers_again = numbers(folders[name]), numbers(again)
            assert before.keys() == numbers_again.keys()
            assert all((before[key] == numbers_again[key]).all() for key in before), (name, job)
            on_two_ranks |= {name: again} if world_size == 2 else {}
    # The same plan continues bit for bit. So it does where other ranks or another number of chunks have come in
    # between.
    one, two = "two stages, zero2", "two stages of two chunks"
    went_on = [name for name in SAVED if every or name in GROWN]
    sources = [(on_two_ranks if name in GROWN else folders)[name] for name in went_on]
    jobs = [(f"same-{k}", str(source), 0, AFTER) for k, source in enumerate(sources)]
    plans = [SAVED[name] for name in went_on]
    turns = [(one, two), (two, one)][: 1 + every]
    for name, between in turns:
        there = f"{name}, there"
        jobs.append((there, str(folders[name]), 0, 0))
        jobs.append((f"{name}, back", str(tmp_path / there / folders[name].name), 0, AFTER))
        went_on += [there, name]
        plans += [SAVED[between], SAVED[name]]
    again = run(tmp_path, plans, jobs)
    for (job, after), name in zip(again.items(), went_on, strict=True):
        assert after == ([] if name == job else losses[name][BEFORE:]), job
    for name, _ in turns:
        before, there = (
            numbers(folder) for folder in (folders[name], tmp_path / f"{name}, there" / folders[name].name)
        )
        assert all((before[key] == there[key]).all() for key in before), name
