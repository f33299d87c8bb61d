"""All uses of Paddle beyond its public interface, except those of gloo's groups in `cpu_backend`.

Written for Paddle 3.1.1 and 3.3.1; check a new version here first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import paddle
from paddle.base import core
from paddle.base.framework import default_main_program
from paddle.base.layer_helper import LayerHelper
from paddle.distributed import fleet
from paddle.distributed.fleet.base import topology


def host_bytes() -> int:
    """Current bytes of tensors on the host."""
    return int(core.host_memory_stat_current_value("Allocated", 0))


def host_peak_bytes() -> int:
    """Peak bytes of tensors on the host since `reset_host_peak`."""
    return int(core.host_memory_stat_peak_value("Allocated", 0))


def reset_host_peak() -> None:
    """Reset the peak to the current memory."""
    core.host_memory_stat_reset_peak_value("Allocated", 0)


def squared_norm(tensor: Any) -> Any:
    """Sum of squares by the kernel of Paddle's clipping: on CPU 20 times as fast as square().sum()."""
    return paddle._C_ops.squared_l2_norm(tensor)


# (left, right, rows of each expert, transpose left, transpose right), as in `grouped`. Paddle 3.1 has none.
batched_gemm: Any = getattr(paddle.incubate.nn.functional, "batched_gemm", None)


def take_over_hooks(layer: Any, plain: Any) -> None:
    """Move the forward post-hooks of a plain layer to the layer in its place: Qwen3's norms."""
    layer._forward_post_hooks.update(plain._forward_post_hooks)


class MultiTensorAdamW(paddle.optimizer.AdamW):  # type: ignore[misc]
    """Paddle's AdamW over fp32 tensors that are updated equally often: a few kernels instead of one per tensor."""

    CHUNK = 2048 * 32  # elements per block of threads, as in Paddle's test of the kernel
    MOST = 2**31 - 1  # elements of a tensor, which the kernel counts in 32 bits

    def _create_optimization_pass(self, parameters_and_grads: Any, param_group_idx: int = 0) -> list[Any]:
        self.helper = LayerHelper(type(self).__name__)
        self._create_global_learning_rate()
        self._create_accumulators(default_main_program().global_block(), [each for each, _ in parameters_and_grads])
        for decays in (True, False):  # the kernel has one rate of decay
            pairs = [pair for pair in parameters_and_grads if self._apply_decay_param_fun(pair[0].name) == decays]
            if pairs:
                tensors, gradients = map(list, zip(*pairs, strict=True))
                self._update(tensors, gradients, self._weight_decay if decays else 0.0)
        return []

    def _update(self, tensors: list[Any], gradients: list[Any], decay: float) -> None:
        def state(kind: str) -> list[Any]:
            return [self._get_accumulator(kind, tensor) for tensor in tensors]

        moments = state(self._moment1_acc_str), state(self._moment2_acc_str)
        powers = state(self._beta1_pow_acc_str), state(self._beta2_pow_acc_str)
        self.run_kernel(tensors, gradients, moments, powers, decay)

    def run_kernel(
        self,
        tensors: list[Any],
        gradients: list[Any],
        moments: tuple[list[Any], list[Any]],
        powers: tuple[list[Any], list[Any]],
        decay: float,
    ) -> None:
        """Update tensors and their states."""
        rate, no_amsgrad, no_masters, never_skip = self._global_learning_rate(), None, None, None
        numbers = self._beta1, self._beta2, self._epsilon, self.CHUNK, decay
        how = {"use_adamw": True, "multi_precision": False, "use_global_beta_pow": False, "amsgrad": False}
        paddle._C_ops.fused_adam_(
            *(tensors, gradients, rate, *moments, no_amsgrad, *powers, no_masters, never_skip, *numbers, *how.values())
        )


def make_states(optimizer: Any) -> None:
    """Make an AdamW create its zero states, which it would otherwise create in its first step."""
    if isinstance(optimizer, paddle.optimizer.AdamW):
        optimizer.helper = LayerHelper(type(optimizer).__name__)
        for tensor in optimizer._parameter_list:  # one after the other: few are on the device at once
            optimizer._create_accumulators(default_main_program().global_block(), [tensor])
            if tensor.optimize_attr.get(STATES_IN_HOST):
                for moment in moments_of(optimizer, tensor):
                    move_to_host(moment)


