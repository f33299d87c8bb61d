"""Profile files of a small cluster, and a log of nccl-tests."""

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from cost_examples import COMPUTATION, HARDWARE, MEMORY

SEARCH = {
    "model_size": "example.json", "num_nodes": 2, "num_gpus_per_node": 4, "memory_constraint": 8, "settle_bsz": 16,
    "settle_chunk": 2, "seq_length": 512, "max_pp_deg": 2, "effort": 1000, "output_config_path": "plan.json",
}  # fmt: skip
LOG = """# nThread 1 nGpus 1 minBytes 1048576 maxBytes 2097152 step: 2(factor) all_reduce_perf
# Using devices
#  Rank  0 Group  0 Pid   2748 on      host device  0 [0x01] NVIDIA H100
#  Rank  1 Group  0 Pid   2749 on      host device  1 [0x02] NVIDIA H100
     1048576        262144     float     sum      -1    52.43   20.00   20.00      0    52.43   20.00   20.00      0
     2097152        524288     float     sum      -1    104.9   20.00   20.00      0    104.9   20.00   20.00      0
"""


@cache
def sound() -> dict[str, Any]:
    """The content of each file of a small cluster's profiles, and of a data sheet."""
    with tempfile.TemporaryDirectory() as folder:
        for profile in (HARDWARE, COMPUTATION, MEMORY):
            profile.save(Path(folder))
        return {path.name: json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))}
