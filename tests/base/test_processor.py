"""Which instructions the processor lacks, by Linux's list."""

import os
import platform
from pathlib import Path

import pytest

from paddlenlp_galvatron.base import processor

LIST = "processor\t: 0\nvendor_id\t: GenuineIntel\nflags\t\t: fpu sse2 {}\nvmx flags\t: avx512f\n"


@pytest.mark.parametrize(
    ("machine", "flags", "lacks"),
    [
        ("x86_64", "avx avx2 fma avx512f", False),
        ("x86_64", "avx avx2 fma", True),
        ("AMD64", "avx512fp16x", True),  # no word of its own
        ("x86_64", None, True),  # nothing says
        ("aarch64", None, False),
        ("aarch64", "", False),
    ],
)
def test_avx512_is_lacking_where_an_x86_does_not_list_it(tmp_path, monkeypatch, machine, flags, lacks):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    if flags is not None:
        processor.CPUINFO.write_text(LIST.format(flags))
    assert processor.lacks(processor.AVX512) is lacks


V1 = "3:cpuset:/\n2:cpu,cpuacct:/docker/7\n0::/\n"


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        pytest.param("0::/\n", {"cpu.max": "400000 100000\n"}, 4, id="a container of version 2"),
        pytest.param("0::/a/b\n", {"a/cpu.max": "250000 100000", "a/b/cpu.max": "max 100000"}, 2, id="a group above"),
        pytest.param("0::/a\n", {"a/cpu.max": "50000 100000"}, 1, id="half a core"),
        pytest.param("0::/\n", {"cpu.max": "9900000 100000"}, 64, id="a quota of more than all"),
        pytest.param("0::/\n", {"cpu.max": "max 100000"}, 64, id="no quota"),
        pytest.param(V1, {"cpu,cpuacct/cpu.cfs_quota_us": "300000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 3,
                     id="a container of version 1, which sees its group as the root"),
        pytest.param(V1, {"cpu,cpuacct/docker/7/cpu.cfs_quota_us": "-1", "cpu,cpuacct/docker/7/cpu.cfs_period_us": "9"},
                     64, id="version 1, no quota"),
        pytest.param(V1, {}, 64, id="nothing mounted"),
        pytest.param(None, {"cpu.max": "400000 100000"}, 64, id="no cgroups"),
    ],
)  # fmt: skip
def test_cores_are_those_of_the_quota(tmp_path, monkeypatch, own, files, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    monkeypatch.setattr(processor, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(processor, "CGROUPS", tmp_path / "groups")
    if own is not None:
        (tmp_path / "cgroup").write_text(own)
    for name, text in files.items():
        path: Path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert processor.cores() == cores
