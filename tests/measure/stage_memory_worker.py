"""One of two ranks: MiB that a micro-batch keeps in a real stage over both, and in the part that stands for it."""

import gc
import json
import sys
from pathlib import Path

import numpy as np
import paddle.distributed as dist

from paddlenlp_galvatron.measure.part import Extent, MeasuredPart
from paddlenlp_galvatron.plan import Assumptions, LayerStrategy, ModelShape, Plan, VocabStrategy
from paddlenlp_galvatron.runtime import device
from paddlenlp_galvatron.runtime.engine import Engine
from paddlenlp_galvatron.runtime.setup import ModelSetup

SHAPE = ModelShape("small", "qwen2", 2, 64, 96, heads=8, kv_heads=4, vocab_size=250, max_position_embeddings=64)
SAMPLES, SEQ, TP = 2, 32, 2


def kept_mib(forward, backward) -> float:
    forward()
    backward()
    gc.collect()
    start = device.allocated_mib()
    forward()
    kept = device.allocated_mib() - start
    backward()
    return kept


def real(plan: Plan) -> float:
    engine = Engine(ModelSetup.of(plan, SHAPE, SEQ))
    (tokens,) = engine.stage.take(np.zeros((1, SAMPLES * SEQ), np.int64))
    out = []
    return kept_mib(lambda: out.append(engine.stage.forward(None, tokens, tokens)), lambda: out.pop().backward())


def alone(sequence_parallel: bool, recompute: bool) -> float:
    part = MeasuredPart(
        SHAPE,
        Assumptions(sequence_parallel, seq_length=SEQ),
        SAMPLES,
        Extent(SHAPE.layers, embedding=True, head=True),
        LayerStrategy(TP, recompute=recompute),
    )
    return kept_mib(part.forward, part.backward)


def main() -> None:
    results = []
    for sequence_parallel in (False, True):
        for recompute in (False, True):
            layers = (LayerStrategy(TP, recompute=recompute),) * SHAPE.layers
            assumed = Assumptions(sequence_parallel=sequence_parallel, seq_length=SEQ)
            plan = Plan(TP, SAMPLES, 1, (SHAPE.layers,), layers, VocabStrategy(TP), assumed=assumed)
            results.append((real(plan), alone(sequence_parallel, recompute)))
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
