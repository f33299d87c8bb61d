import json
from unittest.mock import Mock

import numpy as np
import pytest

from paddlenlp_galvatron.profiler.cluster.measure import HardwareProfiler, curves
from paddlenlp_galvatron.profiler.cluster.messages import MessagePoint, doubtful, measured
from paddlenlp_galvatron.profiler.cluster.summary import hardware_profile
from paddlenlp_galvatron.profiler.journal import Journal
from paddlenlp_galvatron.profiler.options import HardwareOptions, HardwarePart
from paddlenlp_galvatron.profiler.used import Used, note_used
from paddlenlp_galvatron.profiles import Collective, Fingerprint, MessageGroup
from paddlenlp_galvatron.runtime import device

PAIR = MessageGroup(Collective.ALL_REDUCE, 2)
SENDS = MessageGroup(Collective.SEND, 4)


def journal(**changed) -> Journal:
    laps = {
        MessagePoint(PAIR, 1.0, 0): [1.0, 1.0, 1.1],
        MessagePoint(PAIR, 1.0, 1): [1.1, 1.3],
        MessagePoint(PAIR, 1.0, 2): [1.2, 1.2, 1.2],
        MessagePoint(PAIR, 1.0, 3): [9.0, 9.0],
        MessagePoint(PAIR, 0.25, 0): [0.3, 0.3, 0.3],
        MessagePoint(PAIR, 8.0, 0): [8.0, 8.0, 8.0],
        MessagePoint(SENDS, 8.0, 0): [4.0, 4.0, 4.0],
    }
    known = {point.key: ms for point, ms in laps.items()}
    return Journal({**known, "overlap_coe 0": 1.2, "overlap_coe 1": 1.3, **changed})


def profile(known: Journal, link_gb_per_s: float | None = None):
    return hardware_profile(known, 1, 4, link_gb_per_s, Fingerprint(device="d"))


def test_a_point_of_the_journal_is_known_by_its_key():
    for point in (MessagePoint(PAIR, 1 / 64, 3), MessagePoint(MessageGroup(Collective.ALL_TO_ALL, 6, False), 32.0, 0)):
        assert MessagePoint.from_key(point.key) == point


def test_the_lower_quartile_of_turns_counts_and_the_largest_message_says_the_bandwidth():
    found = profile(journal())
    assert found.messages_ms[PAIR] == {0.25: 0.3, 1.0: pytest.approx((3.1 / 3 + 3 * 1.2) / 4), 8.0: 8.0}
    assert found.allreduce_mib_per_ms == {(2, True): 1.0}  # 8 MiB * 2 (2 - 1) / 2 in 8 ms
    assert found.p2p_mib_per_ms == {4: 2.0}
    assert found.overlap_coe == 1.25 and not found.overlap_by_kind
    assert found.meta.flags == {}
    assert found.meta.spread["allreduce_size_2_1MB_time"] == pytest.approx(0.175 / 1.2)
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


def test_what_cannot_be_is_flagged_and_doubted():
    fast = journal(**{MessagePoint(PAIR, 8.0, 0).key: [0.5, 0.5, 0.5]})
    assert "0.5 ms, but a smaller message takes 1.16 ms" in profile(fast).meta.flags["allreduce_size_2_8MB_time"]
    assert doubtful(measured(fast)[PAIR]) == {8.0}
    wide = journal(**{MessagePoint(PAIR, 8.0, 0).key: [8.0, 12.0, 16.0]})
    assert doubtful(measured(wide)[PAIR]) == {8.0}
    assert "2.1 GB/s, but the link carries 2" in profile(journal(), link_gb_per_s=2).meta.flags["pp_size_4"]
    assert profile(journal(), link_gb_per_s=3).meta.flags == {}


def test_files_have_what_was_measured_and_nothing_else(tmp_path):
    sends = Journal({MessagePoint(SENDS, 8.0, 0).key: [4.0]})
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
    found = curves(HardwareOptions(parts=(part,)), 12)
    assert {group.kind for group in found} == kinds
    for kind in kinds:
        sizes = [(group.size, group.consecutive) for group in found if group.kind == kind]
        strided = [] if kind == "p2p" else [(size, False) for size in (2, 3, 4, 6)]
        assert sorted(sizes) == sorted([(size, True) for size in (2, 3, 4, 6, 12)] + strided)
    limited = curves(HardwareOptions(parts=(part,), max_tp_deg=4, max_pp_deg=3), 12)
    largest = {HardwarePart.ALL_REDUCE: 12, HardwarePart.P2P: 3}.get(part, 4)
    assert max((group.size for group in limited), default=largest) == largest


