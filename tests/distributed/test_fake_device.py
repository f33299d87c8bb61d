"""Plans train on a device whose streams run apart, and nothing waits for all of it in a pass after the first step.

Not proven here: Paddle computes by its CPU kernels, for each of which the host waits, so that nothing is known
of GPU kernels (`kernels.py` names them), nor of a host that runs ahead of its device; numbers are
of 32 bits; copies between host and device outside of a stream wait for nothing (`no_host_traffic.py` forbids them).
Plans of one stage have no receive that a wait could meet: there AdamW's states, made after the first step, may make the
second allocate once more.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from paddlenlp_galvatron.check.parity.parity import WORKER, compare, write_cases
from paddlenlp_galvatron.launch.processes import launch

from . import fake_device, plans

pytestmark = [pytest.mark.started("Paddle looks for devices when it is imported"), pytest.mark.slow]
WORKER_HERE = Path(__file__).with_name("fake_worker.py")
LIMIT_S = 300  # of a wait

TWO = [plans.TWO[1], plans.TWO[2], plans.INTERLEAVED_TWO[0]]
GPIPE = next(case for case in plans.EXPERTS_TWO if case.name == "experts: GPipe")
DENSE = [*plans.FOUR[:2], plans.FOUR[3], *plans.ZERO[2:4], plans.ZERO[5]]
CHUNKS = [plans.INTERLEAVED_FOUR[0], *plans.CONTEXT_FOUR[7:9]]
EXPERTS = [plans.EXPERTS_FOUR[4], *plans.EXPERTS_LATE[1:]]
LATENTS = [plans.LATENT_TWO[0], plans.LATENT_TWO[2], plans.LATENT_TWO[4]]


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """The device of all ranks, which find the modules of the tests."""
    folder = fake_device.built()
    if folder is None:
        pytest.skip("needs the program g++, and Paddle 3.3")
    monkeypatch.setenv(fake_device.LIBRARIES, str(folder))


def train(folder: Path, cases: Sequence[plans.Named], monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """The calls of each rank to its device in the passes of each step. Raises where a plan does not train as one
    process does."""
    mailboxes, results = folder / "mailboxes", folder / "results"
    mailboxes.mkdir()
    results.mkdir()
    monkeypatch.setenv(fake_device.FOLDER, str(mailboxes))
    monkeypatch.setenv(fake_device.LIMIT, str(LIMIT_S))
    small = [case.case() for case in cases]
    write_cases(results, small)
    world = small[0].plan.world_size
    launch(str(WORKER_HERE), ["", WORKER, str(results)], world, folder / "log", timeout_s=580)
    wrong = [case.name for case, result in zip(cases, compare(results, small), strict=True) if not result.agrees]
    assert not wrong
    counts = [json.loads((mailboxes / f"counts.{rank}.json").read_text()) for rank in range(world)]
    steps = [step for case in small for step in range(case.steps)]
    return [[count for step, count in zip(steps, of_rank, strict=True) if step] for of_rank in counts]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(TWO, id="2 ranks"),
        pytest.param([*plans.INTERLEAVED_TWO, GPIPE], id="2 ranks, experts and chunks"),
        pytest.param(DENSE, id="4 ranks"),
        pytest.param(CHUNKS, id="4 ranks, chunks and context"),
        pytest.param(EXPERTS, id="4 ranks, experts"),
        pytest.param(LATENTS, id="2 ranks, latents"),
    ],
)
def test_after_the_first_step_no_pass_allocates_frees_or_waits_for_the_device(tmp_path, cases, monkeypatch):
    for counts in train(tmp_path, cases, monkeypatch):
        assert counts and not any(map(any, counts)), counts
