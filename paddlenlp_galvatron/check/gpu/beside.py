"""The part that measures what a GPU's products take beside messages, and what the driver counts beside tensors."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from unittest import mock

from ...launch.gpus import gpu_name, p2p_channels
from ...launch.processes import launch
from ...profiles.reserve import reserve_of
from .findings import Finding, Setting


def beside(setting: Setting) -> Iterator[Finding]:
    """Figures that the cost model prices: told, but for the memory, which a reserve is kept for."""
    if setting.ranks == 1:
        yield setting.left_out("messages", "they need 2 ranks or more")
        return
    words = [str(setting.folder)]
    with mock.patch.dict(os.environ, p2p_channels()):
        worker = f"{__package__}.beside_worker"
        launch(worker, words, setting.ranks, setting.folder, setting.launch_s, device=setting.device)
    ranks = [json.loads((setting.folder / f"{rank}.json").read_text()) for rank in range(setting.ranks)]
    alone, slowed = (max(rank[f"{name}_ms"] or 0.0 for rank in ranks) for name in ("alone", "beside"))
    told = f"{alone:.2f} ms alone, {slowed:.2f} ms beside it: {slowed / alone:.2f}"
    yield setting.found("products beside a posted receive", None, told)
    told = f"while both run, each takes {ranks[0]['overlap']:.2f} times as long (2: no overlap)"
    yield setting.found(f"products beside all-reduces of {ranks[0]['message_mib']} MiB", None, told)
    if None in (used := [rank["beside_mib"] for rank in ranks]):
        yield setting.left_out("memory that is not Paddle's", "nvidia-smi tells it, on GPUs alone")
        return
    yield setting.kept(max(used), reserve_of(gpu_name(), setting.ranks).having(ranks[0]["communicators"]))
