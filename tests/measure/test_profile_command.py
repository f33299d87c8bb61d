import json
import sys
from contextlib import ExitStack

import pytest

pytest.importorskip("paddle")

from small_model import GROUPED_MODEL, MIXTURE_MODEL
from two_nodes import ADDRESSES, two_nodes_or_skip

from paddlenlp_galvatron.cli.main import main
from paddlenlp_galvatron.measure.messages import group_kinds
from paddlenlp_galvatron.model import load_model
from paddlenlp_galvatron.profiles import Collective, ComputationProfile, MemoryProfile
from paddlenlp_galvatron.profiles.files import OVERLAP_NAME, computation_name, memory_name
from paddlenlp_galvatron.profiles.hardware import HardwareProfile, MessageGroup


def test_groups_of_every_divisor_consecutive_and_strided():
    assert group_kinds(1) == []
    assert group_kinds(2) == [(2, True)]
    assert group_kinds(6) == [(2, True), (2, False), (3, True), (3, False), (6, True)]


def test_hardware_of_four_processes(tmp_path):
    words = ["profile", "hardware", "--nproc", "4", "--output", str(tmp_path)]
    assert main([*words, "--start-mb", "0.0625", "--end-mb", "0.0625", "--budget_ms", "0", "--turns", "2"]) == 0
    profile = HardwareProfile.load(1, 4, folder=tmp_path)
    assert set(profile.allreduce_mib_per_ms) == {(2, True), (2, False), (4, True)}
    assert set(profile.p2p_mib_per_ms) == {2, 4}
    assert set(profile.messages_ms) == {MessageGroup(kind, size) for kind in Collective for size in (2, 4)}
    for times in profile.messages_ms.values():
        # Behind one that takes long there is no larger one, which on a busy machine may be the first.
        assert {1 / 64} <= set(times) <= {1 / 64, 1 / 16}
        assert all(ms > 0 for ms in times.values())
    for kind in (MessageGroup(Collective.ALL_REDUCE, size) for size in (2, 4)):
        bus = profile.allreduce_mib_per_ms[kind.size, kind.consecutive]
        mib, ms = max(profile.messages_ms[kind].items())
        assert bus == pytest.approx(2 * (kind.size - 1) / kind.size * mib / ms)
    assert profile.overlap_coe >= 1
    assert profile.meta.fingerprint.device_count == 4
    assert set(profile.meta.spread) == {"allreduce_size_4_consec_1", "allreduce_size_2_consec_1"}


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "small.json"
    file.write_text(json.dumps(GROUPED_MODEL))
    return file


def test_a_model_with_experts_on_two_processes(tmp_path, config):
    config.write_text(json.dumps(MIXTURE_MODEL))
    words = ["profile", "model", "--model", str(config), "--nproc", "2", "--output", str(tmp_path / "out")]
    words += ["--profile_mode", "batch", "--profile_max_batch_size", "1", "--profile_fixed_seq_length_list", "32"]
    assert main([*words, "--budget_ms", "0"]) == 0
    size = ("fp32", 64, 8)
    times = ComputationProfile.load(tmp_path / "out" / computation_name(*size), *size)
    memory = MemoryProfile.load(tmp_path / "out" / memory_name(*size), *size)
    assert {(key.batch, key.seq, key.tp) for key in times.passes} == {(1, 32, tp) for tp in (1, 2)}
    assert times.experts.keys() == {1, 2}
    for experts in times.experts.values():
        assert min(experts.forward.of(4, 64), experts.backward.of(4, 64)) > 0
    dense = load_model(config).layer_parameters
    assert {layer.parameter_mib * 2**20 for table in memory.layers.values() for layer in table.values()} == {4 * dense}
    assert main(["profile", "hardware", "--analytic", "h100", "--nproc", "2", "--output", str(tmp_path / "out")]) == 0
    words = ["search", "--model", str(config), "--profiles", str(tmp_path / "out"), "--gpus", "2", "--batch", "8"]
    words += ["--seq_length", "32", "--mixed_precision", "fp32", "--memory_constraint", "4", "--allow_foreign_profiles"]
    assert main([*words, "-o", str(tmp_path / "plan.json")]) == 0 and (tmp_path / "plan.json").exists()
    for profile in (times, memory):
        assert profile.meta.fingerprint.device_count == 2
        assert profile.meta.fingerprint.dtype == "fp32"


def test_mistakes_end_with_exit_code_2(tmp_path, config, galvatron):
    words = ["profile", "model", "--model", config, "--output", tmp_path / "out"]
    for more, message in [
        (["--profile_seq_length_list", "65"], "beyond the 64 positions"),
        (["--profile_seq_length_list", "x"], "profile_seq_length_list"),
        (["--profile_mode", "all"], "profile_mode"),
        (["--use_flash_attn"], "use_flash_attn: Paddle has it on GPUs only"),
        (["--analytic", "b300"], "known: a100-40gb, a100-80gb"),
    ]:
        ran = galvatron(*words, *more)
        assert ran.code == 2 and message in ran.err
    assert not (tmp_path / "out").exists()


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
