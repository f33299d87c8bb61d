"""Plans and models for tests: examples, and hypothesis strategies."""

import copy
import math
from dataclasses import replace
from functools import reduce
from operator import getitem
from typing import Any

from hypothesis import strategies as st

from paddlenlp_galvatron.model.layer import PARTLY
from paddlenlp_galvatron.options.uniform import uniform_plan
from paddlenlp_galvatron.plan import ModelShape, Recompute, Schedule
from paddlenlp_galvatron.plan.precision import Precision
from paddlenlp_galvatron.plan.strategy import Assumptions, DataParallel, LayerStrategy, Plan, VocabStrategy

MODEL = ModelShape("small", "qwen2", 4, 64, 96, 8, 4, 1001, 128)


def plan_fields(**changed: Any) -> dict[str, Any]:
    """A valid strategy file for 8 ranks and the layers of MODEL; a field changed to `...` is left out."""
    fields: dict[str, Any] = {
        "pp_deg": 2, "tp_sizes_enc": "2,2,4,1", "tp_consecutive_flags": "1,1,1,1", "dp_types_enc": "0,1,0,0",
        "use_sp": "0,0,1,0", "checkpoint": "1,0,0,0", "global_bsz": 16, "chunks": 2, "pp_division": "2,2",
        "pipeline_type": "pipedream_flush", "default_dp_type": "ddp", "vtp": 2, "vsp": 0, "embed_sdp": 0,
        "world_size": 8,
    }  # fmt: skip
    return {name: value for name, value in (fields | changed).items() if value is not ...}


