"""`galvatron profile`, up to where its ranks would start: by their arguments, and the objects that they build."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

from paddlenlp_galvatron.measure import launcher, model
from paddlenlp_galvatron.measure import messages as hardware
from paddlenlp_galvatron.measure.journal import Journal
from paddlenlp_galvatron.measure.messages import HardwareProfiler, measured_groups
from paddlenlp_galvatron.measure.options import HardwareOptions, ModelRun
from paddlenlp_galvatron.profiles import Collective, Fingerprint, MessageGroup, Meta

from .model import rows, write_model
from .row import Row, Seen, Values

DEVICE = Meta(fingerprint=Fingerprint(device="a device", device_count=1, driver="one", paddle="3"))


def prepare(folder: Path) -> None:
    write_model(folder)
    (folder / "options.json").write_text(json.dumps({"budget_ms": 7}))
    (folder / "hosts").write_text("127.0.0.1\n192.0.2.1\n")


def _as_rank(module: Any, argument: str, parts: tuple[str, ...]) -> dict[str, Any]:
    """The objects that a rank's `main` builds from its argument, by name: the arguments of everything that measures or
    writes."""
    built = {name: MagicMock(name=name) for name in parts}
    idle = {"start_world": lambda: (0, 1), "meta_of_rank": lambda *_, **__: DEVICE}
    idle |= {name: MagicMock(return_value=[]) for name in ("spread_notes", "report_note", "report_progress")}
    with patch.multiple(module, **built, **idle), patch.object(sys, "argv", ["", argument]):
        module.main()
    return {name: [_plain(call) for call in each.mock_calls if call[0] in ("", "open")] for name, each in built.items()}


def _plain(call: Any) -> list[str]:
    """The arguments of a call, but for those that are stood in for."""
    values = (*call.args, *call.kwargs.values())
    return [str(value) for value in values if type(value).__name__ not in ("MagicMock", "Mock", "Used")]


class ProfileSeen(Seen):
    @classmethod
    @contextmanager
    def watched(cls) -> Iterator[dict[str, Any]]:
        calls: dict[str, Any] = {}

        def run_ranks(module: str, arguments: str, options: Any, what: str) -> None:
            calls[module], calls["nodes"], calls["ranks"] = arguments, launcher._nodes(options), options.ranks_per_node

        with patch.object(launcher, "run_ranks", run_ranks):
            yield calls

    @property
    def options(self) -> HardwareOptions | None:
        return HardwareOptions.model_validate_json(self.calls["hardware"]) if "hardware" in self.calls else None

    @property
    def hardware(self) -> dict[str, Any] | None:
        """Objects that the ranks of a hardware profile build."""
        parts = ("Stopwatch", "Journal", "hardware_profile", "HardwareProfiler", "Groups")
        return _as_rank(hardware, self.calls["hardware"], parts) if self.options else None

    @property
    def messages(self) -> dict[str, Any] | None:
        """Kinds and sizes of groups, and the sizes of an all-gather's messages that are measured."""
        if self.options is None:
            return None
        options = self.options.model_copy(update={"nproc": 8, "num_nodes": 1})
        profiler = HardwareProfiler(options, 0, MagicMock(), MagicMock(), Journal())
        sizes: list[float] = []
        with patch.object(profiler, "_samples", lambda group, mib: sizes.append(mib) or [1.0]):
            profiler._measure_round(MessageGroup(Collective.ALL_GATHER, 2, True), 0)
        return {"groups": measured_groups(options, on_gpus=True), "sizes": sizes}

    @property
    def run(self) -> ModelRun | None:
        return ModelRun.model_validate_json(self.calls["model"]) if "model" in self.calls else None

    @property
    def shapes(self) -> dict[str, Any] | None:
        return {str(number): shape for number, shape in enumerate(self.run.shapes)} if self.run else None

    @property
    def model(self) -> dict[str, Any] | None:
        """Objects that the ranks of a model's profile build."""
        parts = ("Stopwatch", "Journal", "ComputationProfiler", "MemoryProfiler", "computation_profile")
        return _as_rank(model, self.calls["model"], parts) if self.run else None


NODES: Values = {"num_nodes": 2, "node_rank": 1, "master_addr": "127.0.0.2", "master_port": 2900}
LAUNCH = "python -m paddle.distributed.launch --nnodes 2 --nproc_per_node 3 --rank 1 --master 192.0.2.1:2900"


