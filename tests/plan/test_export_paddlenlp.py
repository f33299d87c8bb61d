"""A plan in stock PaddleNLP's words: fields that these can express, and an error that names the others."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from plans import MODEL, plan, recomputing, valid_plans, with_layer

from paddlenlp_galvatron.base.errors import UserError
from paddlenlp_galvatron.plan import Assumptions, DataParallel, Precision, Recompute
from paddlenlp_galvatron.plan.export import as_flags, stock_arguments, stock_notes
from paddlenlp_galvatron.plan.fields import StrategyFile

# Samples a rank and micro-batch, micro-batches, and what stands behind them.
PRINTED = {
    "data parallel": (plan(chunks=2), "1 2"),
    "tensor parallel": (plan(tp=4), "8 1 --tensor_parallel_degree 4"),
    "Megatron-SP": (plan(tp=4, sp=True), "8 1 --tensor_parallel_degree 4 --sequence_parallel true"),
    "Megatron-SP without tp": (plan(sp=True), "2 1"),
    "Ulysses": (plan(tp=2, use_ulysses=True), "4 1 --sep_parallel_degree 2"),
    "pipeline": (plan(tp=2, pp=2, chunks=4), "2 4 --tensor_parallel_degree 2 --pipeline_parallel_degree 2"),
    "interleaved": (
        replace(plan(pp=2, chunks=4), stages=(1, 1, 1, 1), chunks=2),
        "1 4 --pipeline_parallel_degree 2 --virtual_pp_degree 2",
    ),
    "zero2, gradients summed first": (
        plan(pp=2, chunks=4, default_dp_type="zero2"),
        "1 4 --pipeline_parallel_degree 2 --sharding stage1 --sharding_parallel_degree 4",
    ),
    "zero2": (
        plan(tp=2, default_dp_type="zero2"),
        "4 1 --tensor_parallel_degree 2 --sharding stage2 --sharding_parallel_degree 4",
    ),
    "zero3 in parts": (plan(sdp=True, global_sharding_deg=4), "2 1 --sharding stage3 --sharding_parallel_degree 4"),
    "zero3": (plan(sdp=True), "2 1 --sharding stage3 --sharding_parallel_degree 8"),
    "zero3 that shards nothing": (plan(tp=8, sdp=True), "16 1 --tensor_parallel_degree 8"),
    "recompute": (plan(global_checkpoint=True), "2 1 --recompute true --recompute_granularity full"),
    "recompute of some layers": (
        recomputing(plan(), 1, 3),
        "2 1 --recompute true --recompute_granularity full --no_recompute_layers 0 2",
    ),
    "recompute of attention in some layers": (
        with_layer(plan(), recompute=Recompute.ATTENTION),
        "2 1 --recompute true --recompute_granularity core_attn --no_recompute_layers 0 1 2",
    ),
    "bf16": (
        plan(assumed=Assumptions(mixed_precision=Precision.BF16, seq_length=128)),
        "2 1 --bf16 true --fp16_opt_level O2",
    ),
}


@pytest.mark.parametrize(("of", "flags"), PRINTED.values(), ids=PRINTED)
def test_what_stock_paddlenlp_can_say_is_written(of, flags):
    per_device, accumulation, *rest = flags.split()
    assert " ".join(as_flags(stock_arguments(of))).split() == [
        *("--per_device_train_batch_size", per_device, "--gradient_accumulation_steps", accumulation),
        *("--max_seq_length", "128", *rest),
    ]


REFUSED = {
    "degrees": (with_layer(plan(tp=2), degree=4), ["tp_sizes_enc"]),
    "Ulysses in a layer": (with_layer(plan(tp=2), ulysses=True), ["use_sp"]),
    "ZeRO in a layer": (with_layer(plan(), dp_type=DataParallel.ZERO3), ["dp_types_enc"]),
    "parts in a layer": (with_layer(plan(sdp=True), sharding=2), ["sharding_sizes_enc"]),
    "parts of the vocabulary": (
        replace(plan(sdp=True), vocab=replace(plan(sdp=True).vocab, sharding=2)),
        ["vsharding"],
    ),
    "strided": (plan(tp=2, global_tp_consec=False), ["tp_consecutive_flags"]),
    "vocabulary": (plan(tp=2, vocab_tp=4), ["vtp"]),
    "uneven stages": (replace(plan(pp=2, chunks=2), stages=(3, 1)), ["pp_division"]),
    "few micro-batches of chunks": (replace(plan(pp=2, chunks=2), stages=(1, 1, 1, 1), chunks=2), ["virtual_pp_deg"]),
    "gpipe": (plan(pp=2, chunks=2, pipeline_type="gpipe"), ["pipeline_type"]),
    "zero3 in a pipeline": (plan(pp=2, chunks=2, sdp=True), ["dp_types_enc"]),
    "zero3 with tp": (plan(tp=2, sdp=True), ["dp_types_enc"]),
    "sharded Ulysses": (plan(tp=2, chunks=2, use_ulysses=True, default_dp_type="zero2"), ["use_sp"]),
    "recompute of the MLP": (with_layer(plan(), recompute=Recompute.MLP), ["recompute_enc"]),
    "two granularities": (with_layer(plan(global_checkpoint=True), recompute=Recompute.ATTENTION), ["recompute_enc"]),
    "two": (replace(plan(tp=2, pp=2, chunks=2, vocab_tp=1), stages=(3, 1)), ["vtp", "pp_division"]),
}


@pytest.mark.parametrize(("of", "fields"), REFUSED.values(), ids=REFUSED)
def test_what_it_cannot_say_is_named_field_by_field(of, fields):
    with pytest.raises(UserError) as caught:
        stock_arguments(of)
    assert [fault.partition(":")[0] for fault in caught.value.faults] == fields


@pytest.mark.parametrize(
    ("of", "changed", "field"),
    [
        (plan(tp=2), {}, "vtp"),  # a vocabulary of 1001
        (plan(tp=8), {"vocab_size": 1000}, "tp_sizes_enc"),
        (plan(tp=2, use_ulysses=True), {}, "use_sp"),
        (plan(tp=8, use_ulysses=True), {"family": "llama"}, "use_sp"),
        (recomputing(plan(pp=2, chunks=2), 0), {}, "checkpoint"),
    ],
)
def test_what_its_model_lacks_is_named(of, changed, field):
    stock_arguments(of)
    with pytest.raises(UserError, match=f"^{field}: "):
        stock_arguments(of, replace(MODEL, **changed))


def test_llama_has_what_qwen2_lacks():
    llama = replace(MODEL, family="llama", vocab_size=1000)
    for of in (plan(tp=8), plan(tp=4, use_ulysses=True), recomputing(plan(pp=2, chunks=2), 0)):
        assert stock_arguments(of, llama) == stock_arguments(of)


def test_a_note_says_where_ranks_or_results_differ():
    assert not stock_notes(plan(tp=2)) and not stock_notes(plan(pp=2, chunks=2, default_dp_type="zero2"))
    assert "ranks of a pipeline" in stock_notes(plan(pp=2, chunks=2))[0]
    assert "ranks of a pipeline" in stock_notes(plan(pp=2, chunks=2, default_dp_type="zero2", global_sharding_deg=2))[0]
    assert "amp_master_grad" in stock_notes(plan(sdp=True, global_sharding_deg=2))[0]
    assert "alltoall" in stock_notes(plan(tp=2, use_ulysses=True))[0]
    assert "core_attn" in stock_notes(with_layer(plan(), recompute=Recompute.ATTENTION))[0]


@given(valid_plans())
def test_any_plan_is_written_or_refused_by_fields_of_its_file(of):
    try:
        arguments = stock_arguments(of)
    except UserError as error:
        assert {fault.partition(":")[0] for fault in error.faults} <= set(StrategyFile.model_fields)
        return
    kinds = ("tensor_parallel_degree", "sep_parallel_degree", "pipeline_parallel_degree")
    splits = [int(arguments.get(kind, 1)) for kind in kinds]
    data_parallel = of.world_size // (splits[0] * splits[1] * splits[2])
    assert arguments.get("sharding_parallel_degree", data_parallel) == (of.layers[0].sharding or data_parallel)
    samples = arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"] * data_parallel
    assert samples == of.global_batch


def test_paddlenlp_reads_the_flags_as_they_are_meant():
    pytest.importorskip("paddlenlp")
    from paddlenlp.trainer import PdArgumentParser, TrainingArguments
    from paddlenlp.transformers.configuration_utils import llmmetaclass

    @dataclass
    @llmmetaclass
    class Arguments(TrainingArguments):  # as PaddleNLP's run_pretrain.py has them
        max_seq_length: int = 1024

    parser = PdArgumentParser(Arguments)
    for of, _ in PRINTED.values():
        arguments = stock_arguments(of)
        read = parser.parse_args(["--output_dir", "output", *" ".join(as_flags(arguments)).split()])
        assert {name: getattr(read, name) for name in arguments} == arguments
