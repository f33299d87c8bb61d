"""A plan as PaddleFleet's YAML, by its published argument classes; settings that they cannot express are named by
field."""

import ast
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from plans import MODEL, plan, recomputing, valid_plans, with_layer

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.plan import Assumptions, Precision, Recompute
from paddlenlp_galvatron.plan.export import FORMERS, fleet_arguments, fleet_notes
from paddlenlp_galvatron.plan.fields import StrategyFile

VERSION = "1.0.0"
CLASSES = {
    "TrainingArguments": "paddleformers/trainer/training_args.py",
    "DataArguments": "paddleformers/cli/hparams/data_args.py",
    "ModelArguments": "paddleformers/cli/hparams/model_args.py",
}
# Class, type and default of each argument: equal in PaddleFormers 1.0.0 and in PaddleFleet of September 2026
# (37e34420, src/paddlefleet/{trainer/training_args,cli/hparams/data_args,cli/hparams/model_args}.py).
PUBLISHED = {
    "stage": ("ModelArguments", "str", "SFT"),
    "fine_tuning": ("ModelArguments", "str", "LoRA"),
    "max_seq_len": ("DataArguments", "int", 4096),
    "per_device_train_batch_size": ("TrainingArguments", "int", 8),
    "gradient_accumulation_steps": ("TrainingArguments", "int", 1),
    "tensor_model_parallel_size": ("TrainingArguments", "int", -1),
    "pipeline_model_parallel_size": ("TrainingArguments", "int", -1),
    "sequence_parallel": ("TrainingArguments", "bool", False),
    "sharding": ("TrainingArguments", "str", "stage1"),
    "sharding_parallel_size": ("TrainingArguments", "int", -1),
    "recompute_granularity": ("TrainingArguments", "Optional[str]", None),
    "recompute_method": ("TrainingArguments", "Optional[str]", None),
    "recompute_num_layers": ("TrainingArguments", "Optional[int]", None),
    "bf16": ("TrainingArguments", "bool", False),
    "fp16": ("TrainingArguments", "bool", False),
    "fp16_opt_level": ("TrainingArguments", "str", "O1"),
}
# Those of PaddleFleet alone: its arguments of training (37e34420) and of a model (transformer_config.py, 00662fa).
FLEET_ALONE = {
    "hybrid_parallel_topo_order": "Optional[str]",
    "use_expert_parallel": "bool",
    "expert_model_parallel_size": "int",
    "amp_master_grad": "bool",
    "split_param": "bool",
    "virtual_pipeline_model_parallel_size": "Optional[int]",
    "num_empty_layers_add_in_head": "int",
    "num_empty_layers_add_in_tail": "int",
    "num_nextn_predict_layers": "int",
    "recompute_modules": "Optional[dict]",
    "context_parallel_size": "int",
    "_attn_implementation": "str",
    "tensorwise_offload_optimizer": "bool",
    "decoderlayer_act_offload_settings": "Optional[dict]",
    "lora_rank": "int",
}
TYPES = {"int": int, "str": str, "bool": bool, "Optional[str]": str, "Optional[int]": int, "Optional[dict]": dict}
BF16 = Assumptions(mixed_precision=Precision.BF16, seq_length=128)

