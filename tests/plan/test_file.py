"""The strategy file: written, read back, read by others, and refused."""

import contextlib
import json
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import BAD_FIELDS, BAD_PLANS, MODEL, damaged, json_values, plan_fields, smallest_world, valid_plans

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.cli.main import main
from paddlenlp_galvatron.options.uniform import uniform_plan
from paddlenlp_galvatron.plan import Recompute, with_assumptions, with_defaults
from paddlenlp_galvatron.plan.check import find_faults
from paddlenlp_galvatron.plan.file import json_schema, plan_from_dict, plan_to_dict, read_plan, write_plan
from paddlenlp_galvatron.plan.mesh import EXCHANGE, SHARDING, Axis
from paddlenlp_galvatron.plan.precision import Precision
from paddlenlp_galvatron.plan.strategy import Assumptions, DataParallel, Plan
from paddlenlp_galvatron.report.plan import describe, notes

SCHEMA = jsonschema.Draft202012Validator(json_schema())


@given(valid_plans(), st.data())
def test_any_plan_that_can_be_read_is_described_with_its_faults(plan: Plan, data: st.DataObject):
    """For any changed numbers of a plan."""
    fields = plan_to_dict(plan)
    numbers = {name: st.integers(1, 12) for name in ("global_bsz", "chunks", "vtp", "vcp", "world_size")}
    fields |= data.draw(st.fixed_dictionaries({}, optional=numbers))
    for name in ("tp_sizes_enc", "cp_sizes_enc", "ep_sizes_enc"):
        if data.draw(st.booleans()):
            degrees = st.lists(
                st.sampled_from(["1", "2", "3", "8"]), min_size=len(plan.layers), max_size=len(plan.layers)
            )
            fields[name] = ",".join(data.draw(degrees))
    read = plan_from_dict(fields, valid=False)
    faults = find_faults(read, MODEL)
    assert [note.removeprefix("cannot run: ") for note in notes(read, MODEL) if note.startswith("cannot")] == faults
    assert describe(read, MODEL) and plan_from_dict(plan_to_dict(read), valid=False) == read
    with pytest.raises(UserError) if find_faults(read) else contextlib.nullcontext() as error:
        plan_from_dict(fields, source="it")
    assert error is None or error.value.faults == tuple(dict.fromkeys(f"it: {fault}" for fault in find_faults(read)))


@given(valid_plans())
def test_a_written_plan_is_read_back(tmp_path_factory, plan: Plan):
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    plan = replace(plan, metadata={"predicted": {"step_time_s": 0.5, "none": None}, "searched_from": {"model": "abc"}})
    write_plan(plan, path)
    read = read_plan(path)
    assert read == plan
    assert read.metadata == plan.metadata
    assert plan_to_dict(read) == plan_to_dict(plan)


def galvatron_reads(path: Path) -> dict:
    """A strict reader by the field descriptions of Galvatron's guide, with the runtime's name of embed_sdp."""
    fields = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    lists = ("tp_sizes_enc", "tp_consecutive_flags", "dp_types_enc", "use_sp", "checkpoint", "pp_division")
    read = {name: [int(part) for part in fields[name].split(",")] for name in lists}
    for name in ("pp_deg", "global_bsz", "chunks", "vtp", "vsp", "vocab_sdp"):
        assert type(fields[name]) is int
        read[name] = fields[name]
    assert fields["pipeline_type"] in ("gpipe", "pipedream_flush")
    assert fields["default_dp_type"] in ("ddp", "zero2", "zero3")
    layers = sum(read["pp_division"])
    assert len(read["pp_division"]) == read["pp_deg"] * fields.get("virtual_pp_deg", 1)
    for name in lists[:-1]:
        assert len(read[name]) == layers
    for name in lists[1:-1]:
        assert set(read[name]) <= {0, 1}
    assert fields["embed_sdp"] == fields["vocab_sdp"]
    return read | {"pipeline_type": fields["pipeline_type"], "default_dp_type": fields["default_dp_type"]}


