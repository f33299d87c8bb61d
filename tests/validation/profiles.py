"""Profile files of a small model on two ranks: memory as measured, times and bandwidths of no account."""

import json
from pathlib import Path
from typing import Any

from paddlenlp_galvatron.measure.journal import Journal
from paddlenlp_galvatron.measure.memory import MemoryProfiler
from paddlenlp_galvatron.plan import ModelShape, load_model
from paddlenlp_galvatron.profiles import ComputationProfile, HardwareProfile, Meta, Shape

SEQ, RANKS, SAMPLES = 32, 2, 8
CONFIG: dict[str, Any] = {
    "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 509, "max_position_embeddings": SEQ, "tie_word_embeddings": False,
}  # fmt: skip


def write(folder: Path, family: str, **changed: Any) -> ModelShape:
    """`config.json` and the profiles in `profiles/`."""
    (folder / "config.json").write_text(json.dumps({"model_type": family, **CONFIG, **changed}))
    shape = load_model(folder)
    HardwareProfile(1, RANKS, {(RANKS, True): 1.0}, {RANKS: 1.0}).save(folder / "profiles")
    point = {Shape(1, SEQ): 1.0}
    ComputationProfile("fp32", shape.hidden_size, shape.heads, {0: point}, point).save(folder / "profiles")
    profiler = MemoryProfiler([shape], Journal(), samples=SAMPLES)
    profiler.measure([SEQ], (1, 2), Meta(), lambda _: None).save(folder / "profiles")
    return shape
