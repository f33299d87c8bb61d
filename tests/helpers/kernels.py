"""Kernels that a pass may launch, and why none of them takes memory from a GPU by itself or waits for all of it.

Read in Paddle's sources under paddle/phi/kernels at the commits named, of 3.x: newer and older than 3.3.1's. Memory
"of the allocator" is that of `dev_ctx.Alloc`, which takes from the GPU only missing memory. Kernels that
only GPUs have (flash attention, fused ones, batched products) are not seen here: `galvatron gpu-check` runs them.

Not to be added: argsort, sort, unique, nonzero and masked_select allocate, free or copy to the host;
put_along_axis_grad clears its output in CUDA's own queue, which waits for all others (0ab6998c).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from paddle.base import core

from paddlenlp_galvatron.runtime.pipeline import Pipeline

LAUNCH = " kernel launch"  # in Paddle's own trace, behind the name of a kernel: those of backward, too


class Reason(NamedTuple):
    kernels: str
    why: str
    read: dict[str, str]  # files, and the commits


ALLOWED = [
    Reason(
        "add subtract multiply divide div_scale floor_divide remainder scale clip cast pow rsqrt exp log sigmoid silu "
        "log1p log1p_grad fmax equal not_equal less_than greater_than greater_equal logical_and where full full_like "
        "logsigmoid relu pow_grad exp_grad rsqrt_grad sigmoid_grad silu_grad logsigmoid_grad relu_grad where_grad",
        "one launch of ElementwiseKernel or BroadcastKernel in the context's stream; the output of the allocator",
        {"gpu/where_kernel.cu": "02a5e4e0", "gpu/full_kernel.cu": "01e3d7c7", "gpu/scale_kernel.cu": "00816fcb"}
        | {"gpu/cast_kernel.cu": "04fac4f2", "kps/compare_kernel.cu": "0610216b"}
        | {"kps/elementwise_kernel.cu": "06872305"}
        | {"gpu/where_grad_kernel.cu": "06dc365f", "gpu/activation_grad_kernel.cu": "011b2b6e"},
    ),
    Reason(
        "sum mean max sum_grad mean_grad add_grad subtract_grad multiply_grad divide_grad expand_grad tile_grad",
        "reductions in two launches at most, memory between them of the allocator",
        {"funcs/reduce_function.h": "013e5963", "gpu/expand_grad_kernel.cu": "0658fc7e"},
    ),
    Reason(
        "reshape flatten squeeze unsqueeze view_shape expand tile slice strided_slice unbind transpose assign empty "
        "reshape_grad unsqueeze_grad transpose_grad slice_grad",
        "views, or copies and fills in the context's stream",
        {"gpu/transpose_kernel.cu": "00816fcb", "../core/tensor_utils.cc": "04bb1a9b"},
    ),
    Reason(
        "embedding index_select scatter scatter_nd_add arange_tensor",
        "a copy at most and one launch in the context's stream; arange's bounds are the host's",
        {"gpu/embedding_kernel.cu": "0094b980", "gpu/index_select_kernel.cu": "0315bcde"}
        | {"gpu/scatter_nd_add_kernel.cu": "0ab6998c", "funcs/scatter.cu.h": "037a3aa1"}
        | {"gpu/scatter_kernel.cu": "0976e0f2", "gpu/arange_kernel.cu": "0678a564"},
    ),
    Reason(
        "embedding_grad",
        "an asynchronous memset and one launch in the context's stream",
        {"gpu/embedding_grad_kernel.cu": "0315bcde"},
    ),
    Reason(
        "take_along_axis take_along_axis_grad put_along_axis",
        "one launch, marks of the allocator; sorted only under FLAGS_cudnn_deterministic, by the newest versions",
        {"gpu/take_along_axis_grad_kernel.cu": "0a056fa6", "gpu/put_along_axis_kernel.cu": "01fbd77c"}
        | {"funcs/gather_scatter_functor.cu": "0ab6998c"},
    ),
    Reason("cumsum", "block scans, their transposed copies of the allocator", {"gpu/cum_kernel.cu": "003ba575"}),
    Reason(
        "topk",
        "one launch; sorts by cub from 128 columns and a quarter of them; other indices of NaN than on CPU: -1",
        {"gpu/top_k_kernel.cu": "019829f2", "funcs/top_k_function_cuda.h": "3.3.1"},
    ),
    Reason(
        "concat stack split split_with_num concat_grad",
        "one launch; addresses of more than 128 parts are copied in the context's stream, to memory of the allocator",
        {"funcs/concat_and_split_functor.cu": "06b18f26", "gpu/stack_kernel.cu": "01055af3"}
        | {"gpu/split_kernel.cu": "00dbf03d"},
    ),
    Reason(
        "set_value set_value_with_tensor",
        "copies and Eigen's kernels in the context's stream; a number of the host's is 4 bytes, copied in it, too",
        {"impl/set_value_kernel_impl.h": "010da338"},
    ),
    Reason("swiglu swiglu_grad", "one launch in the context's stream", {"gpu/swiglu_kernel.cu": "0ab6998c"}),
    Reason(
        "matmul matmul_grad softmax softmax_grad",
        "cuBLAS and cuDNN in the context's stream, with handles and a workspace that the first step makes; not read",
        {},
    ),
]
NAMES = frozenset(name for reason in ALLOWED for name in reason.kernels.split())


class OtherKernel(AssertionError):
    """A pass launched a kernel that is not known to leave its device alone."""


def forbid_other_kernels() -> None:
    """From now on, in this process, in every `Pipeline.run` and `Pipeline.evaluate`."""
    Pipeline.run, Pipeline.evaluate = map(_checked, (Pipeline.run, Pipeline.evaluate))  # type: ignore[method-assign]


def _checked(run: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        options = core.ProfilerOptions()
        options.trace_switch = 1  # of the host
        profiler = core._Profiler.create(options, [])
        profiler.prepare()
        profiler.start()
        out = run(*arguments, **named)
        launched: set[str] = set()
        result = profiler.stop()  # its nodes live as long
        for root in result.get_data().values():
            _collect(root, launched)
        if others := launched - NAMES:
            raise OtherKernel(f"{sorted(others)}: read their source for GPUs, then add them to {__name__}.ALLOWED")
        return out

    return call


def _collect(node: Any, launched: set[str]) -> None:
    """The names of kernels below a node of Paddle's trace."""
    if node.name.endswith(LAUNCH):
        launched.add(node.name.removesuffix(LAUNCH))
    for child in node.children_node:
        _collect(child, launched)
