"""One rank of a comparison with PaddleNLP's Trainer: `python -m runtime_worker JOB.json RESULT.json`, rank 0 writes.

Both sides train the same model from the same weights on the same batches, live in the same processes and take turns
step by step, so that other work on the machine meets both; a step is timed between two barriers, on rank 0.
PaddleNLP's Trainer does not run on CPU by itself: `runtime_stock.py` replaces the features that gloo lacks, by the same
transport that our runtime uses. tests/distributed/step_speed.py and `galvatron gpu-check` start it.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import paddle
import paddle.distributed as dist
from numpy.typing import NDArray
from pydantic import TypeAdapter
from runtime_stock import StepCallback, StockTrainer, build_model, complete_gloo, trainer_arguments

from paddlenlp_galvatron.plan import ModelShape, Plan, plan_from_dict
from paddlenlp_galvatron.runtime import device
from paddlenlp_galvatron.runtime.engine import Engine
from paddlenlp_galvatron.runtime.groups import run_as_rank, world_from_environment
from paddlenlp_galvatron.runtime.paddle_private import next_rate
from paddlenlp_galvatron.runtime.setup import ModelSetup
from paddlenlp_galvatron.runtime.weights import SeededWeights
from paddlenlp_galvatron.training.recipe import Recipe

SEED = 0


@dataclass
class Clock:
    """Steps that all ranks begin and end together. `with clock:` times one."""

    steps_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)  # processor time of this rank, without waiting

    def __enter__(self) -> None:
        _meet()
        self._start, self._cpu_start = time.perf_counter(), time.process_time()

    def __exit__(self, *_: object) -> None:
        self.cpu_ms.append((time.process_time() - self._cpu_start) * 1e3)
        _meet()
        self.steps_ms.append((time.perf_counter() - self._start) * 1e3)


def _meet() -> None:
    device.synchronize()
    if dist.is_initialized():
        dist.barrier()


class Ours:
    """This package's training, step by step."""

    def __init__(self, plan: Plan, shape: ModelShape, recipe: Recipe, batches: list[NDArray[np.int64]]):
        seq_length = plan.assumed.seq_length or 0
        source = SeededWeights(SEED, shape.initializer_range)
        self._engine = Engine(ModelSetup.of(plan, shape, seq_length, source=source))
        self._optimizer = recipe.build(self._engine.tensors, self._engine.decaying)
        self._max_grad_norm = recipe.max_grad_norm
        self._batches = iter(batches)
        self._losses: list[float] = []

    def step(self) -> None:
        self._losses.append(self._engine.forward_backward(next(self._batches)))
        self._engine.update(self._optimizer, self._max_grad_norm)
        next_rate(self._optimizer)

    def losses(self) -> list[float]:
        return self._losses


class Side(TypedDict):
    """One side's steps: losses, milliseconds, and processor milliseconds summed over ranks."""

    losses: list[float]
    steps_ms: list[float]
    cpu_ms: list[float]


def side(losses: list[float], clock: Clock) -> Side:
    cpu = paddle.to_tensor(clock.cpu_ms, "float32")
    if dist.is_initialized():
        dist.all_reduce(cpu)
    return Side(losses=losses, steps_ms=clock.steps_ms, cpu_ms=[float(ms) for ms in cpu])


def with_stock(job: Job, clocks: tuple[Clock, Clock]) -> tuple[list[float], list[float]]:
    """Losses of our runtime and of PaddleNLP's Trainer; our steps run inside its loop."""
    complete_gloo()
    arguments = trainer_arguments(job.plan, job.recipe, len(job.batches))
    source = SeededWeights(SEED, job.shape.initializer_range)
    model = build_model(job.shape, arguments, source)
    ours = Ours(job.plan, job.shape, job.recipe, job.batches)

    def after() -> None:
        clocks[1].__exit__()
        with clocks[0]:
            ours.step()

    callback = StepCallback(clocks[1].__enter__, after)
    trainer = StockTrainer(job.batches, job.plan, model=model, args=arguments, callbacks=[callback])
    trainer.train()
    return ours.losses(), trainer.losses()


@dataclass(frozen=True)
class Job:
    """A request."""

    plan: Plan
    shape: ModelShape
    recipe: Recipe
    batches: list[NDArray[np.int64]]

    @staticmethod
    def of(content: dict[str, Any]) -> Job:
        plan, shape = plan_from_dict(content["plan"]), TypeAdapter(ModelShape).validate_python(content["shape"])
        random = np.random.default_rng(SEED)
        size = (plan.global_batch, (plan.assumed.seq_length or 0) + 1)
        batches = [random.integers(0, shape.vocab_size, size) for _ in range(content["steps"])]
        return Job(plan, shape, Recipe(**content["recipe"]), batches)


def main() -> None:
    content = json.loads(Path(sys.argv[1]).read_text())
    clocks = Clock(), Clock()
    losses = with_stock(Job.of(content), clocks)
    result = {name: side(of, clock) for name, of, clock in zip(("ours", "other"), losses, clocks, strict=True)}
    if world_from_environment()[0] == 0:
        Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    run_as_rank(main)
