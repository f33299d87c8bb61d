"""Paddle's functions and operators take their arguments as the runtime gives them, in every version that it supports.

The tables are those of Paddle 3.1.1, 3.2.2 and 3.3.1, in which they are equal: by their Python and their headers.
"""

import inspect
import re
from pathlib import Path

import pytest

pytest.importorskip("paddle")

import paddle
from paddle.incubate.nn import functional as fused

HEADERS = Path(paddle.__file__).parent / "include/paddle/phi/api/include"
# Arguments of each function from the first on; later versions add some behind them.
FUNCTIONS = {
    paddle.nn.functional.flashmask_attention: "query key value startend_row_indices dropout causal",
    fused.fused_rms_norm: "x norm_weight norm_bias epsilon begin_norm_axis",
    fused.fused_rotary_position_embedding: "q k v sin cos position_ids use_neox_rotary_style time_major",
    fused.swiglu: "x y",
    paddle.distributed.stream.all_reduce: "tensor op group sync_op use_calc_stream",
    paddle.distributed.stream.all_gather: "tensor_or_tensor_list tensor group sync_op use_calc_stream",
    paddle.distributed.stream.reduce_scatter: "tensor tensor_or_tensor_list op group sync_op use_calc_stream",
    paddle.distributed.stream.alltoall_single: "out_tensor in_tensor out_split_sizes in_split_sizes group sync_op "
    "use_calc_stream",
    paddle.distributed.stream.broadcast: "tensor src group sync_op use_calc_stream",
    paddle.distributed.isend: "tensor dst group",
    paddle.distributed.irecv: "tensor src group",
    paddle.distributed.new_group: "ranks backend timeout nccl_comm_init_option nccl_config",
}
OPERATORS = {
    "fused_adam_": "params grads learning_rate moments1 moments2 moments2_max beta1_pows beta2_pows master_params "
    "skip_update beta1 beta2 epsilon chunk_size weight_decay use_adamw multi_precision use_global_beta_pow amsgrad",
    "c_softmax_with_cross_entropy": "logits label ignore_index ring_id rank nranks",
    "squared_l2_norm": "x",
    "flash_attn": "q k v fixed_seed_offset attn_mask dropout causal return_softmax is_test rng_name",
    "flashmask_attention": "q k v startend_row_indices fixed_seed_offset dropout causal return_softmax is_test",
    "fused_rotary_position_embedding": "q k v sin cos position_ids use_neox_rotary_style time_major rotary_emb_base",
}


@pytest.mark.parametrize(("function", "arguments"), FUNCTIONS.items(), ids=lambda one: getattr(one, "__name__", ""))
def test_a_function_takes_what_it_is_given(function, arguments):
    names = [*inspect.signature(function).parameters]
    assert names[: len(arguments.split())] == arguments.split()


def of_operator(name: str) -> list[str]:
    """Its arguments, by the C++ header of the API."""
    text = "\n".join((HEADERS / header).read_text() for header in ("api.h", "fused_api.h"))
    [arguments] = re.findall(rf"PADDLE_API [^\n]*\b{name}\(([^\n]*)\);", text)
    return re.findall(r"(\w+)(?: = [^,]*)?(?:,|$)", re.sub(r"<[^()]*?>", "", arguments))


@pytest.mark.parametrize(("name", "arguments"), OPERATORS.items())
def test_an_operator_takes_what_it_is_given(name, arguments):
    assert of_operator(name)[: len(arguments.split())] == arguments.split()


def test_what_makes_a_context_takes_store_name_rank_and_size():
    manager = paddle.base.core.CommContextManager
    documented = manager.create_gloo_comm_context.__doc__
    assert re.search(r"arg0: .*Store, arg1: str, arg2: .*[iI]nt.*, arg3: .*[iI]nt", documented)
