"""The argument sets of Galvatron's scripts (1.x, 2.0, 2.4) and of its PaddleNLP port's go through as they stand.

Options that need GPUs (flash attention, `device gpu`) are refused by name on a machine without, and they alone.
"""

from __future__ import annotations

import pytest

pytest.importorskip("paddle")

from paddlenlp_galvatron.plan import Assumptions, ModelShape, Plan, Precision, uniform_plan, write_plan
from paddlenlp_galvatron.training.paddlenlp.arguments import read_words
from paddlenlp_galvatron.training.prepare import prepare

GALVATRON_MODEL = """--model_size llama-7b --set_model_config_manually 0 --set_layernum_manually 0
    --set_seqlen_manually 1
    --set_experts_manually 0 --vocab_size 32000 --hidden_size 4096 --num_hidden_layers 32 --num_attention_heads 32
    --seq_length 2048"""
GALVATRON_TRAIN = """--global_train_batch_size 32 --train-iters 20 --eval-iters 1 --lr 1.25e-6 --lr-decay-style cosine
    --min-lr 1.25e-7 --lr-warmup-fraction 0.1 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1.0e-5
    --init-method-std 0.01 --adam_weight_decay 0.01 --dropout_prob 0.1 --check_loss 0 --profile 1 --async_grad_reduce 1
    --save_profiled_memory 0 --epochs 10 --profile_type allocated --load_params 0 --profile_forward 0 --allow_tf32 1
    --exit_after_profiling 1 --shape_order SBH --reduce_in_fp32 --entropy_in_fp32 --local-rank 0 --use_fsep 0"""
GALVATRON_DATA = "--split 949,50,1 --tokenizer-type Llama2Tokenizer --tokenizer-model tokens.model --num-workers 0"
GALVATRON_PARALLEL = """--pp_deg 2 --global_tp_deg 2 --global_tp_consec 1 --global_cp_deg 1 --sdp 1
    --global_checkpoint 0
    --vocab_tp 2 --vocab_cp 1 --chunks 4 --pipeline_type pipedream_flush --default_dp_type zero2 --embed_sdp 0
    --mixed_precision bf16 --sequence-parallel --initialize_on_meta 1 --global_ep_deg 1 --global_tp_of_ep_deg 1"""
PORT_TRAIN = """--weight_decay 0.01 --warmup_ratio 0.01 --max_grad_norm 1.0 --learning_rate 3e-05
    --min_learning_rate 3e-06
    --max_steps 25 --logging_steps 1 --continue_training 0 --do_train true --do_eval false --do_predict false
    --disable_tqdm true --skip_profile_timer false --skip_memory_metrics 0 --save_total_limit 2 --device cpu
    --dataloader_num_workers 1 --distributed_dataloader 0 --enable_auto_parallel 1"""
PORT_MODEL = """--model_name_or_path llama --tokenizer_name_or_path llama --model_type llama_fine_grained_final
    --num_hidden_layers 16 --intermediate_size 11008 --vocab_size 32000 --hidden_size 4096 --seq_length 1024
    --num_attention_heads 32 --num_key_value_heads 32"""
PORT_CONFIG = """--per_device_train_batch_size 2 --gradient_accumulation_steps 32 --recompute false
    --recompute_use_reentrant true --recompute_granularity full --pp_recompute_interval 0 --bf16 true
    --fp16_opt_level O2 --amp_master_grad true --amp_custom_black_list reduce_sum c_softmax_with_cross_entropy
    --amp_custom_white_list lookup_table lookup_table_v2"""
PORT_PARALLEL = """--to_static 1 --sharding_parallel_degree 2 --sharding stage2 --tensor_parallel_degree 4
    --sequence_parallel true --pipeline_parallel_degree 1 --virtual_pp_degree 1 --pipeline_schedule_mode 1F1B
    --sep_parallel_degree 1 --pipeline_parallel_config enable_send_recv_overlap
    --data_parallel_config enable_allreduce_avg_in_gradinent_scale gradient_sync_after_accumulate
    --sharding_parallel_config enable_overlap enable_release_grads --tensor_parallel_config enable_mp_async_allreduce"""
