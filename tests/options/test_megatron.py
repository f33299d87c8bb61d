"""Scripts of Megatron-LM's examples, and other programs' files."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_model import small_config

from paddlenlp_galvatron.base import UserError
from paddlenlp_galvatron.model import load_model
from paddlenlp_galvatron.options.group import read_words
from paddlenlp_galvatron.options.uniform import DegreeOptions, UniformOptions

MODEL = small_config(layers=4, hidden=64, inner=128, num_key_value_heads=2, vocab=256, length=64, rope_theta=1000000.0)
MIXTRAL = MODEL | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
DEEPSEEK = {
    **MODEL,
    **{"model_type": "deepseek_v2", "num_key_value_heads": 4, "moe_intermediate_size": 32, "rope_theta": 1000000.0},
    **{"kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    **{"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    **{"scoring_func": "softmax", "topk_method": "greedy", "n_group": 1, "topk_group": 1},
}
# The arguments of examples/ that say what our layers do, and those of a run.
LAYERS = """
--use-mcore-models --num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4
--group-query-attention --seq-length 64 --max-position-embeddings 64 --normalization RMSNorm
--position-embedding-type rope --rotary-base 1000000 --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu
--init-method-std 0.01 --untie-embeddings-and-output-weights --disable-bias-linear --attention-backend fused
"""
RUN = """
--micro-batch-size 1 --global-batch-size 8 --lr 1e-4 --train-iters 500 --lr-decay-iters 320 --lr-decay-style cosine
--min-lr 1.0e-5 --weight-decay 0.1 --lr-warmup-iters 50 --bf16 --use-distributed-optimizer
--clip-grad 1.0 --optimizer adam --sequence-parallel --overlap-grad-reduce --overlap-param-gather
--tokenizer-type Llama2Tokenizer --tokenizer-model t.model --data-path random --split 99990,8,2 --log-interval 1
--save-interval 10000 --eval-interval 1000 --eval-iters 10
--save out --load out --tensorboard-dir tb --no-load-optim --no-load-rng --ckpt-format torch_dist
--optimizer-cpu-offload --optimizer-offload-fraction 1.0
"""
EXPERTS = """
--num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-grouped-gemm
--moe-token-dispatcher-type alltoall --expert-model-parallel-size 2 --no-position-embedding
--no-masked-softmax-fusion
"""
LATENTS = """
--multi-latent-attention --qk-layernorm --q-lora-rank 0 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8
--v-head-dim 16 --norm-epsilon 1e-6 --num-experts 8 --moe-layer-freq 1 --moe-ffn-hidden-size 32
--moe-shared-expert-intermediate-size 64 --moe-router-load-balancing-type seq_aux_loss --moe-router-topk 2
--moe-router-pre-softmax --moe-router-group-topk 1 --moe-router-num-groups 1 --moe-router-score-function softmax
--moe-router-dtype fp32 --rotary-scaling-factor 40 --mscale 0.707 --no-check-for-nan-in-loss-and-grad
--no-rope-fusion --cross-entropy-fusion-impl te --manual-gc-interval 10 --dist-ckpt-strictness log_all
--log-params-norm
"""
QWEN = """
--norm-epsilon 1e-6 --use-rotary-position-embeddings --add-qkv-bias --rotary-percent 1.0
--rotary-seq-len-interpolation-factor 1 --max-padding-length 64 --tensorboard-queue-size 1 --extra-vocab-size 293
--patch-tokenizer-type Qwen2Tokenizer --dataset MMAP --train-mode pretrain --transformer-impl transformer_engine
--recompute-method uniform --recompute-num-layers 1 --recompute-granularity full --context-parallel-size 1
--num-layers-per-virtual-pipeline-stage 1 --log-throughput --num-workers 8 --num-query-groups 2
"""
PIPELINE = "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2"


@pytest.fixture
def dry_run(galvatron, tmp_path):

    def run(model: dict, *words: str):
        Path("model.json").write_text(json.dumps(model))
        return galvatron(
            "train", "--model", "model.json", "--nproc", 4, "--device", "cpu", "--dry_run", *" ".join(words).split()
        )

    return run


@pytest.mark.parametrize(
    ("model", "words"),
    [(MODEL, ()), (MIXTRAL, (EXPERTS,)), (DEEPSEEK, (LATENTS,)), (MODEL | {"model_type": "qwen2"}, (QWEN,))],
    ids=["train_llama3_8b", "train_mixtral_8x7b", "train_deepseekv2", "run_mcore_qwen"],
)
def test_a_script_of_the_examples_starts(dry_run, model, words):
    ran = dry_run(model, LAYERS, RUN, PIPELINE, *words)
    assert ran.code == 0, ran.err
    assert "no effect here: --use-mcore-models" in ran.err and "--rotary-base" not in ran.err
    assert "Megatron-LM's defaults are others: --seed 1234; give them to be sure" in ran.err


def test_a_blend_stands_in_words_of_its_own():
    (blend, nproc), rest = read_words(
        ["plan.json", "--data-path", "0.7", "a", "0.3", "b", "--nproc", "2"], {"input_dir": False, "nproc": False}
    )
    assert (blend, nproc, rest) == (("input_dir", "0.7 a 0.3 b"), ("nproc", "2"), ["plan.json"])


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (
            "--fp8-format hybrid --fp8-amax-history-len 1024",
            "fp8-format: hybrid is not supported: .*FP8 is not trained",
        ),
        ("--normalization LayerNorm", "normalization: LayerNorm is not supported: norms are RMSNorm"),
        ("--position-embedding-type learned_absolute", "position-embedding-type: learned-absolute is not supported"),
        ("--moe-aux-loss-coeff 1e-2", "moe-aux-loss-coeff: 1e-2 is not supported: .*router-aux-loss-coef"),
        ("--train-samples 1000", "train-samples: 1000 is not supported: .*train-iters"),
        ("--lr-warmup-samples 10", "lr-warmup-samples: 10 is not supported: .*lr-warmup-iters"),
        ("--rampup-batch-size 16 16 5859375", "rampup-batch-size: 16 16 5859375 is not supported: every step has"),
        ("--recompute-activations", "recompute-activations: true is not supported: a plan file's recompute-enc"),
        ("--train-mode finetune", "train-mode: finetune is not supported: say task sft"),
        ("--optimizer-offload-fraction 0.5", "optimizer-offload-fraction: 0.5 is not supported: all of the optimizer"),
        ("--decoder-first-pipeline-num-layers 1", "decoder-first-pipeline-num-layers: 1 is not .*pp-division gives"),
        ("--rotary-base 10000", "rotary-base: is 10000, but the model has 1000000.0"),
        ("--num-experts 16", "num-experts: is 16, but the model has 0"),
        ("--moe-router-pre-softmax", "moe-router-pre-softmax: is true, but the model has 0"),
        ("--kv-channels 32", "kv-channels: is 32, but the model has 16"),
        ("--attention-dropout 0.1", "attention-dropout: is 0.1, but the model has 0.0"),
        ("--hidden-dropout 0.1", "hidden-dropout: 0.1 is not supported"),
        ("--num-layers-per-virtual-pipeline-stage 3", "chunks of 3 do not make up the 4 layers in 2 stages"),
        ("--num-layers-per-virtual-pipeline-stage 1 --vpp 4", "in 2 stages of 4 chunks"),
    ],
)
def test_what_a_script_asks_for_and_is_not_done_is_a_line(dry_run, words, fault):
    ran = dry_run(MODEL, LAYERS, RUN, PIPELINE, words)
    [error] = [line for line in ran.err.splitlines() if not line.startswith("note: ")]
    assert ran.code == 2 and re.search(fault, error.replace("_", "-")), ran.err


@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 8), st.integers(0, 3))
def test_micro_batch_and_global_batch_give_the_number_of_micro_batches(micro, dp, chunks, more):
    """Megatron-LM: num_micro_batches = global batch / (micro-batch x data-parallel ranks)."""
    values = {"per_device_train_batch_size": micro, "pipeline_parallel_degree": 2}
    uniform = UniformOptions(global_train_batch_size=micro * dp * chunks + more)
    options = DegreeOptions.from_values(values)
    if more % (micro * dp):
        with pytest.raises(UserError, match=r"global_train_batch_size: .* no multiple of a micro-batch's"):
            options.onto(uniform, 2 * dp)
    else:
        assert options.onto(uniform, 2 * dp).chunks == chunks + more // (micro * dp)


@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 4), st.integers(0, 3))
def test_the_size_of_a_chunk_gives_the_number_of_chunks(stages, chunks, size, more):
    """Megatron-LM: chunks of a stage = layers / stages / layers of a chunk."""
    shape = replace(load_model("llama3-8b"), layers=stages * chunks * size + more)
    options = UniformOptions.from_mapping(
        {"pp_deg": stages, "num-layers-per-virtual-pipeline-stage": size, "global_train_batch_size": stages}
    )
    assert options.given
    if more % (stages * size) or (stages == 1 and shape.layers > size):
        with pytest.raises(UserError, match=r"do not make up the \d+ layers|chunks of the only stage"):
            options.plan(shape.layers, stages)
    else:
        assert options.plan(shape.layers, stages).chunks == shape.layers // (stages * size)


@pytest.mark.parametrize(
    ("program", "content"),
    [
        ("LLaMA-Factory", {"stage": "sft", "finetuning_type": "lora", "template": "llama3", "learning_rate": 1e-4}),
        *(
            ("LLaMA-Factory", dict.fromkeys(f"{names} model_name_or_path trust_remote_code".split(), "x"))
            for names in (
                "stage do_train finetuning_type lora_target dataset template cutoff_len tokenized_path",  # preprocess
                "stage do_predict finetuning_type eval_dataset template predict_with_generate",  # predict
                "finetuning_type adapter_name_or_path task template lang n_shot",  # eval
                "adapter_name_or_path template export_dir export_size export_device",  # merge_lora
                "template infer_backend",  # inference
                "model model_class template kernel_config quant_config dist_config train_dataset cutoff_len",  # v1
                "model model_class peft_config dist_config train_dataset micro_batch_size sample_backend",  # v1, LoRA
            )
        ),
        (
            "DeepSpeed",
            {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}},
        ),
        ("Accelerate", {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "fsdp_config": {}}),
        ("PaddleFormers", {"train_dataset_path": "a", "train_dataset_type": "erniekit", "model_name_or_path": "b"}),
        ("PaddleFormers", {"stage": "ernie_pretrain", "sharding_parallel_size": 8, "max_seq_len": 4096}),
        ("PaddleFormers", {"stage": "PT", "fine_tuning": "full", "sharding": "stage1"}),
        ("num_layers refers to another value, ${model.layers}", {"pp_deg": 1, "num_layers": "${model.layers}"}),
        ("write the value itself", {"train": {"lr": "${optimizer.lr}"}, "save": "a/${name}"}),
        ("Galvatron's newest scripts", {"parallel": {"pp_deg": {"value": 2}}, "model": {"name": "gpt"}}),
        ("--help lists all", {"one": 1, "two": 2, "three": 3}),
    ],
)
def test_a_file_of_another_program_is_recognised(galvatron, tmp_path, program, content):
    (tmp_path / "options.json").write_text(json.dumps(content))
    ran = galvatron("train", "--config", tmp_path / "options.json", "--dry_run")
    assert ran.code == 2 and program in ran.err and len(ran.err) < 1000, ran.err