@given(valid_plans())
def test_galvatron_reads_our_file_and_finds_the_same_plan(tmp_path_factory, plan: Plan):
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    write_plan(plan, path)
    read = galvatron_reads(path)

    def dp_type(flag: int) -> str:
        return "zero3" if flag else read["default_dp_type"]

    assert read["pp_division"] == list(plan.stages)
    assert read["tp_sizes_enc"] == [layer.degree for layer in plan.layers]
    assert read["use_sp"] == [layer.ulysses for layer in plan.layers]
    assert read["tp_consecutive_flags"] == [layer.consecutive for layer in plan.layers]
    assert read["checkpoint"] == [layer.recompute is Recompute.FULL for layer in plan.layers]
    assert [dp_type(flag) for flag in read["dp_types_enc"]] == [layer.dp_type for layer in plan.layers]
    assert (read["vtp"], read["vsp"]) == (plan.vocab.degree, plan.vocab.ulysses)
    assert dp_type(read["vocab_sdp"]) == plan.vocab.dp_type
    assert (read["global_bsz"], read["chunks"]) == (plan.global_batch, plan.micro_batches)
    assert read["pipeline_type"] == plan.schedule


def test_galvatrons_own_file_is_read():
    """A file without our fields, with Galvatron's newer ones at their neutral value."""
    fields = plan_fields(embed_sdp=..., vocab_sdp=1, world_size=..., vcp=1, cp_sizes_enc="1,1,1,1")
    plan = plan_from_dict(fields, 8)
    assert plan.vocab.dp_type is DataParallel.ZERO3
    assert plan.stated == frozenset()
    assert plan == replace(plan_from_dict(plan_fields(embed_sdp=1)), vocab=plan.vocab)


def test_comments_are_read_over(tmp_path):
    text = json.dumps(plan_fields(), indent=4).replace('"chunks": 2,', '"chunks": 2,  // see http://x')
    (tmp_path / "plan.json").write_text(text.replace("{", "{\n    // pipeline", 1))
    assert read_plan(tmp_path / "plan.json") == plan_from_dict(plan_fields())


def test_a_file_without_a_world_size():
    fields = plan_fields(world_size=...)
    assert plan_from_dict(fields, 16).world_size == 16
    assert plan_from_dict(fields, smallest_world=True).world_size == 8
    with pytest.raises(UserError, match="world_size: missing"):
        plan_from_dict(fields)


@given(valid_plans())
def test_the_smallest_world_is_one_that_the_degrees_divide(plan: Plan):
    fields = plan_to_dict(plan)
    del fields["world_size"]
    try:
        assert plan_from_dict(fields, smallest_world=True).world_size == smallest_world(plan)
    except UserError as error:  # fewer ranks may leave a sample too few tokens to split, or none
        assert "seq_length" in str(error) or "global_bsz" in str(error)


@given(valid_plans())
def test_the_schema_accepts_our_files(plan: Plan):
    assert SCHEMA.is_valid(json.loads(json.dumps(plan_to_dict(plan))))


@pytest.mark.parametrize(("changed", "named"), BAD_FIELDS.values(), ids=BAD_FIELDS)
def test_a_wrong_field_is_refused_by_name_and_by_the_schema(changed, named):
    fields = plan_fields(**changed)
    with pytest.raises(UserError) as error:
        plan_from_dict(fields, source="plan.json")
    assert len(error.value.faults) == 1
    for words in ["plan.json: ", *named]:
        assert words in str(error.value)
    assert not SCHEMA.is_valid(fields)


@pytest.mark.parametrize(("changed", "named"), BAD_PLANS.values(), ids=BAD_PLANS)
def test_a_plan_that_cannot_run_is_refused_by_name(changed, named):
    with pytest.raises(UserError) as error:
        plan_from_dict(plan_fields(**changed))
    for words in named:
        assert words in str(error.value)