def run_rows(rank: str, turns: str) -> dict[str, Row]:
    """The options of every profile; `rank`: which module's ranks show it; `turns`: the place that shows how often."""
    return {
        "config": Row("options.json", f"{rank}.Journal"),
        "output": Row("mine", f"{rank}.Journal"),
        "num_nodes": Row(2, "calls.nodes", NODES),
        "num_gpus_per_node": Row(2, "calls.ranks"),
        "nproc": Row(2, "calls.ranks"),
        "node_rank": Row(1, "calls.nodes", NODES),
        "master_addr": Row("127.0.0.2", "calls.nodes", NODES),
        "master_port": Row(2900, "calls.nodes", NODES),
        "hostfile": Row("hosts", "calls.nodes", {"master_port": 2900, "node_rank": 1}),
        "launch": Row(LAUNCH, "calls.nodes"),
        "time_budget_s": Row(9, f"{rank}.Stopwatch"),
        "turns": Row(2, turns),
        "fresh": Row(1, f"{rank}.Journal"),
        "budget_ms": Row(7, f"{rank}.Journal"),
        "analytic": Row("a100", "files"),
        "json": Row(1, "out"),
    }


TYPES = {
    name: Row(value, "hardware.Journal") for name, value in (("mixed_precision", "bf16"), ("bf16", 1), ("fp16", 1))
}
HARDWARE = run_rows("hardware", "hardware.HardwareProfiler") | {
    **TYPES,
    "adaptive": Row(0, "messages.sizes"),
    "parts": Row("p2p", "messages.groups"),
    "start_mb": Row(4, "messages.sizes"),
    "end_mb": Row(4, "messages.sizes"),
    "scale": Row(8, "messages.sizes"),
    "max_tp_deg": Row(2, "messages.groups"),
    "max_pp_deg": Row(2, "messages.groups"),
    "link_gb_per_s": Row(9, "hardware.hardware_profile"),
    "envs": Row("NCCL_DEBUG=INFO", "environment"),
}
LENGTHS = {"profile_mode": "sequence", "profile_min_seq_length": 4, "profile_max_seq_length": 8}
LENGTHS |= {"profile_seq_length_step": 4, "seq_length": None}
BATCHES = {"profile_mode": "batch"}
POINTS = {
    **rows("shapes", "run.points"),
    "profile_mode": Row("batch", "run.points"),
    "profile_batch_size": Row(3, "run.points"),
    "profile_min_batch_size": Row(3, "run.points", BATCHES),
    "profile_max_batch_size": Row(3, "run.points", BATCHES),
    "profile_batch_size_step": Row(3, "run.points", BATCHES),
    "profile_seq_length_list": Row("4,8", "run.points"),
    "profile_min_seq_length": Row(4, "run.points", LENGTHS),
    "profile_max_seq_length": Row(8, "run.points", LENGTHS),
    "profile_seq_length_step": Row(4, "run.points", LENGTHS),
    "max_tp_deg": Row(2, "run.degrees"),
    **{name: replace(row, shows="run.options.precision") for name, row in TYPES.items()},
    "use_flash_attention": Row(1, "refusal"),
}
TIMED = {
    "adaptive": Row(0, "model.ComputationProfiler"),
    "profile_for": Row("galvatron", "model.ComputationProfiler"),
    "sequence_parallel": Row(1, "model.ComputationProfiler"),
}
WHOLE = "memory is measured at every length, by one rank"
KEPT = {
    "time_budget_s": Row(9, "model", idle=WHOLE),
    "turns": Row(2, "model", idle="memory is the same every time"),
    "adaptive": Row(0, "model", idle=WHOLE),
    "profile_for": Row("galvatron", "model", idle=WHOLE),
    "sequence_parallel": Row(1, "model.MemoryProfiler", idle="memory is measured with and without"),
}
OF_MODEL = run_rows("model", "model.ComputationProfiler") | POINTS
HARDWARE_AND_MODEL = {**OF_MODEL, **TIMED, **HARDWARE}
TABLES = {
    "profile computation": {**OF_MODEL, **TIMED},
    "profile memory": {**OF_MODEL, **KEPT},
    "profile model": {**OF_MODEL, **TIMED},
    "profile hardware": HARDWARE,
    "profile all": HARDWARE_AND_MODEL,
}
OF_A_MODEL = {"model_size": "model.json", "seq_length": 8}
BASES: dict[str, Values] = dict.fromkeys(TABLES, OF_A_MODEL) | {"profile hardware": {}}
SEEN = ProfileSeen
