import json
from unittest.mock import Mock

import numpy as np
import pytest

from paddlenlp_galvatron.measure import messages
from paddlenlp_galvatron.measure.journal import Journal, Used, note_used
from paddlenlp_galvatron.measure.launcher import spread_notes
from paddlenlp_galvatron.measure.messages import HardwareProfiler, measured_groups, message_round, rounds_of
from paddlenlp_galvatron.measure.options import HardwareOptions, HardwarePart
from paddlenlp_galvatron.profiles import Collective, Fingerprint, MessageGroup, Meta
from paddlenlp_galvatron.runtime import device

PAIR = MessageGroup(Collective.ALL_REDUCE, 2)
SENDS = MessageGroup(Collective.SEND, 4)


def journal(**changed) -> Journal:
    rounds = {
        message_round(PAIR, 1.0, 0): [1.0, 1.0, 1.1],
        message_round(PAIR, 1.0, 1): [1.1, 1.3],
        message_round(PAIR, 1.0, 2): [1.2, 1.2, 1.2],
        message_round(PAIR, 1.0, 3): [9.0, 9.0],
        message_round(PAIR, 0.25, 0): [0.3, 0.3, 0.3],
        message_round(PAIR, 8.0, 0): [8.0, 8.0, 8.0],
        message_round(SENDS, 8.0, 0): [4.0, 4.0, 4.0],
    }
    return Journal({**rounds, "overlap_coe 0": 1.2, "overlap_coe 1": 1.3, **changed})


def profile(known: Journal, **options):
    return messages.hardware_profile(
        known, HardwareOptions(nproc=4, end_mb=8, **options), Meta(fingerprint=Fingerprint(device="d"))
    )


def test_a_message_is_known_by_its_key():
    strided = MessageGroup(Collective.ALL_TO_ALL, 6, False)
    for group, mib in ((PAIR, 1 / 64), (strided, 32.0)):
        assert rounds_of(Journal({message_round(group, mib, 3): [1.0]})) == {group: {mib: [[1.0]]}}


def test_the_lower_quartile_of_rounds_counts_and_the_largest_message_says_the_bandwidth():
    found = profile(journal())
    quartile = (3.1 / 3 + 3 * 1.2) / 4
    between = {2.0: quartile + (8 - quartile) / 7, 4.0: quartile + 3 * (8 - quartile) / 7}  # which Galvatron reads
    assert found.messages_ms[PAIR] == pytest.approx({0.25: 0.3, 1.0: quartile, 8.0: 8.0} | between)
    assert found.allreduce_mib_per_ms == {(2, True): 1.0, (2, False): 1.0}  # 8 MiB * 2 (2 - 1) / 2 in 8 ms
    assert found.p2p_mib_per_ms == {4: 2.0}
    assert found.overlap_coe == 1.25 and not found.overlap_by_kind
    assert found.meta.flags == {}
    assert found.meta.spread["allreduce_size_2_1MB_time"] == pytest.approx((3.15 - 1.1583) / 1.2, rel=1e-3)
    assert set(found.meta.spread) >= {
        "allreduce_size_2_consec_1",
        "pp_size_4",
        "overlap_coe",
        "allreduce_size_2_1MB_time",
    }


def test_kinds_of_collectives_have_overlaps_of_their_own_beside_galvatrons_one():
    found = profile(journal(**{"overlap_coe_allgather 0": 1.5, "overlap_coe_allgather 1": 1.7}))
    assert found.overlap_coe == 1.25
    assert found.overlap_by_kind == {Collective.ALL_GATHER: pytest.approx(1.6)}
    assert "overlap_coe_allgather" in found.meta.spread


def test_a_bandwidth_above_the_links_is_flagged_and_what_spreads_is_reported():
    fast = profile(journal(), link_gb_per_s=2)
    assert "2.1 GB/s, but the link carries 2" in fast.meta.flags["pp_size_4"]
    assert profile(journal(), link_gb_per_s=3).meta.flags == {}
    stated = " ".join(spread_notes(fast.meta))
    assert "pp_size_4: 2.1 GB/s" in stated and "1 of 7 numbers spread by more than 30%, such as allreduce_" in stated


def test_files_have_what_was_measured_and_nothing_else(tmp_path):
    sends = Journal({message_round(SENDS, 8.0, 0): [4.0]})
    assert {path.name for path in profile(sends).save(tmp_path)} == {
        "p2p_bandwidth_1nodes_4gpus_per_node.json",
        "sp_time_1nodes_4gpus_per_node.json",
    }