def test_every_fault_is_named_at_once():
    with pytest.raises(UserError) as error:
        plan_from_dict(plan_fields(chunks=..., vsp=2, vpt=1))
    assert sorted(fault.split(":")[1].strip() for fault in error.value.faults) == ["chunks", "vpt", "vsp"]


def test_a_plan_for_other_ranks_is_refused():
    with pytest.raises(UserError, match="the plan is for 8 ranks but 4 are started"):
        plan_from_dict(plan_fields(), 4)


def test_faults_with_a_model():
    plan = plan_from_dict(plan_fields())
    assert find_faults(plan, MODEL) == []
    assert any("kv heads" in fault for fault in find_faults(plan, replace(MODEL, kv_heads=3, heads=9, hidden_size=72)))
    (fault,) = find_faults(plan, replace(MODEL, layers=5))
    assert "4 layers but small has 5" in fault
    (fault,) = find_faults(plan, replace(MODEL, intermediate_size=97))
    assert fault.startswith("tp_sizes_enc: degree 2 of layers 0-1") and "97 columns of the MLP" in fault
    long = plan_from_dict(plan_fields(galvatron={"assumed": {"seq_length": 256}}))
    (fault,) = find_faults(long, MODEL)
    assert "256" in fault and "128 positions" in fault


EXPERTS = {"ep_sizes_enc": "1,2,4,2", "tp_of_ep_sizes_enc": "1,2,1,1", "dp_types_of_ep_enc": "1,1,0,0"}


def test_experts_of_a_layer_have_degrees_and_a_dp_type_of_their_own():
    plan = plan_from_dict(plan_fields(**EXPERTS))
    assert [tuple(layer.experts) for layer in plan.layers] == [
        (1, 1, DataParallel.ZERO3, None),
        (2, 2, DataParallel.ZERO3, None),
        (4, 1, DataParallel.DDP, None),
        (2, 1, DataParallel.DDP, None),
    ]
    assert plan.layers[3].experts.mesh(8).groups(*EXCHANGE).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert plan.layers[3].experts.mesh(8).groups(Axis.EXPERT_DATA).tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    mixture = replace(
        MODEL, family="qwen3_moe", experts=6, experts_per_token=2, expert_size=9, max_position_embeddings=128
    )
    assert "ep_sizes_enc: layers 1-3: small has no experts; leave the field out" in find_faults(plan, MODEL)
    parted = plan_from_dict(plan_fields(default_dp_type="zero2", sharding_sizes_of_ep_enc="4,2,4,4"))
    assert find_faults(parted, MODEL) == [
        "sharding_sizes_of_ep_enc: layer 1: small has no experts; leave the field out"
    ]
    assert [fault[:52] for fault in find_faults(plan, mixture)] == [
        "tp_of_ep_sizes_enc: degree 2 of layer 1 does not div",
        "ep_sizes_enc: degree 4 of layer 2 does not divide th",
    ]


def test_zero_shards_in_a_part_of_the_ranks_that_hold_the_same_weights():
    sizes = {"sharding_sizes_enc": "2,4,2,4", "sharding_sizes_of_ep_enc": "8,2,2,2", "vsharding": 2}
    fields = plan_fields(**EXPERTS | sizes, world_size=16, default_dp_type="zero2")
    plan = plan_from_dict(fields)
    assert [(layer.sharding, layer.experts_sharding) for layer in plan.layers] == [
        (2, None),
        (None, None),
        (2, None),
        (4, 2),
    ]
    assert plan.layers[2].ulysses and plan.vocab.sharding == 2
    parts = plan.layers[0].mesh(8).parted(2)
    assert parts.groups(Axis.SHARDS).tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert parts.groups(Axis.REPLICAS).tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert plan_to_dict(plan)["sharding_sizes_enc"] == "2,4,2,4"
    *_, table = describe(plan)
    assert [*table.columns[5].cells][:4] == ["zero2 over 2", "zero2 over 2", "zero3", "zero2 over 2"]


