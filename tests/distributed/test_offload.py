"""With the optimizer's states and activations in the host's memory training is the same, bit for bit, and so are
checkpoints."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
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

LOW, WIDE = plan(1, "1 1"), plan(2, "1 2 1z", default=ZERO2)
TIED = plan(2, "1 1r 1 1", (1,) * 4, micro_batches=4, chunks=2)
SHORT = plan(2, "1 1r 1 1r 1 1", (3, 3), micro_batches=4)
STAGES = plan(4, "2 1z 2r 1", (2, 2), vocab="2", micro_batches=4, default=ZERO2)
STAGES = plans.Named("stages, tp, zero3", in_16_bits(STAGES), "qwen2")
ROUTED = having(plan(2, "1 2z 1", default=ZERO2), "2 1z 1x2")
small = partial(small_case, family="qwen2", optimizer="adamw")
QUICK = {  # with the first case checkpoints are exchanged
    "1 rank": {
        "bf16": small(in_16_bits(LOW)),
        "fp16, whose first step is left out": small(in_16_bits(LOW, Precision.FP16)),
        "LoRA": small(in_16_bits(LOW), lora_rank=2),
    },
    "2 ranks": {
        "bf16, zero2 and zero3": small(in_16_bits(WIDE)),
        "fp32, two chunks": small(TIED, tied=True),
        "experts": plans.Named("", in_16_bits(ROUTED), "qwen3_moe", "adamw").case(),
    },
}
MANY = {
    "many, 2 ranks": [*plans.TWO, *plans.EXPERTS_TWO, *plans.LATENT_TWO],
    "many, 4 ranks": [STAGES, *plans.ZERO, *plans.INTERLEAVED_FOUR, *plans.EXPERTS_FOUR],
    "many, 8 ranks": [*plans.EIGHT, *plans.INTERLEAVED_EIGHT, *plans.EXPERTS_EIGHT],
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


@pytest.mark.parametrize("cases", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in MANY)])
def test_training_is_equal_bit_for_bit_and_each_continues_from_the_others_checkpoint(tmp_path, cases):
    named = QUICK.get(cases) or {case.name: replace(case, optimizer="adamw").case() for case in MANY[cases]}
    reports = dict(zip(named, run(tmp_path, [*named.values()]), strict=True))
    assert [name for name, ranks in reports.items() if not all(all(rank["equal"]) for rank in ranks)] == []
    assert all(ranks[0]["left_out"] > 0 for name, ranks in reports.items() if "left out" in name)


@pytest.mark.slow  # on a busy machine the fake device may read a broadcast's length before it has come
@pytest.mark.started("Paddle looks for devices when it is imported")
@pytest.mark.parametrize("part, steps", [("offloaded", slice(1, None)), ("", slice(5, 8))])  # updates, or passes
def test_on_a_device_with_streams_states_leave_it_and_steps_neither_allocate_nor_wait(
    tmp_path, monkeypatch, part, steps
):
    """Copies run in streams of their own there, apart from kernels. The last three of four steps count, which the
    second engine runs with offload."""
    folder = fake_device.built()
    if folder is None:
        pytest.skip("needs the program g++, and Paddle 3.3")
    monkeypatch.setenv(fake_device.LIBRARIES, str(folder))
    monkeypatch.setenv(fake_device.FOLDER, str(tmp_path))
    case = small(WIDE if part else SHORT)
    [ranks] = run(tmp_path, [case], (FAKE, part, "offload_worker"))
    offloaded = replace(case.plan, assumed=replace(case.plan.assumed, offload_optimizer=True))
    for rank, report in enumerate(ranks):
        assert all(report["equal"])
        counts = json.loads((tmp_path / f"counts.{rank}.json").read_text())
        assert counts[steps] == [[0, 0, 0]] * len(counts[steps])
        assert report["activations_mib"] > 0
        assert report["moved_mib"] == pytest.approx(report["host_mib"] - PLACES_MIB, abs=0.1)
        assert report["host_mib"] == pytest.approx(offloaded_mib(offloaded, case.shape, 0), rel=0.02)
