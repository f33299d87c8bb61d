"""The cost model's bytes are the runtime's: counted while real processes run a step of each plan."""

import json
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("paddle")

from distributed.plans import FOUR, ZERO

from paddlenlp_galvatron.cost_model import step_traffic_bytes
from paddlenlp_galvatron.runtime.launch import launch
from paddlenlp_galvatron.training.parity import small_case

RANKS = 4
LOSS_BYTES = 4 * RANKS  # the loss itself, an fp32 scalar a rank


@pytest.mark.slow
def test_bytes_by_collective_are_those_of_the_runtime(tmp_path, monkeypatch):
    here = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", f"{here}:{here.parent}:{here.parents[1]}")
    launch("traffic_worker", [str(tmp_path)], RANKS, tmp_path, timeout_s=300)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    wrong = []
    for index, named in enumerate(FOUR + ZERO):
        case = small_case(named.plan, named.family, tied=named.tied, kv_heads=named.kv_heads)
        counted = sum((Counter(rank[index]) for rank in ranks), Counter())
        counted["all_reduce"] -= LOSS_BYTES
        predicted = step_traffic_bytes(case.plan, case.shape)
        if +counted != predicted:
            wrong.append(f"{named.name}: counted {dict(counted)}, predicted {predicted}")
    assert not wrong, "\n".join(wrong)