PORT_FUSED = """--fuse_attention_ffn true --fuse_attention_qkv true --fused_linear_param_grad_add 1
    --fuse_sequence_parallel_allreduce true --use_fused_rope true --use_fused_rms_norm true
    --enable_linear_fused_grad_add true"""
PORT_DATA = "--split 949,50,1 --max_seq_length 1024"
PORT_RUNTIME = """--profile_time_flag 1 --profile_memory_flag 1 --profile_forward_only 0 --save_time_flag 0
    --save_memory_flag 0"""
PORT_GRANULARITY = "--granularity_type fine_grained --usp_flag 0 --sharding_stage_level 2"
PORT = [PORT_TRAIN, PORT_MODEL, PORT_CONFIG, PORT_PARALLEL, PORT_FUSED, PORT_DATA, PORT_RUNTIME]
PROFILE = """--set_model_config_manually 0 --vocab_size 32000 --hidden_size 4096 --num_attention_heads 32
    --seq_length 2048 --layernum_min 1 --layernum_max 2 --max_tp_deg 8 --profile_dp_type zero3 --mixed_precision bf16
    --sequence_parallel --shape_order SBH --make-vocab-size-divisible-by 128 --profile_unit all --use-flash-attn
    --use-fused-rmsnorm --use-fused-rotary-pos-emb --use-fused-swiglu"""
HARDWARE = """--num_nodes 1 --num_gpus_per_node 8 --backend torch --nccl_test_dir ../nccl-tests
    --mpi_path /usr/local/mpi/
    --start_mb 16 --end_mb 256 --scale 2 --avg_or_min_or_first first --max_pp_deg 8 --max_tp_size 8
    --master_addr $MASTER_ADDR --master_port $MASTER_PORT --envs NCCL_DEBUG=WARN NCCL_IB_DISABLE=0 --node_rank $RANK
    --overlap_time_multiply 4"""
SEARCH = """--min_bsz 16 --max_bsz 1024 --bsz_scale 16 --settle_bsz 64 --recommend_min_bsz 0 --search_space full
    --sp_space tp+sp --disable_dp 0 --disable_tp 0 --disable_pp 0 --disable_sdp 0 --disable_ckpt 0 --disable_vtp 0
    --disable_tp_consec 1 --max_tp_deg 8 --max_pp_deg 16 --fine_grained_mode 1 --profile_mode static
    --sequence_parallel --num_nodes 1 --num_gpus_per_node 8 --memory_constraint 34 --mixed_precision bf16
    --pipeline_type pipedream_flush --default_dp_type zero2 --embed_sdp 0 --use_pipeline_costmodel 1
    --costmodel_coe 1.0 --make-vocab-size-divisible-by 128 --parallel_search --worker 0"""
SEARCH_24 = """--async_grad_reduce 1 --time_profile_mode static --memory_profile_mode static
    --profile_granularity together --zero_with_slight_noise 1 --estimate_tp_time_type fit --disable_sp 0 --disable_cp 1
    --disable_fsdp 0 --disable_embedding_lmhead_tp 0 --disable_embedding_lmhead_sp 0 --max_sp_deg 8 --max_cp_deg 8"""
PORT_SEARCH = """--time_profile_mode static --memory_profile_mode static --num_layertype 1 --hidden_size_list 4096
    --layernum_list 32 --seqlen_list 2048 --profile_gpu_num 8 --search_granularity fine-grained --world_size 8
    --min_bsz 64 --max_bsz 64 --bsz_step 1 --max_tp_size 8 --max_pp_size 4 --mixed_precision_type bf16
    --memory_upper_limit 95 --sp_space tp --layernum 32 --disable_sdp 0 --disable_vtp 0 --parallel_search 0"""


