"""One rank of the tests against the runtime: runs steps of every plan, writes down traffic and peak memory."""

import gc
import json
import sys
from pathlib import Path

import numpy as np
from cost_cases import SEQ, real_cases

from paddlenlp_galvatron.model.lora import Adapters
from paddlenlp_galvatron.runtime import collectives, device
from paddlenlp_galvatron.runtime.engine import Engine
from paddlenlp_galvatron.runtime.groups import Groups, start_world
from paddlenlp_galvatron.runtime.setup import ModelSetup
from paddlenlp_galvatron.training.recipe import Recipe

measured = []
rank = start_world()[0]
groups = Groups(rank)
for case in real_cases():
    gc.collect()
    before = device.allocated_mib()
    adapters = Adapters(case.adapter_rank, 1) if case.adapter_rank else None
    engine = Engine(ModelSetup.of(case.plan, case.shape, SEQ, adapters=adapters), groups=groups)
    optimizer = Recipe().build(engine.tensors, engine.decaying)
    batch = np.random.default_rng(0).integers(0, case.shape.vocab_size, (case.plan.global_batch, SEQ + 1))
    for _ in range(2):  # the first step makes the optimizer's states
        collectives.forget_traffic()
        device.reset_peak()
        engine.forward_backward(batch)
        engine.update(optimizer, 1.0)
    measured.append({"bytes": dict(collectives.traffic_bytes), "peak_mib": device.peak_mib() - before})
    del engine, optimizer
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(measured))
