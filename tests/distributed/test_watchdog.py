"""A rank that hangs ends by itself, names its operation, and the rank that it waits for is named."""

from pathlib import Path

import pytest

pytest.importorskip("paddle")

from paddlenlp_galvatron.launch import faults, status
from paddlenlp_galvatron.launch.processes import LaunchError, launch
from paddlenlp_galvatron.runtime import device, gradients

WORKER = Path(__file__).with_name("hanging_worker.py")
WHERE = "receive of ranks 0, 1 in step 4"


@pytest.mark.parametrize(
    ("who", "limit_s", "message"),
    [
        ("one", 3, "rank 1 did not come to the others, who wait for it"),
        ("both", 1, f"rank [01] lost another rank in {WHERE}: it has not ended within 1 s"),
    ],
)
def test_a_wait_without_end_is_named(tmp_path, monkeypatch, who, limit_s, message):
    monkeypatch.setattr(faults, "IDLE_S", 1.0)
    with pytest.raises(LaunchError, match=message):
        launch(str(WORKER), [who, str(limit_s)], 2, tmp_path, timeout_s=600)
    logs = [(tmp_path / f"workerlog.{rank}").read_text() for rank in (0, 1)]
    assert any(f"error: {WHERE} has not ended within {limit_s} s" in log for log in logs)  # the first to end ends both


def test_a_rank_that_reads_what_its_device_has_yet_to_receive_waits(monkeypatch):
    """It must not look as if it computed while others wait for it."""
    waits = []

    class Unfinished:
        def sqrt(self):
            return self

        def __float__(self):
            waits.append(status.longest_wait())
            return 0.0

    monkeypatch.setattr(gradients, "all_reduce", lambda *_: Unfinished())
    gradients.global_norm([], None)
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    monkeypatch.setattr(device.paddle.device, "synchronize", lambda: waits.append(status.longest_wait()))
    device.synchronize()
    assert len(waits) == 2 and all(waits)
