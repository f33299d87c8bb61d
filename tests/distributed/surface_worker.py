"""One rank of a script of a PaddleNLP user: a callback that writes down all that it finds, on a data set of its own."""

import json
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import paddle.distributed as dist
from paddle.distributed import fleet
from paddle.distributed.fleet.base.topology import HybridCommunicateGroup
from paddlenlp.trainer import TrainerCallback

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.register import GalvatronTrainer, GalvatronTrainingArguments
from paddlenlp_galvatron.runtime.groups import run_as_rank

SAMPLES, EVALUATED, LENGTH, VOCABULARY = 32, 16, 16, 64  # samples, of which a batch has 8; tokens
QUESTIONS = [name for name in dir(HybridCommunicateGroup) if name.startswith("get_")]
READ = [
    "world_size", "process_index", "local_process_index", "tensor_parallel_degree", "sep_parallel_degree",
    "pipeline_parallel_degree", "sharding_parallel_degree", "data_parallel_degree", "tensor_parallel_rank",
    "pipeline_parallel_rank", "sharding_parallel_rank", "data_parallel_rank", "dataset_rank", "dataset_world_size",
    "train_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps", "eval_batch_size", "recompute",
    "should_save", "max_steps", "use_hybrid_parallel",
]  # fmt: skip


class Samples:
    """A user's data: numbered samples of random tokens, with labels."""

    def __init__(self, count: int = SAMPLES) -> None:
        tokens = np.random.default_rng(3).integers(VOCABULARY, size=(SAMPLES, LENGTH + 1))
        tokens[:, 1] = np.arange(SAMPLES)  # so that each can be recognized
        self.tokens = tokens[:count]
        self.read_ahead: list[int] = []  # by the thread that reads for the engine

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, number: int) -> dict[str, Any]:
        if threading.current_thread().name.startswith("data"):
            self.read_ahead.append(number)
        return {"input_ids": self.tokens[number, :-1], "labels": self.tokens[number, 1:].tolist()}


def asked(group: Any) -> dict[str, Any]:
    """Every answer of a hybrid communicate group, or how it is refused."""
    answers = {}
    for name in QUESTIONS:
        try:
            answers[name] = getattr(group, name)()
        except UserError as error:
            answers[name] = f"{type(error).__name__}: {error}"
    return answers


def refused(call: Any) -> str:
    try:
        call()
    except UserError as error:
        return str(error)
    return ""


class Finds(TrainerCallback):
    """Asks at every event, writes down all answers at the last step."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.found: dict[str, Any] = {}
        self.loaded: list[list[int]] = []

    def on_load_data_end(self, args, state, control, inputs, **_):
        self.loaded.append(inputs["input_ids"].numpy()[:, 1].tolist())

    def on_step_end(self, args, state, control, model, **_):
        if state.global_step < args.max_steps:
            return
        group = fleet.get_hybrid_communicate_group()
        self.found = {
            "whole": asked(group),
            "layers": [asked(group.of_layer(index)) for index in range(4)],
            "vocabulary": asked(group.of_vocabulary()),
            "numbers": [group.nranks, group.global_rank, group.stage_id, group.is_first_stage, group.is_last_stage],
            "args": {name: getattr(args, name) for name in READ},
            "sharding": [each.value for each in args.sharding],
            "described": len(str(args)) > 0 and len(args.to_sanitized_dict()) > 0,
            "parameters": {name: parameter.shape for name, parameter in model.named_parameters()},
            "keys": list(model.state_dict()),
        }
        self.found["model runs"] = refused(lambda: model(None))


def note(event: str) -> Any:
    received = getattr(Finds, event, None) if event in vars(Finds) else None

    def receive(self: Finds, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.events.append(event)
        fleet.get_hybrid_communicate_group().get_stage_id()
        if received:
            received(self, args, state, control, **given)

    return receive


for _event in [name for name in dir(TrainerCallback) if name.startswith("on_")]:
    setattr(Finds, _event, note(_event))


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    for name in names:
        finds, data, evaluated = Finds(), Samples(), Samples(EVALUATED)
        args = GalvatronTrainingArguments(
            output_dir=str(folder / name), galvatron_config_path=str(folder / f"{name}.json"), max_steps=4,
            save_steps=2, logging_steps=2, evaluation_strategy="steps", eval_steps=2, seed=5,
        )  # fmt: skip
        args.of_ones_own = name
        trainer = GalvatronTrainer(str(folder / "model.json"), args, train_dataset=data, eval_dataset=evaluated,
                                   callbacks=[finds])  # fmt: skip
        result = trainer.train()
        read_ahead = list(data.read_ahead)
        trainer.save_model(str(folder / f"{name}.model"))
        trainer.save_model()
        metrics = trainer.evaluate()
        again = GalvatronTrainer(str(folder / "model.json"), args, train_dataset=data, eval_dataset=evaluated)
        again.train(resume_from_checkpoint=str(folder / name / "checkpoints" / "step-00000002"))
        found = finds.found | {
            "events": finds.events, "loaded": finds.loaded, "read": read_ahead,
            "loss": result.training_loss,
            "evaluated": metrics["eval_loss"], "again": again.evaluate()["eval_loss"],
            "global_step": again.state.global_step, "own": trainer.args.of_ones_own,
        }  # fmt: skip
        rank = dist.get_rank() if dist.is_initialized() else 0
        (folder / f"{name}.{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    run_as_rank(main)