STATES_IN_HOST = "states_in_host"  # key of a tensor's attributes


def moments_of(optimizer: Any, tensor: Any) -> list[Any]:
    """An optimizer's states of a tensor that are as large as it."""
    if not isinstance(optimizer, paddle.optimizer.AdamW):
        return []
    return [state_of(optimizer, tensor, kind) for kind in (optimizer._moment1_acc_str, optimizer._moment2_acc_str)]


def move_to_host(tensor: Any) -> None:
    """Move a tensor to host memory, page-locked for copies of a GPU."""
    tensor.detach()._copy_to(_host_place(), True)._share_buffer_to(tensor)


def _host_place() -> Any:
    return paddle.CUDAPinnedPlace() if str(paddle.device.get_device()).startswith("gpu") else paddle.CPUPlace()


def host_tensor(size: int, dtype: Any) -> Any:
    """A flat tensor in host memory, in the form of `move_to_host`."""
    return paddle.empty([size], dtype)._copy_to(_host_place(), True)


def fills_memory(tensor: Any) -> bool:
    """Whether a tensor, possibly with permuted axes, covers its memory from the start without gaps."""
    expected = 1
    for stride, length in sorted(zip(tensor.strides, tensor.shape, strict=True)):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return tensor.ndim > 0 and not tensor.offset


def sharing(tensor: Any, shape: Sequence[int] | None = None) -> Any:
    """Another tensor on a tensor's memory, possibly with another shape."""
    other = core.eager.Tensor(tensor.get_tensor(), tensor.place)
    if shape is not None:
        other.get_tensor()._set_dims(list(shape))
    other.stop_gradient = tensor.stop_gradient
    return other


def part_of(tensor: Any, start: int, stop: int) -> Any:
    """Elements `start..stop-1` of a tensor, flat and on its memory, also in host memory, which `window` would copy to a
    GPU."""
    whole = tensor.get_tensor()
    flat = whole._slice(0, whole.shape()[0])
    flat._set_dims([int(tensor.size)])
    return core.eager.Tensor(flat._slice(start, stop), tensor.place)


def begin_update(optimizer: Any) -> None:
    """Set an optimizer's learning rate of the step, before `update_part`."""
    optimizer.helper = LayerHelper(type(optimizer).__name__)
    optimizer._create_global_learning_rate()


def update_part(optimizer: Any, tensor: Any, values: Any, gradient: Any, moments: Sequence[Any], last: bool) -> None:
    """Update a part of a tensor by the kernel of the optimizer's `step`. `last`: the tensor's last part, with which its
    scalar states are updated."""
    rate = optimizer._create_param_lr((tensor, gradient))
    if not isinstance(optimizer, paddle.optimizer.AdamW):
        paddle._C_ops.sgd_(values, rate, gradient, None, False)
        return
    powers = [state_of(optimizer, tensor, f"beta{number}_pow_acc") for number in (1, 2)]
    powers = powers if last else [power.clone() for power in powers]
    decays, decay = optimizer._apply_decay_param_fun(tensor.name), optimizer._weight_decay
    if isinstance(optimizer, MultiTensorAdamW):
        (first, second), (power, other) = moments, powers
        lists = [values], [gradient], ([first], [second]), ([power], [other])
        optimizer.run_kernel(*lists, decay if decays else 0.0)
        return
    betas, few_rows = (optimizer._beta1, optimizer._beta2), 1000
    numbers = *betas, optimizer._epsilon, 1.0, decay, decays, False, few_rows
    how = {"multi_precision": False, "use_global_beta_pow": False, "amsgrad": False}
    paddle._C_ops.adamw_(values, gradient, rate, *moments, None, *powers, None, None, *numbers, *how.values())


def state_of(optimizer: Any, tensor: Any, kind: str) -> Any:
    """An optimizer's state of a tensor, such as "moment1"; None where it has none."""
    return optimizer._accumulators.get(kind, {}).get(tensor.name)


def copy_later(tensor: Any, place: Any) -> Any:
    """A copy on another device, on the compute stream instead of CUDA's default stream, which waits for all."""
    return tensor._copy_to(place, False)


def use_gpu(number: int) -> None:
    """Make this thread's CUDA calls use this GPU."""
    core.set_cuda_current_device_id(number)  # type: ignore[attr-defined]  # GPU builds have it


