"""One rank: for each job, begin with the weights of a folder, train as the oracle did, and note logits and losses; and
for each job with adapters, train them as PEFT's and TRL's oracle did."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_models import FOLDER, TUNING, oracle_of, tuning_of

from paddlenlp_galvatron.model.preference import Preference
from paddlenlp_galvatron.plan import Plan, plan_from_dict
from paddlenlp_galvatron.runtime import vocabulary
from paddlenlp_galvatron.runtime.engine import Engine
from paddlenlp_galvatron.runtime.groups import Groups, run_as_rank, start_world
from paddlenlp_galvatron.runtime.lora import Tuned
from paddlenlp_galvatron.runtime.paddle_private import next_rate
from paddlenlp_galvatron.runtime.setup import ModelSetup
from paddlenlp_galvatron.training.checkpoint.adapters import AdapterFolder
from paddlenlp_galvatron.training.checkpoint.huggingface import read_shape
from paddlenlp_galvatron.training.checkpoint.loading import weights_from
from paddlenlp_galvatron.training.checkpoint.saving import Writer
from paddlenlp_galvatron.training.recipe import Recipe

seen: list[np.ndarray] = []  # this rank's columns of the logits, a micro-batch each


class Watched(vocabulary.CrossEntropy):
    """The loss over a split vocabulary, which never gathers the logits."""

    def losses(self, logits: Any, labels: Any) -> Any:
        seen.append(logits.numpy())
        return super().losses(logits, labels)


def main() -> None:
    vocabulary.CrossEntropy = Watched
    folder, groups = Path(sys.argv[1]), Groups(start_world()[0])
    for number, (name, weights, fields) in enumerate(json.loads((folder / "jobs.json").read_text())):
        shape, oracle = read_shape(FOLDER / name), oracle_of(name)
        source = weights_from(Path(weights), shape)
        plan = plan_from_dict(fields)
        engine = Engine(ModelSetup.of(plan, shape, oracle.seq_length, source=source), groups=groups)
        recipe = Recipe(**oracle.recipe)
        optimizer = recipe.build(engine.tensors, engine.decaying)
        writer, losses = Writer(folder / f"{number}", engine, keep=1), []
        for step, batch in enumerate(oracle.tokens):
            if step == len(oracle.tokens) - 1:
                writer.save(optimizer)
                writer.finish()
            losses.append(engine.forward_backward(batch))
            engine.update(optimizer, recipe.max_grad_norm)
            next_rate(optimizer)
            if step == 0 and seen:
                np.save(folder / f"{number}.{engine.rank}.npy", np.concatenate(seen))
        seen.clear()
        if engine.rank == 0:
            (folder / f"{number}.json").write_text(json.dumps(losses))
    for name, loss, fields in json.loads((folder / "tuning.json").read_text()):
        losses, metrics = tuned(name, loss, plan_from_dict(fields), groups)
        if groups.rank == 0:
            (folder / f"{name}.{loss}.json").write_text(json.dumps({"losses": losses, "metrics": metrics}))


def tuned(name: str, loss: str, plan: Plan, groups: Groups) -> tuple[list[float], dict[str, float]]:
    """Losses of all steps, and metrics of the first one. `loss`: of pairs; "": of tokens."""
    shape, oracle, tokens = read_shape(FOLDER / name), tuning_of(name), oracle_of(name).tokens
    factors = AdapterFolder(TUNING / name, shape)
    engine = Engine(
        ModelSetup.of(
            plan,
            shape,
            tokens.shape[-1] - 1,
            source=Tuned(weights_from(FOLDER / name, shape), factors),
            adapters=factors.adapters,
            preference=Preference(loss, oracle.beta) if loss else None,
        ),
        groups=groups,
    )
    batches, recipe, losses, metrics = list(tokens)[: len(oracle.losses[""])], Recipe(**oracle.recipe), [], {}
    if loss:
        pairs = oracle.rows(engine.seq_length)
        pairs.pairs[..., :2] = engine.answers(pairs)  # by the base, as TRL's reference
        batches = [pairs] * len(oracle.losses[loss])
    optimizer = recipe.build(engine.tensors, engine.decaying)
    for batch in batches:
        losses.append(engine.forward_backward(batch))
        metrics = metrics or engine.metrics
        engine.update(optimizer, recipe.max_grad_norm)
        next_rate(optimizer)
    return losses, metrics


if __name__ == "__main__":
    run_as_rank(main)
