"""One rank of the traffic test: runs a step of every plan and writes down the bytes that its collectives took."""

import json
import sys
from pathlib import Path

from distributed.plans import FOUR, ZERO

from paddlenlp_galvatron.models import load_family
from paddlenlp_galvatron.runtime import collectives
from paddlenlp_galvatron.runtime.engine import Engine
from paddlenlp_galvatron.training.parity import batch_of, small_case

counted = []
for named in FOUR + ZERO:
    case = small_case(named.plan, named.family, tied=named.tied, kv_heads=named.kv_heads)
    engine = Engine(case.plan, case.shape, load_family(case.shape.family), case.seq_length)
    collectives.traffic_bytes.clear()
    engine.forward_backward(batch_of(case, 0))
    engine.updated()
    counted.append(dict(collectives.traffic_bytes))
Path(sys.argv[1], f"{engine.rank}.json").write_text(json.dumps(counted))