def share(tensor: Any, flat: Any, start: int, stop: int) -> None:
    """Make a tensor, with its shape, a part of a flat tensor without a copy."""
    flat._slice(start, stop)._share_buffer_to(tensor)


def flattened(tensor: Any) -> Any:
    """A flat tensor on a tensor's memory, also on devices without strides, where `view` has no effect."""
    flat = paddle.empty([int(tensor.size)], tensor.dtype)
    tensor.detach()._share_buffer_to(flat)
    return flat


def window(flat: Any, start: int, stop: int, shape: list[int]) -> Any:
    """A tensor of this shape on a part of a flat one's memory."""
    return flat._slice(start, stop).view(shape)


def close_window(tensor: Any) -> None:
    """Free a tensor's memory."""
    tensor._clear_data()


class Windows:
    """Tensors that are consecutive parts of a flat tensor from `open` to `close`, and hold no memory otherwise.

    Used at each use of a layer, so each tensor takes three calls: values that Paddle's Python looks up each time are
    cached."""

    def __init__(self, tensors: Sequence[Any]):
        stops = [*accumulate((int(tensor.size) for tensor in tensors), initial=0)]
        self._windows = [
            (each, each.get_tensor(), *bounds) for each, bounds in zip(tensors, pairwise(stops), strict=True)
        ]

    def open(self, flat: Any) -> None:
        whole = flat.get_tensor()
        for tensor, _, start, stop in self._windows:
            core.eager.Tensor(whole._slice(start, stop))._share_buffer_to(tensor)

    def close(self) -> None:
        for _, tensor, *_ in self._windows:
            tensor._clear()


def place_parameter(layer: Any, attribute: str, tensor: Any) -> None:
    """Put a tensor of any type in the place of a layer's parameter."""
    layer._parameters[attribute] = tensor


def schedule_of(optimizer: Any) -> Any:
    """An optimizer's schedule of learning rates."""
    return optimizer._learning_rate


def next_rate(optimizer: Any, step: int | None = None) -> None:
    """Go to the next step's learning rate, or to that of a step counted from 0."""
    schedule_of(optimizer).step(step)


def install_group(group: Any) -> None:
    """Make fleet return this hybrid group instead of its own."""
    fleet.fleet._hcg = topology._HYBRID_PARALLEL_GROUP = group


def uninstall_group() -> None:
    """Remove fleet's hybrid group."""
    vars(fleet.fleet).pop("_hcg", None)
    topology._HYBRID_PARALLEL_GROUP = None


FIRST_RING = 1 << 20  # above the ids of Paddle's groups, which gloo's groups register and NCCL's do not


def make_context(group: Any, gpu: int | None) -> None:
    """Register a group's communicator for kernels that communicate by themselves. Otherwise they would start a second
    store on rank 0 of the world, which may not be a member."""
    store, manager = core.create_or_get_global_tcp_store(), core.CommContextManager
    arguments = store, str(FIRST_RING + group.id), group.rank, group.nranks
    if gpu is None:
        manager.create_gloo_comm_context(*arguments)
    else:
        manager.set_device_id(gpu)
        manager.create_nccl_comm_context(*arguments, "galvatron")  # type: ignore[attr-defined]  # GPU builds have it


def fused_loss(logits: Any, labels: Any, group: Any, ignored: int) -> tuple[Any, Any]:
    """(probabilities [U, v], losses [U, 1]) over a split vocabulary by one kernel, on the context from
    `make_context`."""
    ring = FIRST_RING + group.id, group.rank, group.nranks
    return tuple(paddle._C_ops.c_softmax_with_cross_entropy(logits, labels.unsqueeze(-1), ignored, *ring))


def softmax_and_loss(logits: Any, labels: Any, ignored: int) -> tuple[Any, Any]:
    """(probabilities [U, V] in the logits' memory, losses [U, 1]) by the kernel of Paddle's `cross_entropy`."""
    soft_labels, use_softmax, stable, axis = False, True, True, -1
    how = soft_labels, use_softmax, stable, ignored, axis
    return tuple(paddle._C_ops.cross_entropy_with_softmax_(logits, labels.unsqueeze(-1), *how))


def meet_at(connect: Any) -> None:
    """Make Paddle's start of the world use the store of `connect()`, called once."""
    core.create_or_get_global_tcp_store = lru_cache(maxsize=1)(connect)