FOUR = [*enumerate(plan().layers)]
PRINTED = {
    "data parallel": (plan(chunks=2), {"sharding": "", "gradient_accumulation_steps": 2}),
    "Megatron-SP": (plan(tp=4, sp=True), {"tensor_model_parallel_size": 4, "sequence_parallel": True}),
    "Megatron-SP without tp": (plan(sp=True), {"sequence_parallel": False}),
    "pipeline": (plan(tp=2, pp=2, chunks=4), {"pipeline_model_parallel_size": 2, "sharding": ""}),
    "zero2, gradients summed first": (
        plan(pp=2, chunks=4, default_dp_type="zero2"),
        {"sharding": "stage1", "sharding_parallel_size": 4},
    ),
    "zero3 in parts": (plan(sdp=True, global_sharding_deg=2), {"sharding": "stage3", "sharding_parallel_size": 2}),
    "zero3": (plan(sdp=True), {"sharding": "stage3", "sharding_parallel_size": 8}),
    "recompute": (plan(global_checkpoint=True), {"recompute_method": "uniform", "recompute_num_layers": 1}),
    "recompute of the first layer of a stage": (
        recomputing(plan(pp=2, chunks=2), 0, 2),
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    ),
    "recompute of the MLP in some layers": (
        with_layer(plan(), recompute=Recompute.SUBLAYER),
        {"recompute_granularity": "selective", "recompute_modules": {"mlp": [3]}},
    ),
    "recompute of the MLP in all": (
        replace(plan(), layers=(replace(plan().layers[0], recompute=Recompute.SUBLAYER),) * 4),
        {"recompute_granularity": "selective", "recompute_modules": {"mlp": "all"}},
    ),
    "a short last stage": (
        replace(plan(pp=2, chunks=2), stages=(3, 1)),
        {"num_empty_layers_add_in_head": 0, "num_empty_layers_add_in_tail": 2},
    ),
    "a short first stage": (
        replace(plan(pp=2, chunks=2), stages=(1, 3)),
        {"num_empty_layers_add_in_head": 2, "num_empty_layers_add_in_tail": 0},
    ),
    "chunks": (
        replace(
            plan(pp=4, chunks=8, world_size=4), stages=(1, 2, 2, 2, 2, 2, 2, 2), layers=plan().layers[:1] * 15, chunks=2
        ),
        {"virtual_pipeline_model_parallel_size": 2, "num_empty_layers_add_in_head": 1},
    ),
    "context parallelism": (
        plan(global_cp_deg=2, default_dp_type="zero2", chunks=2),
        {"context_parallel_size": 2, "sharding_parallel_size": 8, "per_device_train_batch_size": 2},
    ),
    "adapters of fine-tuning": (
        replace(plan(), metadata={"searched_from": {"options": {"task": "lora", "lora_rank": 16}}}),
        {"stage": "SFT", "fine_tuning": "lora", "lora_rank": 16},
    ),
    "states in host memory": (
        plan(assumed=replace(BF16, offload_optimizer=True)),
        {"tensorwise_offload_optimizer": True},
    ),
    "inputs in host memory, by physical numbers": (
        replace(
            plan(pp=2, chunks=2),
            stages=(1, 3),
            layers=tuple(replace(layer, recompute=Recompute.FULL, offload=100 * (at > 1)) for at, layer in FOUR),
        ),
        {"decoderlayer_act_offload_settings": {"type": "layer_idxs", "value": [4, 5]}},
    ),
    "experts": (
        plan(global_ep_deg=4, default_dp_type="zero2", chunks=2),
        {"use_expert_parallel": True, "expert_model_parallel_size": 4, "sharding": "stage1"},
    ),
    "bf16": (plan(assumed=BF16), {"bf16": True, "fp16": False, "fp16_opt_level": "O2"}),
}


@pytest.mark.parametrize(("of", "part"), PRINTED.values(), ids=PRINTED)
def test_what_it_can_say_is_written(of, part):
    arguments = fleet_arguments(of)
    assert part.items() <= arguments.items()
    assert arguments["max_seq_len"] == 128
    assert (arguments["stage"], arguments["fine_tuning"]) == (part.get("stage", "PT"), part.get("fine_tuning", "full"))