def split(*sets: str) -> list[str]:
    return [word for text in sets for word in text.split()]


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("NUM_NODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "RANK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def run_of(*words: str) -> tuple[Plan, ModelShape]:
    """The plan and the model that options of training ask for on 8 ranks."""
    return prepare(read_words(words), 8).settings.load_plan()


def test_galvatrons_training(place, galvatron):
    sets = split(GALVATRON_MODEL, GALVATRON_TRAIN, GALVATRON_PARALLEL, GALVATRON_DATA)
    ran = galvatron("train", "--dry_run", "--nproc", "8", *sets)
    assert ran.code == 0, ran.err
    assert "note: hidden_size" in ran.out
    assert "--adam_weight_decay (--weight_decay holds)" in ran.err and "--dropout_prob (Llama" in ran.err
    plan, shape = run_of(*sets)
    assert (len(plan.stages), plan.layers[0].tp, plan.vocab.dp_type.value) == (2, 2, "zero2")
    assert shape.initializer_range == 0.01
    ran = galvatron("train", "--dry_run", "--nproc", "8", *sets, "--use-flash-attn")
    assert ran.code == 0 and "shown as on GPUs, of which this machine has none" in ran.out


@pytest.mark.parametrize("tied_to_a_plan", [False, True])
def test_the_ports_training(place, galvatron, tied_to_a_plan):
    assumed = Assumptions(True, Precision.BF16)
    write_plan(uniform_plan(layers=16, world_size=8, global_train_batch_size=8, assumed=assumed), place / "own.json")
    named = ["--fine_grained_config_path", "own.json"] if tied_to_a_plan else []
    ran = galvatron("train", "--dry_run", "--nproc", "8", *split(*PORT, PORT_GRANULARITY), *named)
    assert ran.code == 0, ran.err
    if tied_to_a_plan:
        assert "ignored: the plan own.json decides" in ran.out
        return
    plan, _ = run_of(*split(*PORT, PORT_GRANULARITY))
    assert (plan.layers[0].tp, plan.vocab.tp, plan.layers[0].dp_type.value) == (4, 4, "zero2")
    assert (plan.micro_batches, plan.global_batch) == (32, 2 * 32 * 2)


def test_profiles(place, galvatron):
    for what in ("computation", "memory"):
        more = split("--profile_mode static --profile_batch_size 8 --profile_seq_length_list 2048 --profile_type", what)
        ran = galvatron("profile", what, "--analytic", "a100", "--model_size", "llama-7b", *split(PROFILE), *more)
        assert ran.code == 0, ran.err
        assert "hidden_size, num_attention_heads, vocab_size ignored, as set_*_manually is 0" in ran.err
        more = split("--profile_mode static --profile_fixed_batch_size 8 --profile_fixed_seq_length_list 1024", what)
        ran = galvatron("profile", what, "--analytic", "a100", *split(*PORT), "--profile_type", what, *more[:-1])
        assert ran.code == 0, ran.err
        assert "--learning_rate" in ran.err and "(it is of training)" in ran.err
    assert galvatron("profile", "hardware", "--analytic", "a100", *split(HARDWARE)).code == 0


def test_searches(place, galvatron):
    assert galvatron("profile", "all", "--analytic", "a100", "--model", "llama-7b", "--seq_length", "2048").code == 0
    for sets in (
        split(GALVATRON_MODEL, SEARCH),
        split(GALVATRON_MODEL, SEARCH, SEARCH_24),
        ["--model_size", "llama-7b", *split(PORT_SEARCH)],
        split(PORT_SEARCH, "--num_attention_heads 32 --vocab_size 32000 --intermediate_size 11008 --layernum_min 1"),
    ):
        ran = galvatron("search", *sets)
        assert ran.code == 0, ran.err
    ran = galvatron("search", *split(GALVATRON_MODEL, SEARCH), "--profile_gpu_num", "64")
    assert ran.code == 2 and "profile_gpu_num: 64, but 8 are searched for" in ran.err


def test_all_mistakes_are_reported_at_once_with_the_nearest_name(galvatron):
    words = ["--globl_tp_deg", "2", "--vocab_cp", "2", "--xyz", "--dropout_prob", "0.1", "--do_train", "0"]
    ran = galvatron("train", *words)
    assert ran.code == 2
    lines = ran.err.splitlines()
    assert [line.split(":")[1].strip() for line in lines] == ["--globl_tp_deg", "--vocab_cp", "--xyz", "--do_train"]
    assert "did you mean --global_tp_deg?" in lines[0] and "--help lists all" in lines[2]
    assert "it trains; to evaluate alone" in lines[3]
