"""Strategy files as they were published, by the shapes of real ones: read, or refused once and for the reason."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from plans import valid_plans

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.plan import DataParallel, Plan, Schedule, plan_from_dict, plan_to_dict
from paddlenlp_galvatron.plan.dialects import LACKING, LACKING_PER_LAYER


def row(*runs: tuple[int, int]) -> str:
    """Values and how often each stands: row((1, 2), (0, 1)) is "1,1,0"."""
    return ",".join(str(value) for value, times in runs for _ in range(times))


def galvatron(layers: int, tp: str | int, bsz: int, **fields: Any) -> dict[str, Any]:
    """A file of Galvatron with a field of `...` left out; by default the fields of all versions."""
    given = {
        "pp_deg": 1,
        "tp_sizes_enc": tp if isinstance(tp, str) else row((tp, layers)),
        "tp_consecutive_flags": row((1, layers)),
        "dp_types_enc": row((0, layers)),
        "global_bsz": bsz,
        "chunks": 1,
        "pp_division": str(layers),
    } | fields
    return {name: value for name, value in given.items() if value is not ...}


def later(layers: int, tp: str | int, bsz: int, **fields: Any) -> dict[str, Any]:
    """As Galvatron 2 writes it."""
    newer = {"use_sp": row((0, layers)), "checkpoint": row((0, layers)), "pipeline_type": "pipedream_flush"}
    return galvatron(layers, tp, bsz, **newer | {"default_dp_type": "zero2", "vtp": 1, "vsp": 0} | fields)


def sizes(layers: int, tp: int, sp: int, dp: int, **fields: Any) -> dict[str, Any]:
    """As Galvatron's rewritten search writes it."""
    return {
        "global_bsz": 16,
        "chunks": 1,
        "pp_size": 1,
        "throughput": 14.5,
        "time": 1.103,
        "embedding_lmhead_dp_size": 2,
        "embedding_lmhead_tp_size": 1,
        "embedding_lmhead_sp_size": 4,
        "embedding_lmhead_cp_size": 1,
        "embedding_lmhead_dp_type": "zero3",
        "default_dp_type": "zero2",
        "dp_size_enc": row((dp, layers)),
        "tp_size_enc": row((tp, layers)),
        "sp_size_enc": row((sp, layers)),
        "cp_size_enc": row((1, layers)),
        "checkpoint_enc": row((1, 2), (0, layers - 2)),
        "dp_type_enc": row((1, layers - 3), (0, 3)),
    } | fields


def port(layers: int = 16, tp: int = 2, dp: int = 2, stages: int = 2, **fields: Any) -> dict[str, Any]:
    """fine_grained_config.json of the port to PaddleNLP."""
    each = layers // stages
    division = [*[each] * (stages - 1), layers - each * (stages - 1)]
    return {
        "pp_size": stages,
        "vtp": 2,
        "vsp_flag": 0,
        "embed_sdp": 1,
        "global_batch_size": 64,
        "gradient_accumulation_steps": 8,
        "dp_size_list": row((dp, layers)),
        "sharding_stage_list": row((3, 1), (2, layers - 1)),
        "tp_size_list": row((tp, layers)),
        "usp_flag_list": row((0, layers)),
        "recompute_list": row((1, 3), (0, layers - 3)),
        "pp_stage_idx_list": row(*enumerate(division)),
    } | fields