REFUSED = {
    "degrees": (with_layer(plan(tp=2), degree=4), ["tp_sizes_enc"]),
    "Ulysses": (plan(tp=2, use_ulysses=True), ["use_sp"]),
    "parts in a layer": (with_layer(plan(sdp=True), sharding=2), ["sharding_sizes_enc"]),
    "strided": (plan(tp=2, global_tp_consec=False), ["tp_consecutive_flags"]),
    "recompute of later layers": (recomputing(plan(), 1, 3), ["checkpoint"]),
    "recompute of one stage": (recomputing(plan(pp=2, chunks=2), 0), ["checkpoint"]),
    "recompute of our part of the MLP": (with_layer(plan(), recompute=Recompute.MLP), ["recompute_enc"]),
    "recompute of attention": (with_layer(plan(), recompute=Recompute.ATTENTION), ["recompute_enc"]),
    "recompute of the MLP next to whole layers": (
        with_layer(recomputing(plan(), 0), recompute=Recompute.SUBLAYER),
        ["recompute_enc"],
    ),
    "a short stage between others": (
        replace(plan(pp=4, chunks=4, world_size=4), stages=(2, 1, 2, 2), layers=plan().layers[:1] * 7),
        ["pp_division"],
    ),
    "recompute of the first layers behind an empty one": (
        replace(recomputing(plan(pp=2, chunks=2), 0, 1), stages=(1, 3)),
        ["checkpoint"],
    ),
    "chunks of two stages": (
        replace(plan(pp=2, chunks=8, world_size=2), stages=(1,) * 4, chunks=2),
        ["virtual_pp_deg"],
    ),
    "chunks of few micro-batches": (
        replace(plan(pp=4, chunks=4, world_size=4), stages=(1,) * 8, layers=plan().layers[:1] * 8, chunks=2),
        ["virtual_pp_deg"],
    ),
    "context parallelism without sharding": (plan(global_cp_deg=2), ["cp_sizes_enc"]),
    "experts that are not sharded": (plan(global_ep_deg=4), ["dp_types_enc"]),
    "experts that are split": (
        plan(global_ep_deg=4, global_tp_of_ep_deg=2, default_dp_type="zero2"),
        ["tp_of_ep_sizes_enc"],
    ),
    "experts of several degrees": (with_layer(plan(global_ep_deg=4, default_dp_type="zero2"), ep=2), ["ep_sizes_enc"]),
    "fewer ranks of experts than of tensor parallelism": (
        plan(tp=4, global_ep_deg=2, default_dp_type="zero2"),
        ["ep_sizes_enc"],
    ),
    "gpipe": (plan(pp=2, chunks=2, pipeline_type="gpipe"), ["pipeline_type"]),
    "zero3 in a pipeline": (plan(pp=2, chunks=2, sdp=True), ["dp_types_enc"]),
    "zero3 with tp": (plan(tp=2, sdp=True), ["dp_types_enc"]),
}


@pytest.mark.parametrize(("of", "fields"), REFUSED.values(), ids=REFUSED)
def test_what_it_cannot_say_is_named_field_by_field(of, fields):
    with pytest.raises(UserError) as caught:
        fleet_arguments(of)
    assert [fault.partition(":")[0] for fault in caught.value.faults] == fields


def test_what_its_model_lacks_is_named():
    with pytest.raises(UserError, match=r"^vtp: "):
        fleet_arguments(plan(tp=2), MODEL)  # a vocabulary of 1001
    with pytest.raises(UserError, match=r"^tp_sizes_enc: "):
        fleet_arguments(plan(tp=8), replace(MODEL, vocab_size=1000))


def test_a_note_says_where_ranks_differ():
    assert "ranks of a pipeline" in fleet_notes(plan(pp=2, chunks=2))[0] and not fleet_notes(plan(tp=2))
    assert not fleet_notes(plan(pp=2, chunks=2, default_dp_type="zero2"))  # pp_first has the plan's order


def test_layers_without_experts_need_the_model():
    mixed = with_layer(plan(global_ep_deg=4, default_dp_type="zero2"), ep=1)
    with pytest.raises(UserError, match="give --model"):
        fleet_arguments(mixed)
    model = replace(MODEL, family="qwen3_moe", experts=8, experts_per_token=2, expert_size=32, vocab_size=1000)
    assert fleet_arguments(mixed, replace(model, dense_layers=(3,)))["expert_model_parallel_size"] == 4
    with pytest.raises(UserError, match="ep_sizes_enc: PaddleFleet has one for all layers, the plan has 4, 1;"):
        fleet_arguments(mixed, model)