@pytest.mark.parametrize(("ms_a_mib", "largest_mib"), [(10.0, 32.0), (250.0, 1.0), (0.1, 64.0)])
def test_behind_the_first_message_of_more_than_200_ms_none_is_larger(monkeypatch, ms_a_mib, largest_mib):
    options = HardwareOptions(parts=(HardwarePart.ALL_REDUCE, HardwarePart.P2P), end_mb=64)
    stopwatch = Mock(pinned=False, **{"is_late.return_value": False})
    stopwatch.together = lambda mib: np.full((3, 2), ms_a_mib * mib)  # [laps, ranks]
    for prepare in ("_collective", "_exchange"):
        monkeypatch.setattr(HardwareProfiler, prepare, lambda _, group, mib: mib)
    known = Journal()
    HardwareProfiler(options, 0, 2, stopwatch, Mock(), known).measure()
    assert max(measured(known)[PAIR]) == largest_mib
    for group in curves(options, 2):
        assert sum(ms_a_mib * mib > 200 for mib in measured(known)[group]) <= 1


def test_more_turns_are_measured_beside_those_that_are_known(monkeypatch):
    stopwatch = Mock(pinned=True, **{"is_late.return_value": False})
    stopwatch.together = lambda mib: np.full((3, 2), mib)
    for prepare in ("_collective", "_exchange"):
        monkeypatch.setattr(HardwareProfiler, prepare, lambda _, group, mib: mib)
    monkeypatch.setattr(HardwareProfiler, "_overlap", lambda _, kind: 1.1)
    known = Journal()
    for turns in (1, 2):
        options = HardwareOptions(nproc=2, end_mb=4, turns=turns)
        HardwareProfiler(options, 0, 2, stopwatch, Mock(), known).measure()
        assert {len(laps) for laps in measured(known)[PAIR].values()} == {turns}
        assert len(known.items("overlap_coe ")) == turns


def test_on_gpus_a_posted_receive_holds_some_of_what_passes_compute_with(monkeypatch):
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    monkeypatch.setattr(device, "multiprocessors", lambda: 132)
    monkeypatch.delenv("NCCL_MAX_P2P_NCHANNELS", raising=False)
    monkeypatch.setattr(HardwareProfiler, "_overlap", lambda _, kind: 1.1)
    known = journal()
    options = HardwareOptions(nproc=2, parts=(HardwarePart.OVERLAP,))
    stopwatch = Mock(pinned=False, **{"is_late.return_value": False})
    monkeypatch.setattr(device, "beside_mib", lambda: None)
    HardwareProfiler(options, 0, 2, stopwatch, Mock(), known).measure()
    assert profile(known).overlap_by_kind[Collective.SEND] == pytest.approx(132 / 128)


def test_what_a_gpu_holds_beside_tensors_is_counted_as_it_comes(monkeypatch, tmp_path):
    """By a driver that does not exist: others' 300 MiB, a context, communicators of four groups and of all ranks."""
    counts = iter([300.0, 800.0, 1300.0])
    monkeypatch.setattr(device, "beside_mib", lambda: next(counts))
    known, used = journal(), Used()
    note_used(known, "context_mib", used.more_mib())
    stopwatch = Mock(pinned=False, **{"is_late.return_value": False})
    options = HardwareOptions(nproc=2, parts=())
    HardwareProfiler(options, 0, 2, stopwatch, Mock(members=[(0, 1)] * 4), known, used).measure()
    paths = profile(known).save(tmp_path)
    [bandwidths] = [path for path in paths if path.name.startswith("allreduce")]
    told = json.loads(bandwidths.read_text())["galvatron"]
    assert (told["context_mib"], told["communicator_mib"]) == (500.0, 100.0)
    monkeypatch.setattr(device, "beside_mib", lambda: None)  # on CPU
    assert Used().more_mib() is None
