"""A cluster whose link is known: two network namespaces with two ranks each."""

import json
import sys
from contextlib import ExitStack

import pytest
from small_model import GROUPED_MODEL
from two_nodes import ADDRESSES, two_nodes_or_skip

from paddlenlp_galvatron.profiles import (
    ComputationProfile,
    HardwareProfile,
    MemoryProfile,
    computation_name,
    memory_name,
)
from paddlenlp_galvatron.profiles.files import OVERLAP_NAME

pytest.importorskip("paddle")

PAYLOAD = 1448 / 1514  # of a full frame: 1500 bytes less IP and TCP headers, next to 14 of Ethernet
PORT = 29_571
BUSY = 0.2  # on a machine with other work; figures to distinguish differ by a factor of 2
START = "import sys; from paddlenlp_galvatron.cli.main import main; sys.exit(main())"


@pytest.mark.slow
@pytest.mark.parametrize(("mbit_per_s", "end_mb"), [(200, 4), (1000, 32)])
def test_bandwidths_are_those_of_the_link_and_report_inside_from_across(tmp_path, mbit_per_s, end_mb):
    (tmp_path / "hosts").write_text("".join(f"{address}\n" for address in ADDRESSES))
    (tmp_path / "model.json").write_text(json.dumps(GROUPED_MODEL))
    words = ["profile", "all", "--parts", "allreduce,p2p,overlap", "--nproc", "2", "--hostfile", tmp_path / "hosts"]
    words += ["--model", tmp_path / "model.json", "--seq_length", "32"]
    words += ["--master_port", PORT, "--output", tmp_path, "--end_mb", end_mb, "--budget_ms", "60"]
    with ExitStack() as stack:
        nodes = two_nodes_or_skip(stack, mbit_per_s)
        ranks = [node.start([sys.executable, "-c", START, *words]) for node in nodes]
        for process in ranks:
            stack.callback(process.kill)
        assert [process.wait(900) for process in ranks] == [0, 0]
    profile = HardwareProfile.load(2, 2, folder=tmp_path)
    link = mbit_per_s / 8 * 1e6 / 2**20 / 1e3 * PAYLOAD  # MiB/ms
    allreduce, p2p = profile.allreduce_mib_per_ms, profile.p2p_mib_per_ms
    # One edge each way of a ring over all ranks crosses the link; one each of two strided rings; so for two stages.
    assert allreduce[4, True] == pytest.approx(link, rel=BUSY)
    assert allreduce[2, False] == pytest.approx(link / 2, rel=BUSY)
    assert p2p[4] == pytest.approx(link, rel=BUSY)
    assert p2p[2] == pytest.approx(link / 2, rel=BUSY)
    assert allreduce[2, True] > 2 * link
    assert profile.overlap_coe >= 1
    assert "overlap_coe" in json.loads((tmp_path / OVERLAP_NAME).read_text())["galvatron"]["spread"]
    # The layers were measured by all four ranks, once by the node that writes.
    size = ("fp32", 64, 8)
    times = ComputationProfile.load(tmp_path / computation_name(*size), *size)
    memory = MemoryProfile.load(tmp_path / memory_name(*size), *size)
    assert {key.tp for key in times.passes} == {1, 2, 4}
    assert {each.meta.fingerprint.device_count for each in (profile, times, memory)} == {4}
