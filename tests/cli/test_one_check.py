"""Every command that takes a plan and a model accepts and refuses the same pairs, with the same words."""

import json

import pytest

from paddlenlp_galvatron.cli.main import main
from paddlenlp_galvatron.model import config_of, load_model

NAME = "qwen2.5-0.5b"
PRICED = ("--device", "a100-80gb", "--memory_constraint", "60")
COMMANDS = {
    "check": ("plan", "check", "{}"),
    "explain": ("explain", "{}", *PRICED),
    "report": ("report", "{}", *PRICED, "-o", "page.html"),
    "dry run": ("train", "{}", "--dry_run", "--max_steps", "1"),
    "train": ("train", "{}", "--input_dir", "nowhere/at/all", "--max_steps", "1"),
}
MODELS = {
    "its own": {},
    "of another vocabulary": {"vocab_size": 32000},
    "of other layers": {"num_hidden_layers": 4},
    "of other heads": {"num_attention_heads": 7, "num_key_value_heads": 1},
    "wider": {"intermediate_size": 9728},
}


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """One that was searched, the same by hand, and one whose degrees suit few models."""
    folder = tmp_path_factory.mktemp("plans")
    path = folder / "searched.json"
    assert main(["search", NAME, "--device", "a100-80gb", "--gpus", "4", "--batch", "8", "-o", str(path)]) == 0
    fields = json.loads(path.read_text())
    del fields["galvatron"]["searched_from"]
    (folder / "by hand.json").write_text(json.dumps(fields))
    uniform = ["--world_size", "4", "--global_train_batch_size", "8", "--global_tp_deg", "2"]
    assert main(["plan", "uniform", NAME, *uniform, "-o", str(folder / "split.json")]) == 0
    for number, changed in enumerate(MODELS.values()):
        config = config_of(load_model(NAME)) | changed
        (folder / f"{number}.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("plan", ["searched", "by hand", "split"])
@pytest.mark.parametrize("model", MODELS)
def test_the_same_pairs_are_taken_with_the_same_words(plans, galvatron, tmp_path, plan, model):
    config = plans / f"{[*MODELS].index(model)}.json"
    stated = {}
    for name, words in COMMANDS.items():
        ran = galvatron(*(word.format(plans / f"{plan}.json") for word in words), "--model", config)
        faults = [line for line in ran.err.splitlines() if line.startswith("error: ")]
        if name == "train" and ran.code == 2 and "nowhere" in faults[0]:  # the pair was taken
            faults, ran = [], ran._replace(code=0)
        stated[name] = ran.code, faults
    code, faults = stated["check"]
    assert all(one == (code, faults) for one in stated.values()), stated
    if plan == "searched":
        assert code == (0 if model == "its own" else 2)
    assert code == (2 if faults else 0)
