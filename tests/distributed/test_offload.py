"""With the optimizer's states in the host's memory training is the same, bit for bit, and so are checkpoints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from paddlenlp_galvatron.check.parity.parity import Case, small_case, write_cases
from paddlenlp_galvatron.cost_model.weights import offloaded_mib
from paddlenlp_galvatron.launch.processes import launch
from paddlenlp_galvatron.plan import DataParallel, Precision

from . import fake_device, plans
from .plans import having, in_16_bits, plan

WORKER, FAKE = (str(Path(__file__).with_name(f"{name}_worker.py")) for name in ("offload", "fake"))
ZERO2 = DataParallel.ZERO2
PLACES_MIB = 2 * 3 * 999 * 4 / 2**20  # two places, three states, the worker's numbers of a part

# world size -> cases; with the first one checkpoints are exchanged.
QUICK = {
    1: {
        "bf16": small_case(in_16_bits(plan(1, "1 1")), "qwen2", "adamw"),
        "fp16, whose first step is left out": small_case(in_16_bits(plan(1, "1 1"), Precision.FP16), "llama", "adamw"),
        "LoRA": small_case(in_16_bits(plan(1, "1 1")), "qwen2", "adamw", lora_rank=2),
    },
    2: {
        "bf16, zero2 and zero3": small_case(in_16_bits(plan(2, "1 2 1z", default=ZERO2)), "qwen2", "adamw"),
        "fp32, two chunks": small_case(
            plan(2, "1 1r 1 1", (1, 1, 1, 1), micro_batches=4, chunks=2), "llama", "adamw", tied=True
        ),
    },
    4: {
        "bf16, tp, stages, zero3": small_case(
            in_16_bits(plan(4, "2 1z 2r 1", (2, 2), vocab="2", micro_batches=4, default=ZERO2)), "qwen2", "adamw"
        ),
        "experts": plans.Named(
            "", in_16_bits(having(plan(4, "1 2z 1", default=ZERO2), "4 2z 2x2")), "qwen3_moe", "adamw"
        ).case(),
    },
}
MANY = {
    world_size: {case.name: replace(case, optimizer="adamw").case() for case in cases}
    for world_size, cases in {
        2: [*plans.TWO, *plans.EXPERTS_TWO, *plans.LATENT_TWO],
        4: [*plans.ZERO, *plans.INTERLEAVED_FOUR, *plans.EXPERTS_FOUR],
        8: [*plans.EIGHT, *plans.INTERLEAVED_EIGHT, *plans.EXPERTS_EIGHT],
    }.items()
}


def run(folder: Path, cases: Sequence[Case], launcher: tuple[str, ...] = (WORKER,)) -> list[list[dict[str, object]]]:
    """Reports of each case, by rank."""
    write_cases(folder, cases)
    world_size = cases[0].plan.world_size
    launch(launcher[0], [*launcher[1:], str(folder)], world_size, folder / "log", timeout_s=580)
    ranks = range(world_size)
    return [
        [json.loads((folder / f"{index}.{rank}.json").read_text()) for rank in ranks] for index in range(len(cases))
    ]


@pytest.mark.parametrize(
    "cases",
    [
        *(pytest.param(cases, id=f"{size} ranks") for size, cases in QUICK.items()),
        *(pytest.param(cases, id=f"many, {size} ranks", marks=pytest.mark.slow) for size, cases in MANY.items()),
    ],
)
def test_training_is_equal_bit_for_bit_and_each_continues_from_the_others_checkpoint(tmp_path, cases):
    reports = dict(zip(cases, run(tmp_path, [*cases.values()]), strict=True))
    assert [name for name, ranks in reports.items() if not all(all(rank["equal"]) for rank in ranks)] == []
    assert all(
        (ranks[0]["left_out"] > 0) == (name.startswith("fp16")) for name, ranks in reports.items() if name in QUICK[1]
    )


@pytest.mark.started("Paddle looks for devices when it is imported")
def test_on_a_device_with_streams_states_leave_it_and_an_update_neither_allocates_nor_waits(tmp_path, monkeypatch):
    """Copies run in streams of their own there, apart from kernels."""
    folder = fake_device.built()
    if folder is None:
        pytest.skip("needs the program g++, and Paddle 3.3")
    monkeypatch.setenv(fake_device.LIBRARIES, str(folder))
    monkeypatch.setenv(fake_device.FOLDER, str(tmp_path))
    case = small_case(plan(2, "1 2 1z", default=ZERO2), "qwen2", "adamw")
    [ranks] = run(tmp_path, [case], (FAKE, "offloaded", "offload_worker"))
    for rank, report in enumerate(ranks):
        assert all(report["equal"])
        counts = json.loads((tmp_path / f"counts.{rank}.json").read_text())
        assert counts[1:] == [[0, 0, 0]] * (len(counts) - 1)
        assert report["moved_mib"] == pytest.approx(report["host_mib"] - PLACES_MIB, abs=0.1)
        prediction = offloaded_mib(
            replace(case.plan, assumed=replace(case.plan.assumed, offload_optimizer=True)), case.shape, 0
        )
        assert report["host_mib"] == pytest.approx(prediction, rel=0.02)
