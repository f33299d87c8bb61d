import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.profiles import Collective, HardwareProfile, MessageGroup
from paddlenlp_galvatron.profiles.nccl_tests import import_nccl_tests

MIB = 2**20
FACTOR = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "alltoall": 1.0}


def log(program: str, hosts: list[str], gb_per_s: float, *, old: bool = False, latency_us: float = 20) -> str:
    """The output of nccl-tests for ranks on these hosts whose bus bandwidth is `gb_per_s`, with a little latency."""
    size = len(hosts)
    lines = (
        []
        if old
        else ["# Collective test starting: " + f"{program}_perf", "# nccl-tests version 2.13 nccl-library=22605"]
    )
    lines += ["# nThread 1 nGpus 1 minBytes 1048576 maxBytes 1073741824 step: 4(factor)", "#", "# Using devices"]
    for rank, host in enumerate(hosts):
        group = "" if old else f"Group {rank // size:2d} Pid {1000 + rank:6d} "
        lines.append(f"#  Rank {rank:2d} {group}on {host:>10} device {rank % 8:2d} [0x07] NVIDIA H100 80GB HBM3")
    lines += [
        "#",
        "#                     out-of-place    in-place",
        "#       size    count   type  redop  root   time  algbw  busbw #wrong",
    ]
    factor = FACTOR.get(program, size / (size - 1)) * (size - 1) / size
    for power in range(0, 11, 2):
        size_bytes = MIB << power
        time_us = latency_us + factor * size_bytes / gb_per_s / 1e3
        bandwidth = size_bytes / time_us / 1e3
        redop = "sum" if program in ("all_reduce", "reduce_scatter") else "none"
        root = [] if old else ["-1"]
        half = [f"{time_us:.1f}", f"{bandwidth:.2f}", f"{bandwidth * factor:.2f}", "0"]
        lines.append("  ".join([f"{size_bytes:12d}", str(size_bytes // 4), "float", redop, *root, *half, *half]))
    return "\n".join([*lines, "# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 100.0"]) + "\n"


def written(folder, *logs: tuple[str, str]):
    for name, text in logs:
        (folder / name).write_text(text)
    return [folder / name for name, _ in logs]


A, B = ["node-a"], ["node-b"]


def test_logs_of_all_programs_become_the_files(tmp_path):
    paths = written(
        tmp_path,
        ("1", log("all_reduce", 8 * A + 8 * B, 90)),
        ("2", log("all_reduce", 8 * A, 360)),
        ("3", log("all_reduce", A + B, 45)),
        ("4", log("all_gather", 8 * A, 340)),
        ("5", log("reduce_scatter", 8 * A, 350)),
        ("6", log("alltoall", 8 * A, 300)),
        ("7", log("sendrecv", A + B, 40)),
    )
    profile = import_nccl_tests(paths, 2, 8)
    gb_per_s = 1e9 / MIB / 1e3
    expected = {(16, True): 90, (8, True): 360, (2, False): 45}
    assert set(profile.allreduce_mib_per_ms) == set(expected)
    for group, bandwidth in expected.items():
        assert profile.allreduce_mib_per_ms[group] == pytest.approx(bandwidth * gb_per_s, rel=0.01)
    assert profile.p2p_mib_per_ms[2] == pytest.approx(40 * gb_per_s, rel=0.01)
    times = profile.messages_ms[MessageGroup(Collective.ALL_TO_ALL, 8)]
    assert times[1024] == pytest.approx(0.02 + 7 / 8 * 1024 / (300 * gb_per_s), rel=0.01)
    profile.save(tmp_path / "out")
    assert HardwareProfile.load(2, 8, folder=tmp_path / "out").messages_ms == profile.messages_ms
    assert profile.meta.fingerprint.device == "NVIDIA H100 80GB HBM3"
    assert profile.meta.fingerprint.driver == "NCCL 22605"


def test_older_logs_are_recognized_by_the_name_of_the_file(tmp_path):
    text = log("all_reduce", 4 * A, 100, old=True)
    [path] = written(tmp_path, ("all_reduce_perf.4.txt", text))
    assert set(import_nccl_tests([path], 1, 8).allreduce_mib_per_ms) == {(4, True)}
    [path] = written(tmp_path, ("run.txt", text))
    with pytest.raises(UserError, match="does not say which program"):
        import_nccl_tests([path], 1, 8)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["all_reduce_perf\nnothing"], "no line '# Rank"),
        ([log("all_reduce", 4 * A, 100).split("# Using")[0] + "# Rank 0 on a device 0 [0] X"], "no row of results"),
        ([log("all_reduce", 4 * A, 100)] * 2, "earlier log"),
        ([log("all_reduce", 3 * A, 100)], "no group of 2 x 8"),
        ([log("all_reduce", 4 * A, 100), log("all_reduce", 8 * A, 100).replace("H100", "A100")], "different devices"),
        ([log("all_reduce", 4 * A, 100).replace("  sum  ", "  sum  7.0  ").replace("#wrong", "")], None),
        ([log("all_reduce", 4 * A, 100).replace("  0  ", "  0  1.0  ")], "not the columns"),
        ([log("all_reduce", 4 * A, 100).replace(str(MIB), "9" * 400)], "not the columns"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, texts, message):
    paths = written(tmp_path, *((f"log{number}", text) for number, text in enumerate(texts)))
    if message is None:
        assert import_nccl_tests(paths, 2, 8).allreduce_mib_per_ms  # columns are counted from the end
        return
    with pytest.raises(UserError, match=message):
        import_nccl_tests(paths, 2, 8)


PREFIXES = (
    "[1,0]<stdout>:",
    "[1,0]<stdout>: ",
    "0: ",
    " 0: ",
    "worker-0 | ",
    "job-master-0  | 0: ",
    "[pod/job-launcher-x7k2p/mpi] ",
    "2025-11-25T10:00:0{}.123456789Z ",
    "2025-11-25 10:00:0{} [1,0]<stdout>:",
    "[2025-11-25 10:00:0{}] ",
    "Nov 25 10:00:0{} node-a run[417]: ",
    "(worker-0) 0 ",
    "\x1b[36m0: \x1b[0m",
)
PROGRAMS = ("all_reduce", "all_gather", "reduce_scatter", "alltoall")


@given(st.sampled_from(PREFIXES), st.sampled_from(PROGRAMS), st.floats(5, 400), st.sampled_from(["\n", "\r\n"]))
def test_what_a_launcher_writes_in_front_is_passed_over(tmp_path_factory, prefix, program, gb_per_s, end):
    folder, text = tmp_path_factory.mktemp("logs"), log(program, 8 * A, gb_per_s)
    tagged = "".join(prefix.format(number % 10) + line + end for number, line in enumerate(text.splitlines()))
    plain, with_prefix = written(folder, ("plain", text), ("tagged", "\ufeff" + tagged))
    expected, found = (import_nccl_tests([path], 1, 8) for path in (plain, with_prefix))
    assert found.messages_ms == expected.messages_ms and found.meta.fingerprint == expected.meta.fingerprint


@given(
    st.sampled_from(PREFIXES),
    st.integers(0, 5),
    st.sampled_from([-1, -5]),
    st.sampled_from(["1", "12", "1e+06", "nan"]),
)
def test_wrong_elements_are_refused_wherever_they_stand(tmp_path_factory, prefix, row, place, count):
    lines = log("all_reduce", 8 * A, 100).splitlines()
    number = [index for index, line in enumerate(lines) if "float" in line][row]
    words = lines[number].split()
    words[place] = count
    lines[number] = "  ".join(words)
    [path] = written(tmp_path_factory.mktemp("logs"), ("log", "".join(f"{prefix}{line}\n" for line in lines)))
    with pytest.raises(UserError, match="#wrong is not 0"):
        import_nccl_tests([path], 1, 8)


def test_unchecked_results_and_the_errors_of_older_versions_are_read(tmp_path):
    text = log("all_reduce", 8 * A, 100)
    for word in ("N/A", "4e-07", "0e+00"):
        [path] = written(tmp_path, ("log", re.sub(r"  0(?=  |\n)", f"  {word}", text)))
        assert import_nccl_tests([path], 1, 8).allreduce_mib_per_ms


ONE = log("all_reduce", 8 * A, 100)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ONE.replace("values : 0 OK", "values : 48 FAILED"), "says 'Out of bounds values : 48 FAILED'; "),
        (ONE + "node-a: Test NCCL failure common.cu:958 'unhandled system error'\n", "says .Test NCCL failure"),
        (ONE + ".. node-a pid 2700: Test failure common.cu:1105\n", "says 'Test failure common.cu"),
        (ONE + log("all_gather", 8 * A, 100), "holds 2 runs of nccl-tests; give a file for each"),
        ("".join(f"[1,{rank}]<stdout>:{line}\n" for rank in range(3) for line in ONE.splitlines()), "holds 3 runs"),
        (ONE + ONE[ONE.index("     1048576") :], "1048576 bytes stand in several rows"),
        (json.dumps({"version": "2.17.6", "results": []}, indent=1), "is JSON; give the output of nccl-tests"),
    ],
)
def test_what_is_wrong_or_several_is_named(tmp_path, text, message):
    [path] = written(tmp_path, ("all_reduce_perf.log", text))
    with pytest.raises(UserError, match=message):
        import_nccl_tests([path], 1, 8)


def test_the_command_writes_the_files(tmp_path, galvatron):
    [path] = written(tmp_path, ("log", log("all_reduce", 8 * A, 360)))
    ran = galvatron("profile", "import-nccl-tests", path, "--output", tmp_path / "out")
    assert ran.code == 0 and "allreduce_bandwidth_1nodes_8gpus_per_node.json" in ran.out
    ran = galvatron("profile", "import-nccl-tests", tmp_path / "none")
    assert ran.code == 2 and "no such file" in ran.err
