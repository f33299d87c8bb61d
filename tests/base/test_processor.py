"""Which instructions the processor lacks: by Linux's list, and by a child that tries an operator."""

from __future__ import annotations

import os
import platform
import signal

import pytest
from operators import CRASHES, require

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


@pytest.mark.parametrize("number", CRASHES)
def test_an_operator_that_crashes_skips_its_test_and_ends_no_other_process(number):
    with pytest.raises(pytest.skip.Exception, match=f"norm ends its process with {number.name} on this processor"):
        require("norm", lambda: os.kill(os.getpid(), number))


def test_an_operator_that_raises_is_left_to_its_test():
    require("norm", lambda: os.strerror("none"))
    require("norm", lambda: signal.strsignal(signal.SIGILL))