# Each: a change of a valid file, and the text that the one line of error must have.
BAD_FIELDS = {
    "missing field": ({"chunks": ...}, ["chunks: missing", "micro-batches"]),
    "misspelt field": ({"chunk": 2}, ["chunk: unknown field", "did you mean chunks?"]),
    "unknown field": ({"zzz": 2}, ["zzz: unknown field", "remove it"]),
    "misspelt inside galvatron": (
        {"galvatron": {"assumed": {"seqlength": 8}}},
        ["galvatron.assumed.seqlength", "did you mean seq_length?"],
    ),
    "newer format": ({"galvatron": {"format_version": 2}}, ["galvatron.format_version", "2"]),
    "number as text": ({"pp_deg": "2"}, ["pp_deg", "whole number", "'2'"]),
    "boolean as number": ({"vsp": True}, ["vsp", "whole number", "True"]),
    "list as list": ({"checkpoint": [1, 0, 0, 0]}, ["checkpoint", "string of numbers"]),
    "empty list": ({"checkpoint": ""}, ["checkpoint", "string of numbers"]),
    "no numbers": ({"checkpoint": "1,0,x,0"}, ["checkpoint", "string of numbers", "1,0,x,0"]),
    "flag of 2": ({"use_sp": "0,0,2,0"}, ["use_sp: layer 2", "2"]),
    "degree of 0": ({"tp_sizes_enc": "2,2,0,1"}, ["tp_sizes_enc: layer 2", "0"]),
    "0 chunks": ({"virtual_pp_deg": 0}, ["virtual_pp_deg", "at least 1"]),
    "unknown part": ({"recompute_enc": "full,norms+mpl,none,none"}, ["recompute_enc: layer 1", "norms+mpl"]),
    "a part twice": ({"recompute_enc": "full,mlp+mlp,none,none"}, ["recompute_enc: layer 1", "mlp+mlp"]),
    "all and a part": ({"recompute_enc": "full+norms,none,none,none"}, ["recompute_enc: layer 0", "full+norms"]),
    "parts as a number": ({"recompute_enc": 1}, ["recompute_enc", "string of words"]),
    "stage of 0 layers": ({"pp_division": "4,0"}, ["pp_division: stage 1", "0"]),
    "unknown schedule": ({"pipeline_type": "1f1b"}, ["pipeline_type", "pipedream_flush", "1f1b"]),
    "unknown dp type": ({"default_dp_type": "zero1"}, ["default_dp_type", "zero2", "zero1"]),
    "context parallel degree of 0": ({"cp_sizes_enc": "1,0,1,1"}, ["cp_sizes_enc: layer 1", "0"]),
    "vocabulary's context parallel degree of 0": ({"vcp": 0}, ["vcp", "at least 1"]),
    "0 pieces of the loss": ({"loss_pieces": 0}, ["loss_pieces", "at least 1"]),
    "expert parallel degree of 0": ({"ep_sizes_enc": "1,1,1,0"}, ["ep_sizes_enc: layer 3", "0"]),
    "sharding size of 0": ({"sharding_sizes_enc": "2,2,0,4"}, ["sharding_sizes_enc: layer 2", "0"]),
}
# The same for fields that are right one by one.
BAD_PLANS = {
    "too few entries": ({"use_sp": "0,0,1"}, ["use_sp", "3 entries for 4 layers", "one entry a layer"]),
    "too many entries": ({"tp_sizes_enc": "2,2,4,1,1"}, ["tp_sizes_enc", "5 entries for 4 layers"]),
    "too few stages": ({"pp_deg": 4}, ["pp_division", "2 stages but pp_deg is 4"]),
    "too few chunks": (
        {"virtual_pp_deg": 2},
        ["pp_division", "2 entries for 2 stages of 2 chunks", "give 4: the first"],
    ),
    "chunks of a schedule that has none": (
        {"virtual_pp_deg": 2, "pp_division": "1,1,1,1", "pipeline_type": "gpipe"},
        ["virtual_pp_deg", "gpipe has one", "pipedream_flush"],
    ),
    "chunks of the only stage": ({"virtual_pp_deg": 2, "pp_deg": 1}, ["virtual_pp_deg", "the only stage", "pp_deg"]),
    "parts against checkpoint": (
        {"recompute_enc": "norms,none,full,mlp"},
        ["recompute_enc: norms in layer 0, but check"],
    ),
    "too few parts of recompute": ({"recompute_enc": "full,none,none"}, ["recompute_enc", "3 entries for 4 layers"]),
    "experts beyond a stage": (
        {"ep_sizes_enc": "1,1,4,4", "tp_of_ep_sizes_enc": "1,1,2,2"},
        ["ep_sizes_enc: 4 with tp_of_ep_sizes_enc 2 of layers 2-3", "4 ranks of a stage"],
    ),
    "too few sharding sizes": ({"sharding_sizes_enc": "2,2"}, ["sharding_sizes_enc", "2 entries for 4 layers"]),
    "a sharding size that is no divisor": (
        {"sharding_sizes_enc": "2,2,4,3", "default_dp_type": "zero2"},
        ["sharding_sizes_enc: 3 for layer 3", "4 ranks that hold the same weights", "divisor of 4"],
    ),
    "a sharding size of 1": (
        {"sharding_sizes_enc": "2,1,4,4"},
        ["sharding_sizes_enc: 1 for layer 1", "2 ranks", "above 1"],
    ),
    "a sharding size of ddp": ({"sharding_sizes_enc": "2,2,4,2"}, ["2 for layer 3", "ddp shards nothing", "give 4"]),
    "a sharding size of experts": (
        {"sharding_sizes_of_ep_enc": "4,3,4,4"},
        ["3 for experts of layer 1", "divisor of 4"],
    ),
    "a sharding size of the vocabulary": ({"vsharding": 3, "embed_sdp": 1}, ["vsharding: 3 for the vocabulary layers"]),
    "two names that differ": ({"vocab_sdp": 1}, ["embed_sdp and vocab_sdp", "keep one"]),
    "stages do not divide the world": ({"world_size": 9}, ["pp_deg", "2 stages", "9 ranks"]),
    "degree does not divide a stage": ({"tp_sizes_enc": "2,3,3,1"}, ["tp_sizes_enc", "3 of layers 1-2", "4 ranks"]),
    "degree beyond a stage": ({"world_size": 4}, ["tp_sizes_enc: degree 4 of layer 2", "2 ranks of a stage"]),
    "vtp does not divide a stage": ({"vtp": 3}, ["vtp", "degree 3", "4 ranks of a stage"]),
    "too few context parallel degrees": ({"cp_sizes_enc": "2,1"}, ["cp_sizes_enc", "2 entries for 4 layers"]),
    "cp and tp beyond a stage": (
        {"cp_sizes_enc": "1,1,2,1"},
        ["2 and degree 4 of layer 2", "4 ranks of a stage", "product"],
    ),
    "vocabulary's degrees beyond a stage": ({"vcp": 4}, ["vcp: 4 and degree 2 of the vocabulary layers"]),
    "tokens that are no chunks": (
        {"cp_sizes_enc": "2,2,1,2", "galvatron": {"assumed": {"seq_length": 10}}},
        ["cp_sizes_enc: a sequence length of 10", "two equal pieces", "2 ranks of layer 0", "multiple of 4"],
    ),
    "chunks do not divide the batch": ({"chunks": 3}, ["chunks", "3 micro-batches", "global_bsz 16"]),
    "dp does not divide the micro-batch": ({"chunks": 8}, ["global_bsz", "dp degree 4 of layer 3", "multiple of 32"]),
    "tokens do not split": (
        {"galvatron": {"assumed": {"seq_length": 7}}, "global_bsz": 2, "tp_sizes_enc": "4,4,4,4", "vtp": 4},
        ["tp_sizes_enc: layer 2: 7 tokens", "degree 4", "seq_length that is a multiple of 4"],
    ),
}


