"""Which instructions the processor lacks, by Linux's list."""

from __future__ import annotations

import platform

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
