import json
import os
from pathlib import Path

from paddlenlp_galvatron.launch.processes import launch


def test_a_part_alone_keeps_what_a_rank_of_the_real_stage_keeps(tmp_path, monkeypatch):
    """Plain tp and Megatron-SP, each with and without recompute, on two processes."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    launch("stage_memory_worker", [str(tmp_path / "kept.json")], 2, tmp_path / "log", timeout_s=600)
    results = json.loads((tmp_path / "kept.json").read_text())
    assert len(results) == 4
    for real_mib, alone_mib in results:
        assert real_mib == alone_mib > 0
