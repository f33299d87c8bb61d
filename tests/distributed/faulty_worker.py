"""One rank of a training that goes wrong in its second step, on the rank and at the given place."""

import os
import signal
import sys
from typing import Any

import paddle

from paddlenlp_galvatron.check.parity.parity import batch_of, small_case
from paddlenlp_galvatron.runtime.engine import Engine
from paddlenlp_galvatron.runtime.groups import run_as_rank
from paddlenlp_galvatron.runtime.setup import ModelSetup

from .plans import plan

PLACES = ("forward", "backward", "p2p", "optimizer", "shape")


def dies(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def break_at(place: str, engine: Engine, optimizer: Any) -> None:
    """Let the engine's next step fail at a place."""
    pipeline, stage = engine._pipeline, engine.stage
    if place == "forward":
        stage.forward = dies  # type: ignore[method-assign]
    elif place == "backward":
        pipeline._backward = dies  # type: ignore[method-assign]
    elif place == "p2p":
        for link in pipeline._links:
            link.receive = dies  # type: ignore[method-assign]
    elif place == "optimizer":
        optimizer.step = dies
    elif place == "shape":
        stage.boundary_shape[0] += 1
        forward = stage.forward
        stage.forward = lambda x, *rest: forward(paddle.concat([x, x[:1]]), *rest)  # type: ignore[method-assign]


def main() -> None:
    place, rank = sys.argv[1], int(sys.argv[2])
    case = small_case(plan(4, "2 1z 2", (1, 2), vocab="2", micro_batches=4), "llama", "adamw")
    engine = Engine(ModelSetup.of(case.plan, case.shape, case.seq_length))
    optimizer = case.recipe.build(engine.tensors, engine.decaying)
    for step in range(2):
        if step == 1 and engine.rank == rank:
            break_at(place, engine, optimizer)
        engine.forward_backward(batch_of(case, step))
        engine.update(optimizer, 1.0)


if __name__ == "__main__":
    run_as_rank(main)
