"""Plans and models for tests: examples, and hypothesis strategies."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st

from paddlenlp_galvatron.plan import (
    Assumptions,
    DataParallel,
    LayerStrategy,
    ModelShape,
    Plan,
    Precision,
    Schedule,
    VocabStrategy,
)

MODEL = ModelShape(
    name="small",
    family="qwen2",
    layers=4,
    hidden_size=64,
    intermediate_size=96,
    heads=8,
    kv_heads=4,
    vocab_size=1001,
    max_position_embeddings=128,
)


def plan_fields(**changed: Any) -> dict[str, Any]:
    """A valid strategy file for 8 ranks and the layers of MODEL; a field changed to `...` is left out."""
    fields: dict[str, Any] = {
        "pp_deg": 2,
        "tp_sizes_enc": "2,2,4,1",
        "tp_consecutive_flags": "1,1,1,1",
        "dp_types_enc": "0,1,0,0",
        "use_sp": "0,0,1,0",
        "checkpoint": "1,0,0,0",
        "global_bsz": 16,
        "chunks": 2,
        "pp_division": "2,2",
        "pipeline_type": "pipedream_flush",
        "default_dp_type": "ddp",
        "vtp": 2,
        "vsp": 0,
        "embed_sdp": 0,
        "world_size": 8,
    }
    return {name: value for name, value in (fields | changed).items() if value is not ...}


@st.composite
def valid_plans(draw: st.DrawFn) -> Plan:
    """Any plan that can run."""
    stages = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    stage_size = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
    default = draw(st.sampled_from(DataParallel))
    degrees = st.sampled_from([d for d in range(1, stage_size + 1) if stage_size % d == 0])
    dp_types = st.sampled_from([default, DataParallel.ZERO3])
    flags = st.booleans()
    layer = st.builds(LayerStrategy, degrees, flags, flags, dp_types, flags)
    micro_batches = draw(st.integers(1, 6))
    tokens = st.integers(1, 5).map(lambda k: k * stage_size)
    assumed = st.builds(Assumptions, flags, st.sampled_from(Precision), flags, st.none() | tokens)
    return Plan(
        world_size=stage_size * len(stages),
        global_batch=micro_batches * stage_size * draw(st.integers(1, 3)),
        micro_batches=micro_batches,
        stages=stages,
        layers=tuple(draw(st.lists(layer, min_size=sum(stages), max_size=sum(stages)))),
        vocab=draw(st.builds(VocabStrategy, degrees, flags, dp_types)),
        schedule=draw(st.sampled_from(Schedule)),
        default_dp_type=default,
        assumed=draw(assumed),
    )


def smallest_world(plan: Plan) -> int:
    """Fewest ranks on which the plan's degrees fit."""
    return len(plan.stages) * math.lcm(plan.vocab.degree, *(layer.degree for layer in plan.layers))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
