"""Under any plan, a Hugging Face model gives the logits that transformers gives, trains as there, and comes back."""

import json
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("paddle")

from huggingface_models import FOLDER, NAMES, TOLERANCE, oracle_of, tuning_of

from paddlenlp_galvatron.check.parity.one_process import train_one_process
from paddlenlp_galvatron.launch.processes import launch
from paddlenlp_galvatron.model.preference import BY_TOKEN
from paddlenlp_galvatron.plan import Precision, load_model, plan_to_dict, write_plan
from paddlenlp_galvatron.training.checkpoint.convert import to_checkpoint, to_huggingface
from paddlenlp_galvatron.training.checkpoint.huggingface import read_shape
from paddlenlp_galvatron.training.checkpoint.loading import weights_from
from paddlenlp_galvatron.training.checkpoint.stored import open_checkpoint, whole_checkpoints
from paddlenlp_galvatron.training.data.source import RandomData
from paddlenlp_galvatron.training.recipe import Recipe
from paddlenlp_galvatron.training.step_log import read_log

from .plans import having, plan

# Every rank of the last stage holds a part of the vocabulary, so that together they have the logits.
PLANS = {
    "fewer kv heads than tp": plan(4, "1 4r 2", vocab="4"),
    "two stages, zero3 and Ulysses": plan(4, "1z 2u 2z", (1, 2), vocab="2z", micro_batches=4),
}
EXPERTS = dict(zip(PLANS, ("4 2x2 2z", "2 1x2 2"), strict=True))  # of models that have some
JOBS = [(name, source, of) for name in NAMES for source, of in zip(("directory", "checkpoint"), PLANS, strict=True)]
FIRST = [JOBS[2 * number + number % 2] for number in range(len(NAMES))]  # each model, by turns in either way
OTHERS = [job for job in JOBS if job not in FIRST]
# PEFT's adapters of each model by the loss of tokens, and each of TRL's losses of pairs with one of them; or the rest.
ADAPTED = ("llama3.2", "qwen2-tied", "qwen3")
TUNED = [(name, "") for name in (*ADAPTED, "qwen3_moe")]
TUNED += [(ADAPTED[number % 3], loss) for number, loss in enumerate(tuning_of("qwen3").losses) if loss]
EVERY = [(name, loss) for name in ADAPTED for loss in tuning_of(name).losses]
UNTUNED = [pair for pair in EVERY if pair not in TUNED]


def ignore(_: int) -> None:
    """Nobody watches."""


def planned(name: str, of: str) -> dict[str, Any]:
    shape = read_shape(FOLDER / name)
    return plan_to_dict(having(PLANS[of], EXPERTS[of], shape.dense_layers) if shape.experts else PLANS[of])


def trained(folder: Path, those: list[tuple[str, str, str]], tuned: list[tuple[str, str]]) -> None:
    """Writes the files of ranks, by the number of the job."""
    jobs = []
    for name, source, of in those:
        weights = FOLDER / name
        if source == "checkpoint":
            weights = folder / name
            to_checkpoint(FOLDER / name, read_shape(FOLDER / name), weights, ignore)
        jobs.append((name, str(weights), planned(name, of)))
    (folder / "jobs.json").write_text(json.dumps(jobs))
    adapted = [(*pair, planned(pair[0], of)) for pair, of in zip(tuned, cycle(PLANS))]
    (folder / "tuning.json").write_text(json.dumps(adapted))
    launch(f"{__package__}.pretrained_worker", [str(folder)], 4, folder / "log", timeout_s=600)


@pytest.mark.parametrize(
    ("jobs", "tuned"),
    [(FIRST, TUNED), pytest.param(OTHERS, UNTUNED, marks=pytest.mark.slow)],
    ids=["each model", "the other way"],
)
def test_logits_losses_and_trained_weights_are_those_of_transformers_peft_and_trl(tmp_path, jobs, tuned):
    trained(tmp_path, jobs, tuned)
    for name, loss in tuned:
        reported, oracle = json.loads((tmp_path / f"{name}.{loss}.json").read_text()), tuning_of(name)
        assert reported["losses"] == pytest.approx(oracle.losses[loss], abs=TOLERANCE), (name, loss)
        if loss not in ("", *BY_TOKEN):  # whose rewards are means
            assert reported["metrics"] == pytest.approx(oracle.metrics, abs=TOLERANCE), (name, loss)
    for number, (name, _, _) in enumerate(jobs):
        require_as_transformers(tmp_path, number, name)


def require_as_transformers(trained: Path, number: int, name: str) -> None:
    shape, oracle = read_shape(FOLDER / name), oracle_of(name)
    logits = np.concatenate([np.load(path) for path in sorted(trained.glob(f"{number}.*.npy"))], axis=1)
    expected = oracle.logits.reshape(-1, shape.vocab_size)
    assert logits.shape[0] == expected.shape[0] and not logits[:, shape.vocab_size :].any()
    assert np.abs(logits[:, : shape.vocab_size] - expected).max() < TOLERANCE
    losses = json.loads((trained / f"{number}.json").read_text())
    assert losses == pytest.approx(oracle.losses, abs=TOLERANCE), name
    # The checkpoint before the last step, as a Hugging Face model, continues to the last loss.
    checkpoint = open_checkpoint(whole_checkpoints(trained / f"{number}")[0])
    model = trained / f"{number}.model"
    to_huggingface(checkpoint, model, Precision.FP32, 10**9, None, ignore)
    assert load_model(model) == replace(checkpoint.shape, name=model.name)
    back, recipe = weights_from(model, shape), Recipe(**oracle.recipe)
    [(last, _)] = train_one_process(shape, oracle.seq_length, back, recipe, oracle.tokens[-1:])
    assert last == pytest.approx(oracle.losses[-1], abs=TOLERANCE)


def test_training_begins_with_what_load_names(galvatron, tmp_path):
    name = "qwen2-tied"
    folder, shape, path = FOLDER / name, read_shape(FOLDER / name), tmp_path / "plan.json"
    of = plan(2, "1 2 1", vocab="2")
    write_plan(replace(of, assumed=replace(of.assumed, seq_length=16)), path)
    words = ["train", path, "--model", folder, "--output_dir", tmp_path / "run", "--max_steps", 1, "--seed", 5]
    words += ["--input_dir", "random"]
    ran = galvatron(*words, "--load", FOLDER / "qwen2")
    assert ran.code == 2 and "tied_embeddings is False, but True in the model qwen2-tied" in ran.err
    assert not (tmp_path / "run" / "log").exists()  # nothing was started
    assert galvatron(*words, "--load", folder).code == 0
    batch = RandomData(shape.vocab_size, 16, of.global_batch, seed=5).batch(0)
    [(loss, _)] = train_one_process(shape, 16, weights_from(folder, shape), Recipe(), [batch])
    [first] = read_log(tmp_path / "run" / "train_log.jsonl")
    assert first["loss"] == pytest.approx(loss, abs=1e-5)
