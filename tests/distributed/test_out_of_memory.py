"""A run that ends for lack of memory says so, by the rank, and by what it had reached."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("paddle")

from paddlenlp_galvatron.runtime.launch import OutOfMemory, launch

TIMEOUT_S = 120
HELD_MIB = 130  # weights of either stage: half of 70 million, fp32


@pytest.mark.parametrize(("rank", "room_mib"), [(0, 100), (1, 300)], ids=["gradients", "moments"])
def test_a_rank_that_runs_out_is_named_with_what_it_had_reached(tmp_path, monkeypatch, rank, room_mib):
    tests = Path(__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{tests}:{tests.parent}")
    with pytest.raises(OutOfMemory, match=f"rank {rank} ran out of memory") as caught:
        launch(f"{__package__}.starved_worker", [str(rank), str(room_mib)], 2, tmp_path / "log", TIMEOUT_S)
    assert caught.value.rank == rank
    assert "ResourceExhausted" in str(caught.value)
    assert caught.value.peak_mib is not None
    assert HELD_MIB < caught.value.peak_mib < HELD_MIB + room_mib + 100