def test_activations_of_layers_that_recompute_parts_are_not_offloaded():
    parts = {"recompute_enc": "none,norms,norms,full", "checkpoint": "0,0,0,1", "offload_enc": "100,1,1,7"}
    with pytest.raises(UserError, match=r"^plan: offload_enc: 1 of layers 1-2 with recompute norms; "):
        plan_from_dict(plan_fields(**parts))
    with pytest.raises(UserError, match=r"offload_enc: layer 2: .* 100"):
        plan_from_dict(plan_fields(offload_enc="0,0,101,0"))


@given(valid_plans())
def test_parts_and_their_copies_cover_each_sharding_group(plan: Plan):
    for layer in plan.layers:
        size = layer.shards(plan.stage_size)
        mesh = layer.mesh(plan.stage_size)
        parts, copies = (mesh.parted(size).groups(axis) for axis in (Axis.SHARDS, Axis.REPLICAS))
        for group in map(set, mesh.groups(*SHARDING).tolist()):
            inside = [part for part in parts.tolist() if group & set(part)]
            assert {len(part) for part in inside} == {size} and set().union(*inside) == group
            across = [ranks for ranks in copies.tolist() if group & set(ranks)]
            assert set().union(*across) == group
            assert all(len(set(part) & set(ranks)) == 1 for part in inside for ranks in across)


def test_dense_layers_among_those_with_experts_have_no_degrees_of_experts_but_parts_of_recompute():
    mixture = replace(MODEL, family="qwen3_moe", experts=4, experts_per_token=2, expert_size=8, dense_layers=(1, 2))
    parts = {"recompute_enc": "none,norms,mlp,attention", "checkpoint": "0,0,0,0"}
    fits = {"ep_sizes_enc": "4,1,1,2", "dp_types_enc": "0,1,0,0", "dp_types_of_ep_enc": "1,1,0,0", **parts}
    assert not find_faults(plan_from_dict(plan_fields(**fits)), mixture)
    for changed, fault in (
        ({"ep_sizes_enc": "1,2,1,1"}, "ep_sizes_enc: layer 1: small has no experts there; give 1"),
        ({"tp_of_ep_sizes_enc": "1,2,2,1"}, "ep_sizes_enc: layers 1-2: small has no experts there; give 1"),
        (
            {"dp_types_of_ep_enc": "0,0,0,0"},
            "dp_types_of_ep_enc: layer 1: small has no experts there; give the value of dp_types_enc",
        ),
        ({"recompute_enc": "mlp,mlp,none,none"}, "recompute_enc: mlp of layer 0: layers with experts recompute"),
    ):
        [found] = find_faults(plan_from_dict(plan_fields(**fits | changed)), mixture)
        assert found.startswith(fault)


def test_kv_heads_fewer_than_the_degree_are_replicated():
    plan = plan_from_dict(plan_fields(tp_sizes_enc="4,4,4,4"))
    assert find_faults(plan, replace(MODEL, kv_heads=2)) == []


def test_a_vocabulary_that_vtp_does_not_divide_is_padded():
    assert MODEL.vocab_size % 2 == 1
    assert find_faults(plan_from_dict(plan_fields(vtp=2)), MODEL) == []
    assert MODEL.padded_vocab_size(2) == 1002
    assert MODEL.padded_vocab_size(1) == 1001


@given(json_values)
def test_other_json_is_a_user_error(value):
    with pytest.raises(UserError):
        plan_from_dict(value)


STAGE = {"time_s": 1.0, "memory_mib": 100.0, "memory": {"context_mib": 1.0, "states_mib": 60.0}}
OURS = {
    "assumed": {"sequence_parallel": True, "mixed_precision": "bf16", "async_grad_reduce": True, "seq_length": 16},
    "predicted": {"time_s": 1.5, "lower_bound_s": 1.4, "stages": [STAGE, STAGE]},
    "searched_from": {
        "model": "small",
        "profiles": [{"path": "a.json", "sha256": "0", "fingerprint": {"device": "H100"}}],
    },
}


