"""An option of `galvatron profile` changes what the launched ranks measure, how long, or what they keep."""

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pytest

pytest.importorskip("paddle")

from small_model import MODEL

from paddlenlp_galvatron.measure import launcher, messages, model
from paddlenlp_galvatron.measure.journal import Journal
from paddlenlp_galvatron.measure.options import HardwareOptions, ModelRun
from paddlenlp_galvatron.profiles import Collective, Fingerprint, MessageGroup, Meta

DEVICE = Meta(fingerprint=Fingerprint(device="a device", device_count=1, driver="one", paddle="3"))
BUILT = {
    "hardware": (messages, ("Stopwatch", "Journal", "hardware_profile", "HardwareProfiler", "Groups")),
    "model": (model, ("Stopwatch", "Journal", "ComputationProfiler", "MemoryProfiler", "computation_profile")),
}


def built(kind: str, argument: str) -> dict[str, Any]:
    """The objects that a rank's `main` builds from its argument, with their arguments."""
    module, parts = BUILT[kind]
    stood_in = {name: MagicMock(name=name) for name in parts}
    idle: dict[str, Any] = {"start_world": lambda: (0, 1), "meta_of_rank": lambda *_, **__: DEVICE}
    idle |= {name: MagicMock(return_value=[]) for name in ("spread_notes", "report_note", "report_progress")}
    with patch.multiple(module, **stood_in, **idle), patch.object(sys, "argv", ["", argument]):
        module.main()
    return {name: [plain(call) for call in one.mock_calls if call[0] in ("", "open")] for name, one in stood_in.items()}


def plain(call: Any) -> list[str]:
    """The arguments of a call, but for those that are stood in for."""
    values = (*call.args, *call.kwargs.values())
    return [str(value) for value in values if type(value).__name__ not in ("MagicMock", "Mock", "Used")]


def measured(argument: str) -> Any:
    """Groups that are measured on 8 ranks, and the sizes of an all-gather's messages."""
    options = HardwareOptions.model_validate_json(argument).model_copy(update={"nproc": 8})
    profiler = messages.HardwareProfiler(options, 0, MagicMock(), MagicMock(), Journal())
    sizes: list[float] = []
    with patch.object(profiler, "_samples", lambda group, mib: sizes.append(mib) or [1.0]):
        profiler._measure_round(MessageGroup(Collective.ALL_GATHER, 2, True), 0)
    return messages.measured_groups(options, on_gpus=True), sizes


def points(argument: str) -> Any:
    run = ModelRun.model_validate_json(argument)
    return run.points, run.degrees, run.options.precision


VIEWS = {"hardware": built, "model": built, "groups": measured, "points": points}
LENGTHS = {"profile_mode": "sequence", "profile_min_seq_length": 4, "profile_max_seq_length": 16}
LENGTHS |= {"profile_seq_length_step": 4}
BATCHES = {"profile_mode": "batch"}
ROWS = [
    *(
        (kind, name, value, {})
        for kind in ("hardware", "model")
        for name, value in [
            *(("output", "mine"), ("time_budget_s", 9), ("turns", 2), ("fresh", 1), ("budget_ms", 7)),
            *(("mixed_precision", "bf16"), ("bf16", 1), ("fp16", 1)),
        ]
    ),
    ("hardware", "link_gb_per_s", 9, {}), ("model", "profile_for", "galvatron", {}), ("model", "adaptive", 0, {}),
    ("model", "sequence_parallel", 1, {}), ("groups", "parts", "p2p", {}), ("groups", "max_tp_deg", 2, {}),
    ("groups", "max_pp_deg", 2, {}), ("groups", "start_mb", 4, {}), ("groups", "end_mb", 4, {}),
    ("groups", "scale", 8, {}), ("groups", "adaptive", 0, {}), ("points", "profile_mode", "batch", {}),
    ("points", "profile_batch_size", 3, {}), ("points", "profile_min_batch_size", 3, BATCHES),
    ("points", "profile_max_batch_size", 3, BATCHES), ("points", "profile_batch_size_step", 3, BATCHES),
    ("points", "profile_seq_length_list", "4,8", {}), ("points", "profile_min_seq_length", 8, LENGTHS),
    ("points", "profile_max_seq_length", 8, LENGTHS), ("points", "profile_seq_length_step", 8, LENGTHS),
    ("points", "max_tp_deg", 2, {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("view", "name", "value", "context"), [pytest.param(*row, id=f"{row[0]} {row[1]}") for row in ROWS]
)
def test_an_option_of_a_profile_has_an_effect(view, name, value, context, galvatron, tmp_path, monkeypatch):
    Path("model.json").write_text(json.dumps(MODEL))
    kind = "hardware" if view in ("hardware", "groups") else "model"
    command = ["profile", "hardware"] if kind == "hardware" else ["profile", "computation", "model.json"]

    def shown(options: dict[str, Any]) -> Any:
        arguments: dict[str, str] = {}
        monkeypatch.setattr(launcher, "run_ranks", lambda module, argument, *_: arguments.update({module: argument}))
        assert galvatron(*command, *(f"--{option}={given}" for option, given in options.items())).code == 0
        look: Any = VIEWS[view]
        return look(kind, arguments[kind]) if look is built else look(arguments[kind])

    without = shown(context)
    assert shown(context) == without != shown(context | {name: value})
