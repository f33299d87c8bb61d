"""A model's config.json, and YAML that only looks like options."""

from typing import Any

from small_model import GROUPED_MODEL

from .case import ESCAPES

MODEL: dict[str, Any] = GROUPED_MODEL | {"num_hidden_layers": 4, "vocab_size": 1001, "max_position_embeddings": 128}
MODEL |= {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "initializer_range": 0.02, "tie_word_embeddings": False}
MODEL |= {"attention_dropout": 0.0, "rope_parameters": {"rope_theta": 10000.0}}
UNIFORM = ("plan", "uniform", "--output", "plan.json")
KNOTS = [  # YAML that only looks plain
    "a: &a [x,x,x]\n" + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)},*{chr(97 + i)}]\n" for i in range(20)),
    "".join(f"key_{number}: {number}\n" for number in range(40_000)),
    "".join(f"key_{number}: {number}\n" for number in range(40_000)) + "key_7: 1\n",
    "pp_deg: [" + "[" * 100_000,
    "pp_deg: " + "{a: " * 100_000,
    "- " * 200_000,
    "pp_deg: [" + "1," * 400_000 + "1]",
    "pp_deg: 1" + ":1" * 400_000,
    "pp_deg: " + "1" * 900_000,
    "pp_deg: !!python/object/apply:os.system ['touch X']",
    "pp_deg: !!timestamp x",
    "pp_deg: !!bool x",
    "pp_deg: 2020-13-45",
    "pp_deg: 2020-01-01",
    "pp_deg: .nan\nchunks: .inf",
    'output: "\\ud800"',
    f"output: '{ESCAPES}'",
    'output: "\\e]0;x\\a"',
    "? [a]\n: b",
    "<<: {pp_deg: 1}",
    "a: {pp_deg: 1}\nb: {pp_deg: 2}",
    "--- 1\n--- 2",
    "%YAML 9.9\n---\na: b",
    "\t",
    "pp_deg: *unknown",
    "1: 2",
    "null: 1",
]