@settings(max_examples=100)
@given(damaged(plan_fields(cp_sizes_enc="1,1,1,1", galvatron=OURS)))
def test_a_damaged_plan_is_taken_or_a_user_error(tmp_path_factory, content):
    """By the reader, and where it is shown."""
    path = tmp_path_factory.mktemp("damaged") / "plan.json"
    path.write_text(json.dumps(content))
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as stated:
        assert main(["plan", "show", str(path)]) in (0, 2)
    assert "unexpected" not in stated.getvalue() and "Traceback" not in stated.getvalue()


NUMBERS = st.lists(st.integers(0, 10**9), min_size=1, max_size=6).map(lambda row: ",".join(map(str, row)))


@given(st.dictionaries(st.sampled_from(sorted(plan_fields())), NUMBERS | st.integers(0, 10**9), max_size=4))
def test_any_numbers_are_taken_or_a_user_error(changed):
    for world in ({}, {"world_size": ...}):
        try:
            assert find_faults(plan_from_dict(plan_fields(**(changed | world)), smallest_world=True)) == []
        except UserError as error:
            assert all(len(fault) < 300 for fault in error.faults)


@given(st.data())
def test_a_corrupted_file_is_read_or_a_user_error(tmp_path_factory, data):
    """Bytes cut, changed and put in at random."""
    content = bytearray(json.dumps(plan_fields()).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content)))
        content[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    content = content[: data.draw(st.integers(0, len(content)) | st.none())]
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    path.write_bytes(bytes(content))
    try:
        read_plan(path)
    except UserError as error:
        assert all(fault.startswith(str(path)) for fault in error.faults)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "line 1, column 1"),
        ('{"pp_deg": 2,', "is the file cut off?"),
        ('{"pp_deg": 2, "pp_deg": 3}', "stands twice"),
        ('{"pp_deg": NaN}', "NaN"),
        ("[" * 100_000, "more than 64 objects and lists"),
        ("[]", "one JSON object"),
        ('{"pp_deg": ' + "9" * 5000 + "}", "digits"),
    ],
)
def test_a_broken_file_is_refused_with_the_place(tmp_path, text, named):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        read_plan(path)
    assert str(error.value).startswith(str(path)) and named in str(error.value)


def test_a_file_that_cannot_be_read_or_written(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        read_plan(tmp_path / "nothing.json")
    with pytest.raises(UserError, match="is not a regular file"):
        read_plan(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        write_plan(plan_from_dict(plan_fields()), tmp_path / "file" / "plan.json")


def test_a_plan_that_cannot_run_is_not_written(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("before")
    with pytest.raises(UserError):
        write_plan(replace(plan_from_dict(plan_fields()), global_batch=15), path)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["fp32_gradients", "flash_attention"])
def test_what_a_plan_was_priced_with_holds_and_what_it_leaves_open_is_the_device_s(tmp_path, name):
    plan = uniform_plan(
        layers=2,
        world_size=2,
        global_train_batch_size=4,
        assumed=Assumptions(mixed_precision=Precision.BF16, seq_length=8),
    )
    write_plan(plan, tmp_path / "plan.json")
    read = read_plan(tmp_path / "plan.json")
    assert name not in read.stated
    assert [getattr(with_defaults(read, on_gpus).assumed, name) for on_gpus in (False, True)] == [False, True]
    in_fp32 = replace(read, assumed=replace(read.assumed, mixed_precision=Precision.FP32))
    assert not getattr(with_defaults(in_fp32, on_gpus=True).assumed, name)
    write_plan(replace(read, assumed=replace(read.assumed, **{name: False})), tmp_path / "stated.json")
    stated = read_plan(tmp_path / "stated.json")
    assert not getattr(with_defaults(stated, on_gpus=True).assumed, name)
    with pytest.raises(UserError, match=f"{name}: the plan was searched for False but True is given"):
        with_assumptions(stated, **{name: True})
