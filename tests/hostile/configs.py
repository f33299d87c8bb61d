"""Models' config.json, and files of options in YAML and JSON."""

from __future__ import annotations

from random import Random
from typing import Any

from small_model import GROUPED_MODEL

from .case import Case
from .grammar import ESCAPES, damaged, dump, hostile_value, json_file

MODEL: dict[str, Any] = GROUPED_MODEL | {"num_hidden_layers": 4, "vocab_size": 1001, "max_position_embeddings": 128}
MODEL |= {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "initializer_range": 0.02, "tie_word_embeddings": False}
MODEL |= {"attention_dropout": 0.0, "rope_parameters": {"rope_theta": 10000.0}}
UNIFORM = ("plan", "uniform", "--output", "plan.json")
OPTIONS: dict[str, Any] = {"world_size": 4, "global_train_batch_size": 8, "pp_deg": 2, "chunks": 2, "sdp": 1}
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


def model(random: Random) -> Case:
    words = (*UNIFORM, "--model_size", "config.json", *(f"--{name}={value}" for name, value in OPTIONS.items()))
    return Case(words, {"config.json": json_file(MODEL, random)}, writes=("plan.json",))


def options_json(random: Random) -> Case:
    content = {"model_size": "model.json", **OPTIONS}
    files = {"options.json": json_file(content, random), "model.json": dump(MODEL).encode()}
    return Case((*UNIFORM, "--config", "options.json"), files, writes=("plan.json",))


def options_yaml(random: Random) -> Case:
    if random.random() < 0.3:
        text = random.choice(KNOTS)
    else:
        content = {"model_size": "model.json", **OPTIONS}
        content[random.choice([*content, "nonsense"])] = hostile_value(random)
        text = "".join(f"{name}: {dump(value)}\n" for name, value in content.items())
    files = {"options.yaml": damaged(text.encode(errors="surrogatepass"), random), "model.json": dump(MODEL).encode()}
    return Case((*UNIFORM, "--config", "options.yaml"), files, writes=("plan.json",))