@st.composite
def valid_plans(draw: st.DrawFn) -> Plan:
    """Any plan that can run."""
    pipeline, schedule = draw(st.integers(1, 4)), draw(st.sampled_from(Schedule))
    chunks = draw(st.integers(1, 3)) if pipeline > 1 and schedule.of_chunks else 1
    stages = tuple(draw(st.lists(st.integers(1, 4), min_size=pipeline * chunks, max_size=pipeline * chunks)))
    stage_size = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
    default = draw(st.sampled_from(DataParallel))
    divisors = [d for d in range(1, stage_size + 1) if stage_size % d == 0]
    both = st.sampled_from([(d, c) for d in divisors for c in divisors if stage_size % (d * c) == 0])
    dp_types = st.sampled_from([default, DataParallel.ZERO3])
    flags = st.booleans()
    recompute = st.sampled_from([Recompute.NONE, Recompute.FULL, *PARTLY])
    layer = st.builds(
        lambda degrees, experts, of_experts, *others: LayerStrategy(
            degrees[0], *others, context=degrees[1], ep=experts[0], etp=experts[1], experts_dp_type=of_experts
        ),
        both,
        both,
        st.none() | dp_types,
        flags,
        flags,
        dp_types,
        recompute,
    )
    vocab = st.builds(
        lambda degrees, pieces, *others: VocabStrategy(degrees[0], *others, context=degrees[1], pieces=pieces),
        both,
        st.integers(1, 5),
        flags,
        dp_types,
    )

    def size(ranks: int, dp_type: DataParallel) -> int | None:
        """Ranks over which ZeRO shards the weights that so many ranks hold together."""
        parts = [d for d in divisors if 1 < d < stage_size // ranks and stage_size // ranks % d == 0]
        return draw(st.sampled_from([None, *parts])) if dp_type is not DataParallel.DDP else None

    def parted(layer: LayerStrategy) -> LayerStrategy:
        own = layer.experts
        sizes = size(layer.tp, layer.dp_type), size(own.ranks, own.dp_type)
        offload = draw(st.sampled_from([0, 30, 100])) if layer.recompute not in PARTLY else 0
        return replace(layer, sharding=sizes[0], experts_sharding=sizes[1], offload=offload)

    micro_batches = draw(st.integers(1, 6))
    tokens = st.integers(1, 5).map(lambda k: 2 * k * stage_size)
    assumed = st.builds(
        Assumptions, flags, st.sampled_from(Precision), flags, st.none() | tokens, st.none() | flags, st.none() | flags
    )
    return Plan(
        world_size=stage_size * pipeline,
        global_batch=micro_batches * stage_size * draw(st.integers(1, 3)),
        micro_batches=micro_batches,
        stages=stages,
        layers=tuple(map(parted, draw(st.lists(layer, min_size=sum(stages), max_size=sum(stages))))),
        vocab=replace(own := draw(vocab), sharding=size(own.tp, own.dp_type)),
        schedule=schedule,
        chunks=chunks,
        default_dp_type=default,
        assumed=draw(assumed),
    )


def smallest_world(plan: Plan) -> int:
    """Fewest ranks on which the plan's degrees fit."""
    size, needed = plan.stage_size, [plan.vocab.ranks, plan.vocab.tp * (plan.vocab.sharding or 1)]
    for layer in plan.layers:
        needed += [layer.ranks, layer.experts.ranks]
        if any(each.sharding for each in plan.layers):
            needed.append(layer.tp * layer.shards(size))
        if any(each.experts_sharding for each in plan.layers):
            needed.append(layer.experts.ranks * layer.experts.shards(size))
    return plan.pipeline * math.lcm(*needed)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to everything inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in _places(item, (*path, key)))]


@st.composite
def damaged(draw: st.DrawFn, sound: Any) -> Any:
    """A JSON value of which one to three parts are replaced, renamed or left out."""
    content = copy.deepcopy(sound)
    for _ in range(draw(st.integers(1, 3))):
        *inside, key = draw(st.sampled_from(_places(content)[1:] or [()])) or [None]
        new = draw(json_values | st.sampled_from([0, -1, 1e308, 1e-308, "1", None, {}, [], 10**30, "\x1b[2J"]))
        if key is None:
            return new
        holder = reduce(getitem, inside, content)
        if not isinstance(holder, dict) or draw(st.booleans()):
            holder[key] = new
        else:
            holder |= {name: holder.pop(key) for name in draw(st.lists(st.text(max_size=30), max_size=1))}
            holder.pop(key, None)
    return content


def plan(tp: int = 1, pp: int = 1, chunks: int = 1, sp: bool = False, world_size: int = 8, **options) -> Plan:
    """The same strategy for all of four layers."""
    assumed = options.pop("assumed", Assumptions(sequence_parallel=sp, seq_length=128))
    return uniform_plan(
        layers=4,
        world_size=world_size,
        global_train_batch_size=16,
        global_tp_deg=tp,
        vocab_tp=options.pop("vocab_tp", tp),
        pp_deg=pp,
        chunks=chunks,
        assumed=assumed,
        **options,
    )


def recomputing(of: Plan, *layers: int) -> Plan:
    """The plan with recompute in these layers."""
    marked = (replace(layer, recompute=index in layers) for index, layer in enumerate(of.layers))
    return replace(of, layers=tuple(marked))


def with_layer(of: Plan, **changed) -> Plan:
    """The plan with another last layer."""
    return replace(of, layers=(*of.layers[:-1], replace(of.layers[-1], **changed)))