# Files of public repositories: ranks, and the fields. Numbers of layers, degrees and absent fields
# are those of real files; the order of layers is made up.
PUBLISHED = json.loads((Path(__file__).parents[1] / "fixtures" / "published_strategies.json").read_text())

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "swin's 41 micro-batches": (
        later(48, 1, 1024, pp_deg=8, pp_division="3,7,7,7,7,7,7,3", chunks=41),
        "chunks: 41 micro-batches do not divide global_bsz 1024",
    ),
    "experts": (later(4, 2, 8, ep_sizes_enc="1,1,1,0"), "ep_sizes_enc: layer 3: "),
    "rewritten, tensor parallel and Ulysses at once": (sizes(32, 2, 2, 2), "layer 0 is both tensor parallel and"),
    "rewritten, context parallel with degrees that it leaves no ranks for": (
        sizes(8, 2, 1, 4, cp_size_enc=row((1, 7), (2, 1))),
        "ranks: 8, 16",
    ),
    "rewritten, vocabulary neither default nor zero3": (
        sizes(8, 2, 1, 4, embedding_lmhead_dp_type="ddp"),
        "embedding_lmhead_dp_type: is ddp with default_dp_type zero2",
    ),
    "rewritten, layers of different worlds": (sizes(8, 2, 1, 4, dp_size_enc=row((4, 7), (2, 1))), "ranks: 4, 8"),
    "port, stages out of order": (port(pp_stage_idx_list=row((1, 8), (0, 8))), "pp_stage_idx_list: the stages"),
    "port, sharding stages side by side": (port(sharding_stage_list=row((1, 8), (2, 8))), "sharding_stage_list: has"),
    "port, a field too many": (port(pp_sizes=1), "pp_sizes: unknown field; did you mean pp_size?"),
    "lists of different lengths": (later(8, 2, 16, use_sp="0,0"), "use_sp: has 2 entries for 8 layers"),
    "no batch": (galvatron(8, 2, 16, global_bsz=...), "global_bsz: missing; add it"),
    "a profile": ({"layertype_0": 1.25, "layertype_other_0": 3.0}, "is a profile of a model, not a strategy file"),
    "a network": ({"allreduce_size_8_consec_1": 180.0}, "is a profile of the network, not a strategy file"),
    "a model": ({"hidden_size": 4096, "model_type": "llama"}, "is a model's config.json, not a strategy file"),
    "the port's summary of a search": (
        {"bsz": 128, "accumulation_steps": 4, "strategy": "pp1_tp2_dp4_stage2_recompute0", "memory_cost": [32967.3]},
        "for your MODEL write: galvatron plan uniform MODEL --world_size 8 --pp_deg 1 --global_tp_deg 2 "
        "--sharding_stage_level 2 --global_checkpoint 0 --global_train_batch_size 128 --chunks 4",
    ),
    "arguments": ({"output_dir": "x"}, "is arguments of a training, not a strategy file"),
    "anything": ({"scripts": {}}, "is not a strategy file: it has none of the fields"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_is_read(name):
    fields = PUBLISHED[name]["fields"]
    plan = plan_from_dict(fields, PUBLISHED[name]["world_size"])
    again = plan_from_dict(plan_to_dict(plan))
    assert again == plan and again.note == ""
    lacking = {*LACKING, *LACKING_PER_LAYER} - {"embed_sdp"} - fields.keys()
    old = "tp_sizes_enc" in fields
    assert all(f"{name} " in plan.note for name in lacking) or not old
    assert bool(plan.note) == bool(lacking or (old and not {"embed_sdp", "vocab_sdp"} & fields.keys())) or not old


@pytest.mark.parametrize(("fields", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_used_is_refused_once(fields, reason):
    with pytest.raises(UserError) as error:
        plan_from_dict(fields, smallest_world=True)
    assert len(error.value.faults) == 1 and reason in str(error.value)


def test_what_lacks_is_what_galvatron_takes():
    plan = plan_from_dict(PUBLISHED["1.3 hardly anything"]["fields"], 4)
    assert plan.stages == (4,) and plan.schedule is Schedule.GPIPE and plan.vocab.degree == 1
    assert all(layer.consecutive and not layer.ulysses and not layer.recompute for layer in plan.layers)
    assert {layer.dp_type for layer in plan.layers} == {DataParallel.DDP}
    uneven = plan_from_dict(galvatron(7, 1, 6, pp_deg=3, pp_division=..., chunks=3), 3)
    assert uneven.stages == (2, 2, 3)  # the last stage has the rest


def test_sizes_mean_what_they_say():
    tensor = plan_from_dict(PUBLISHED["rewritten search, tensor parallel"]["fields"])
    assert (tensor.world_size, tensor.layers[0].degree, tensor.layers[0].ulysses) == (8, 2, False)
    assert tensor.vocab.ulysses and tensor.vocab.degree == 4 and tensor.vocab.dp_type is DataParallel.ZERO3
    assert [layer.dp_type.value for layer in tensor.layers[28:]] == ["zero3", "zero2", "zero2", "zero2"]
    assert [bool(layer.recompute) for layer in tensor.layers[:3]] == [True, True, False]
    ulysses = plan_from_dict(PUBLISHED["rewritten search, Ulysses"]["fields"])
    assert ulysses.layers[0].ulysses and ulysses.layers[0].degree == 4
    context = sizes(32, 2, 1, 2, cp_size_enc=row((2, 32)), embedding_lmhead_sp_size=2, embedding_lmhead_cp_size=4)
    plan = plan_from_dict(context)
    assert (plan.world_size, plan.dp(plan.layers[0]), plan.layers[0].context) == (8, 2, 2)
    assert (plan.vocab.degree, plan.vocab.context) == (2, 4)


@given(valid_plans())
def test_the_port_says_what_a_plan_says(plan: Plan):
    """Any plan that the port's file can hold, written as the port writes it, is the same plan."""
    assume(plan.chunks == 1)
    plain = (replace(each, recompute=bool(each.recompute), context=1) for each in plan.layers)
    plan = replace(plan, layers=tuple(plain))
    stages = {"ddp": "0", "zero2": "2", "zero3": "3"}
    file = {
        "pp_size": len(plan.stages),
        "vtp": plan.vocab.degree,
        "vsp_flag": int(plan.vocab.ulysses),
        "embed_sdp": int(plan.vocab.dp_type is DataParallel.ZERO3),
        "global_batch_size": plan.global_batch,
        "gradient_accumulation_steps": plan.micro_batches,
        "dp_size_list": ",".join(str(plan.dp(layer)) for layer in plan.layers),
        "sharding_stage_list": ",".join(stages[layer.dp_type] for layer in plan.layers),
        "tp_size_list": ",".join(str(layer.degree) for layer in plan.layers),
        "usp_flag_list": ",".join(str(int(layer.ulysses)) for layer in plan.layers),
        "recompute_list": ",".join(str(layer.recompute.value) for layer in plan.layers),
        "pp_stage_idx_list": ",".join(str(stage) for stage, layers in enumerate(plan.stages) for _ in range(layers)),
    }
    read = plan_from_dict(json.loads(json.dumps(file)))
    assert (read.world_size, read.stages, read.global_batch) == (plan.world_size, plan.stages, plan.global_batch)
    for ours, theirs in zip(plan.layers, read.layers, strict=True):
        assert (ours.degree, ours.ulysses, ours.recompute) == (theirs.degree, theirs.ulysses, theirs.recompute)
        assert ours.dp_type is theirs.dp_type