def test_mtp_is_written_for_models_that_may_have_it():
    family = replace(MODEL, family="deepseek_v3", vocab_size=1000)
    assert fleet_arguments(plan(), family)["num_nextn_predict_layers"] == 0
    written = fleet_arguments(replace(plan(pp=2, chunks=2), stages=(2, 2)), replace(family, mtp_layers=1))
    assert (written["num_nextn_predict_layers"], written["enable_mtp_magic_send"]) == (1, True)
    assert (written["num_empty_layers_add_in_head"], written["num_empty_layers_add_in_tail"]) == (0, 1)
    with pytest.raises(UserError, match="num_nextn_predict_layers: MTP with some layers that recompute"):
        fleet_arguments(with_layer(plan(), recompute=Recompute.FULL), replace(family, mtp_layers=1))
    assert "num_nextn_predict_layers" not in fleet_arguments(plan(), replace(MODEL, vocab_size=1000))


def test_paddleformers_has_no_lists_and_no_empty_layers():
    for of, field in (
        (with_layer(plan(), recompute=Recompute.SUBLAYER), "recompute_enc"),
        (replace(plan(pp=2, chunks=2), stages=(3, 1)), "pp_division"),
        (plan(global_ep_deg=4, default_dp_type="zero2"), "ep_sizes_enc"),
    ):
        with pytest.raises(UserError, match=f"^{field}: "):
            fleet_arguments(of, program=FORMERS)
    assert "hybrid_parallel_topo_order" not in fleet_arguments(plan(), program=FORMERS)


@given(valid_plans())
def test_any_plan_is_written_in_published_words_or_refused_by_fields_of_its_file(of):
    try:
        arguments = fleet_arguments(of)
    except UserError as error:
        assert {fault.partition(":")[0] for fault in error.faults} <= set(StrategyFile.model_fields)
        return
    read = yaml.safe_load(yaml.safe_dump(arguments))
    types = FLEET_ALONE | {name: kind for name, (_, kind, _) in PUBLISHED.items()}
    assert all(type(value) is TYPES[types[name]] for name, value in read.items())
    # As PaddleFleet counts its ranks.
    splits = read["tensor_model_parallel_size"] * read["pipeline_model_parallel_size"]
    assert of.world_size % splits == 0
    assert read.get("sharding_parallel_size", of.world_size // splits) == of.world_size // splits
    samples = read["per_device_train_batch_size"] * read["gradient_accumulation_steps"] * of.world_size // splits
    assert samples == of.global_batch * read.get("context_parallel_size", 1)
    assert not (read["pipeline_model_parallel_size"] > 1 and read["sharding"] in ("stage2", "stage3"))


@pytest.mark.slow
def test_the_arguments_are_those_of_the_published_package(tmp_path: Path):
    words = ["-m", "pip", "download", "--quiet", "--no-deps", f"paddleformers=={VERSION}", "--dest", str(tmp_path)]
    if subprocess.run([sys.executable, *words], capture_output=True, timeout=600).returncode:
        pytest.skip("the package cannot be had here")
    found = {}
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as package:
        for name, path in CLASSES.items():
            tree = ast.parse(package.read(path))
            kind = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
            for line in kind.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.value, ast.Call):
                    given_ = {word.arg: word.value for word in line.value.keywords}
                    default = given_.get("default", ast.Constant(None))
                    constant = ast.literal_eval(default) if not isinstance(default, (ast.Name, ast.BinOp)) else ...
                    found[line.target.id] = (name, ast.unparse(line.annotation), constant)
    assert {name: found.get(name) for name in PUBLISHED} == PUBLISHED