@pytest.mark.parametrize(
    ("part", "kinds"),
    [
        (HardwarePart.ALL_REDUCE, {"allreduce"}),
        (HardwarePart.P2P, {"p2p"}),
        (HardwarePart.ALL_REDUCE_SP, {"allreduce", "allgather", "reducescatter"}),
        (HardwarePart.ALL_TO_ALL, {"all2all"}),
        (HardwarePart.OVERLAP, set()),
    ],
)
def test_a_part_measures_its_kinds_on_every_group(part, kinds):
    options = HardwareOptions(nproc=12, parts=(part,))
    found = measured_groups(options, on_gpus=True)
    assert {group.kind for group in found} == kinds
    for kind in kinds:
        sizes = [(group.size, group.consecutive) for group in found if group.kind == kind]
        strided = [] if kind == "p2p" else [(size, False) for size in (2, 3, 4, 6)]
        assert sorted(sizes) == sorted([(size, True) for size in (2, 3, 4, 6, 12)] + strided)
    alike = measured_groups(options, on_gpus=False)  # CPU processes of one host
    assert alike == [group for group in found if group.consecutive]
    limited = measured_groups(HardwareOptions(nproc=12, parts=(part,), max_tp_deg=4, max_pp_deg=3), on_gpus=True)
    largest = {HardwarePart.ALL_REDUCE: 12, HardwarePart.P2P: 3}.get(part, 4)
    assert max((group.size for group in limited), default=largest) == largest


def scripted(monkeypatch, options, ms_of_mib, known=None):
    """A profiler of two ranks whose messages take the time that `ms_of_mib` gives."""
    stopwatch = Mock(**{"is_late.return_value": False})
    stopwatch.time_collective = lambda mib: np.full((3, 2), ms_of_mib(mib))  # [samples, ranks]
    for prepare in ("_collective", "_exchange"):
        monkeypatch.setattr(HardwareProfiler, prepare, lambda _, group, mib: mib)
    monkeypatch.setattr(HardwareProfiler, "_overlap", lambda _, kind: 1.1)
    profiler = HardwareProfiler(options, 0, stopwatch, Mock(), known or Journal())
    profiler.measure()
    return rounds_of(profiler.journal)


@pytest.mark.parametrize(("ms_a_mib", "largest_mib"), [(10.0, 4.0), (250.0, 1 / 4), (0.1, 64.0)])
def test_behind_the_first_message_that_takes_long_none_is_larger(monkeypatch, ms_a_mib, largest_mib):
    options = HardwareOptions(nproc=2, parts=(HardwarePart.ALL_REDUCE, HardwarePart.P2P), end_mb=64)
    for rounds in scripted(monkeypatch, options, lambda mib: ms_a_mib * mib).values():
        assert max(rounds) == largest_mib
        assert sum(ms_a_mib * mib > messages.LONGEST_MS for mib in rounds) <= 1


def test_sizes_rise_by_four_and_all_are_measured_where_asked(monkeypatch):
    parts = (HardwarePart.ALL_TO_ALL,)
    for adaptive, expected in (
        (True, [1 / 64, 1 / 16, 1 / 4, 1, 4, 32]),
        (False, [1 / 64, 1 / 16, 1 / 4, 1, 2, 4, 8, 16, 32]),
    ):
        options = HardwareOptions(nproc=2, parts=parts, end_mb=32, adaptive=adaptive)
        [rounds] = scripted(monkeypatch, options, lambda mib: 1 + mib).values()
        assert sorted(rounds) == expected
        assert {len(each) for each in rounds.values()} == {3}


def test_more_turns_are_measured_beside_those_that_are_known(monkeypatch):
    known = Journal()
    for turns in (1, 2):
        found = scripted(monkeypatch, HardwareOptions(nproc=2, end_mb=4, turns=turns), lambda mib: mib, known)
        assert {len(rounds) for rounds in found[PAIR].values()} == {turns}
        assert len(known.items("overlap_coe ")) == turns


def test_on_gpus_a_posted_receive_holds_some_of_what_passes_compute_with(monkeypatch):
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    monkeypatch.setattr(device, "multiprocessors", lambda: 132)
    monkeypatch.delenv("NCCL_MAX_P2P_NCHANNELS", raising=False)
    monkeypatch.setattr(HardwareProfiler, "_overlap", lambda _, kind: 1.1)
    known = journal()
    options = HardwareOptions(nproc=2, parts=(HardwarePart.OVERLAP,))
    stopwatch = Mock(**{"is_late.return_value": False})
    monkeypatch.setattr(device, "beside_mib", lambda: None)
    HardwareProfiler(options, 0, stopwatch, Mock(), known).measure()
    assert profile(known).overlap_by_kind[Collective.SEND] == pytest.approx(132 / 128)


def test_what_a_gpu_holds_beside_tensors_is_counted_as_it_comes(monkeypatch, tmp_path):
    """By a driver that does not exist: others' 300 MiB, a context, communicators of four groups and of all ranks."""
    counts = iter([300.0, 800.0, 1300.0])
    monkeypatch.setattr(device, "beside_mib", lambda: next(counts))
    known, used = journal(), Used()
    note_used(known, "context_mib", used.more_mib())
    stopwatch = Mock(**{"is_late.return_value": False})
    options = HardwareOptions(nproc=2, parts=())
    HardwareProfiler(options, 0, stopwatch, Mock(members=[(0, 1)] * 4), known, used).measure()
    paths = profile(known).save(tmp_path)
    [bandwidths] = [path for path in paths if path.name.startswith("allreduce")]
    reported = json.loads(bandwidths.read_text())["galvatron"]
    assert (reported["context_mib"], reported["communicator_mib"]) == (500.0, 100.0)
    monkeypatch.setattr(device, "beside_mib", lambda: None)  # on CPU
    assert Used().more_mib() is None
