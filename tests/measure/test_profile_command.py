import json

import pytest
from small_model import GROUPED_MODEL, MIXTURE_MODEL

from paddlenlp_galvatron.cli.main import main
from paddlenlp_galvatron.measure.messages import group_kinds
from paddlenlp_galvatron.model import load_model
from paddlenlp_galvatron.profiles import (
    Collective,
    ComputationProfile,
    HardwareProfile,
    MemoryProfile,
    MessageGroup,
    computation_name,
    memory_name,
)


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
