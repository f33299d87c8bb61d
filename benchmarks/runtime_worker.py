"""One rank of a comparison with PaddleNLP's Trainer: `python -m runtime_worker JOB.json RESULT.json`, rank 0 writes.

Both sides train the same model from the same weights on the same batches, live in the same processes and take turns
step by step, so that other work on the machine meets both; a step is timed between two barriers, on rank 0.
PaddleNLP's Trainer with fleet does not run on CPU by itself: `complete_gloo` replaces the features that gloo lacks, by
the same transport that our runtime uses (`runtime/cpu_backend.py`). Each replacement is as cheap as it can be on gloo,
and the loss over a split vocabulary is this package's own, so that PaddleNLP is not slowed down.
tests/distributed/step_speed.py and `galvatron gpu-check` start it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypedDict

import numpy as np
import paddle
import paddle.distributed as dist
from numpy.typing import NDArray
from paddle.base import core
from paddle.distributed import fleet
from paddle.distributed.fleet.layers.mpu import mp_ops
from paddle.distributed.fleet.meta_parallel import tensor_parallel
from paddlenlp.trainer import Trainer, TrainerCallback, TrainingArguments
from paddlenlp.transformers import LlamaForCausalLM, LlamaForCausalLMPipe
from paddlenlp.transformers.configuration_utils import LlmMetaConfig, llmmetaclass
from pydantic import TypeAdapter

from paddlenlp_galvatron.plan import ModelShape, Plan, plan_from_dict
from paddlenlp_galvatron.plan.export import stock_arguments
from paddlenlp_galvatron.runtime import device
from paddlenlp_galvatron.runtime.adapters.llama import Llama
from paddlenlp_galvatron.runtime.cross_entropy import CrossEntropy, VocabularyShard
from paddlenlp_galvatron.runtime.device import on_gpu
from paddlenlp_galvatron.runtime.engine import Engine
from paddlenlp_galvatron.runtime.groups import prepare_world, run_as_rank, world_from_environment
from paddlenlp_galvatron.runtime.paddle_private import next_rate
from paddlenlp_galvatron.runtime.setup import ModelSetup
from paddlenlp_galvatron.runtime.weights import SeededWeights, Slice, WeightSource
from paddlenlp_galvatron.training.recipe import Recipe

Batches = list[NDArray[np.int64]]

# ---- replacements of NCCL features for fleet -------------------------------------------------------------------------

_lanes: dict[tuple[int, int, bool], Any] = {}  # (pipeline group, peer, whether to it) -> group of that direction


def complete_gloo() -> None:
    """Replace fleet's NCCL calls, where there is no NCCL. Call once, before `TrainingArguments` are made."""
    if on_gpu():
        return
    prepare_world()
    gloo = core.ProcessGroupGloo
    send, receive = gloo.send, gloo.recv

    def lane(group: Any, peer: int, outward: bool) -> tuple[Any, int]:
        pair = _lanes.get((id(group), peer, outward))
        return (pair, int(peer > group.rank())) if pair is not None else (group, peer)

    def send_over_lane(group: Any, tensor: Any, peer: int, sync_op: bool = True) -> Any:
        copy = paddle.assign(tensor)  # fleet lets its tensor go before it has left
        return send(lane(group, peer, True)[0], copy, lane(group, peer, True)[1], sync_op)

    def receive_over_lane(group: Any, tensor: Any, peer: int, sync_op: bool = True) -> Any:
        return receive(lane(group, peer, False)[0], tensor, lane(group, peer, False)[1], sync_op)

    def part(tensor: Any, parts: int, index: int) -> Any:
        """A window into the tensor's memory."""
        length = tensor.size // parts
        return tensor.detach().view([tensor.size])._slice(index * length, (index + 1) * length)

    def waited(task: Any) -> Any:
        task.wait()
        return task

    methods = {
        "all_reduce_on_calc_stream": lambda group, tensor, op: waited(group.all_reduce(tensor, op, True)),
        "all_gather_into_tensor_on_calc_stream": lambda group, out, x: waited(group.all_gather(x, out)),
        "reduce_scatter_tensor_on_calc_stream": lambda group, out, x, op: group.reduce_scatter_tensor(out, x, op),
        "send": send_over_lane,
        "recv": receive_over_lane,
        "send_on_calc_stream": lambda group, tensor, peer: send_over_lane(group, tensor, peer),
        "recv_on_calc_stream": lambda group, tensor, peer: receive_over_lane(group, tensor, peer).wait(),
        "send_partial_on_calc_stream": lambda group, x, peer, *of: send_over_lane(group, part(x, *of), peer),
        "recv_partial_on_calc_stream": lambda group, x, peer, *of: receive_over_lane(group, part(x, *of), peer).wait(),
        "all_gather_partial_on_calc_stream": lambda group, out, x, *of: group.all_gather(
            part(x, *of).clone(), out
        ).wait(),
        "all_to_all": lambda group, inputs, outputs, sync: _exchange(group, inputs, outputs),
        "_start_coalescing": lambda group: None,
        "_end_coalescing": lambda group, tasks=None: None,
    }
    for name, method in methods.items():
        setattr(gloo, name, method)
    paddle._C_ops.c_identity = lambda tensor, *_: tensor.view(tensor.shape)
    mp_ops._c_softmax_with_cross_entropy = _cross_entropy
    dist.ParallelEnv._device_id = 0  # CPU processes have none, and fleet's pipeline asks for it
    # fleet sends the batch through the tp group, from GPUs only; here every rank has it already.
    tensor_parallel.broadcast_input_data = lambda hybrid, *inputs, **named: (inputs, named)


def _exchange(group: Any, inputs: list[Any], outputs: list[Any]) -> Any:
    """PaddleNLP's Ulysses gives its lists in Paddle 2's order, which Paddle 3 takes the other way round."""
    received = paddle.empty([len(inputs), *inputs[0].shape], inputs[0].dtype)
    task = group.all_to_all_single(received, paddle.stack(inputs), [], [])
    for output, tensor in zip(outputs, received, strict=True):
        paddle.assign(tensor, output=output)
    return task


def _cross_entropy(
    logits: Any, label: Any, group: Any = None, return_softmax: bool = False, ignore_index: int = -100
) -> Any:
    columns = logits.shape[-1]
    flat = logits.reshape([-1, columns])
    place: Any = SimpleNamespace(tp=group.nranks, index=group.rank)
    shard = VocabularyShard(columns * group.nranks, place)  # without padding
    losses = CrossEntropy(shard, group, fused=False).losses(flat, label.flatten())
    return losses.reshape([*logits.shape[:-1], 1])


def _open_lanes() -> None:
    """A group of two per direction between neighbouring stages: gloo counts operations per group."""
    hybrid = fleet.get_hybrid_communicate_group()
    own = hybrid.get_pipe_parallel_group()
    for ranks in hybrid._topo.get_comm_list("pipe"):
        for position, (before, after) in enumerate(pairwise(ranks)):
            for downward in (True, False):
                pair = dist.new_group([before, after])
                if dist.get_rank() in (before, after):
                    at_head = dist.get_rank() == before
                    peer = position + 1 if at_head else position
                    _lanes[id(own.process_group), peer, downward == at_head] = pair.process_group


# ---- PaddleNLP's own training ----------------------------------------------------------------------------------------


@dataclass
@llmmetaclass
class StockArguments(TrainingArguments):  # type: ignore[misc]
    """Arguments of PaddleNLP's `run_pretrain.py` for a plan: training arguments and the data's length."""

    max_seq_length: int = 1024


def trainer_arguments(plan: Plan, recipe: Recipe, steps: int) -> StockArguments:
    """The arguments that `galvatron plan to-paddlenlp` prints for a plan. Starts fleet."""
    os.environ["PADDLE_RANK_IN_NODE"] = os.environ["PADDLE_TRAINER_ID"]  # as Paddle's launcher does
    return StockArguments(
        **stock_arguments(plan),
        output_dir=tempfile.mkdtemp(prefix="stock-"),
        device="gpu" if on_gpu() else "cpu",
        use_flash_attention=bool(plan.assumed.flash_attention) and on_gpu(),
        do_train=True,
        max_steps=steps,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.max_grad_norm,
        save_strategy="no",
        logging_steps=10**9,
        disable_tqdm=True,
        report_to=[],
    )


def build_model(shape: ModelShape, arguments: StockArguments, source: WeightSource) -> Any:
    """PaddleNLP's Llama, split as its arguments say, with the weights of `source`."""
    if arguments.pipeline_parallel_degree > 1 and not on_gpu():
        _open_lanes()
    config = Llama().config(shape, arguments.max_seq_length)
    LlmMetaConfig.set_llm_config(config, arguments)
    degree, rank = max(arguments.tensor_parallel_degree, 1), max(arguments.tensor_parallel_rank, 0)
    config.tensor_parallel_degree, config.tensor_parallel_rank = degree, rank
    kind = LlamaForCausalLMPipe if arguments.pipeline_parallel_degree > 1 else LlamaForCausalLM
    model = kind.from_config(config, dtype="bfloat16") if arguments.bf16 else kind(config)  # as its run_pretrain.py
    kinds = (shape.embedding, shape.block, shape.head)
    axes = {weight.name.split(".")[-2]: weight.axis for kind in kinds for weight in kind.weights}
    for name, weight in model.state_dict().items():
        axis = axes.get(name.split(".")[-2]) if degree > 1 else None
        whole = tuple(size * (degree if dim == axis else 1) for dim, size in enumerate(weight.shape))
        weight.set_value(paddle.to_tensor(Slice(axis, rank, degree).of(source(name, whole))).astype(weight.dtype))
    return model


class StockTrainer(Trainer):  # type: ignore[misc]
    """PaddleNLP's Trainer, fed from memory: no data loader takes time."""

    def __init__(self, batches: Batches, plan: Plan, **rest: Any):
        super().__init__(train_dataset=batches, **rest)
        self._samples = [sample for batch in batches for sample in self._own_samples(batch, plan)]
        self._losses: list[Any] = []  # of every micro-batch

    def _own_samples(self, batch: NDArray[np.int64], plan: Plan) -> list[dict[str, Any]]:
        """This data-parallel rank's micro-batches of a global batch [G, S + 1]."""
        ranks, rank = self.args.dataset_world_size, self.args.dataset_rank
        rows = batch.reshape([plan.micro_batches, ranks, -1, batch.shape[1]])[:, rank]
        return [{"input_ids": paddle.to_tensor(x[:, :-1]), "labels": paddle.to_tensor(x[:, 1:])} for x in rows]

    def training_step(self, *rest: Any, **named: Any) -> Any:
        self._losses.append(super().training_step(*rest, **named))
        return self._losses[-1]

    def losses(self) -> list[float]:
        """Losses so far, averaged over all data-parallel ranks."""
        mine = (
            paddle.concat([loss.reshape([1]) for loss in self._losses])
            .reshape([-1, self.args.gradient_accumulation_steps])
            .sum(axis=1)
        )
        if dist.is_initialized():
            dist.all_reduce(mine)
        return [float(loss) / dist.get_world_size() for loss in mine]

    def get_train_dataloader(self) -> list[dict[str, Any]]:
        return self._samples


class StepCallback(TrainerCallback):  # type: ignore[misc]
    """Calls back around every optimizer step of the Trainer."""

    def __init__(self, before: Callable[[], None], after: Callable[[], None]):
        self._before, self._after = before, after

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._before()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._after()


SEED = 0


@dataclass
class Clock:
    """Steps that all ranks begin and end together. `with clock:` times one."""

    steps_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)  # processor time of this rank, without waiting

    def __enter__(self) -> None:
        _meet()
        self._start, self._cpu_start = time.perf_counter(), time.process_time()

    def __exit__(self, *_: object) -> None:
        self.cpu_ms.append((time.process_time() - self._cpu_start) * 1e3)
        _meet()
        self.steps_ms.append((time.perf_counter() - self._start) * 1e3)


def _meet() -> None:
    device.synchronize()
    if dist.is_initialized():
        dist.barrier()


class Ours:
    """This package's training, step by step."""

    def __init__(self, plan: Plan, shape: ModelShape, recipe: Recipe, batches: list[NDArray[np.int64]]):
        seq_length = plan.assumed.seq_length or 0
        source = SeededWeights(SEED, shape.initializer_range)
        self._engine = Engine(ModelSetup.of(plan, shape, seq_length, source=source))
        self._optimizer = recipe.build(self._engine.tensors, self._engine.decaying)
        self._max_grad_norm = recipe.max_grad_norm
        self._batches = iter(batches)
        self._losses: list[float] = []

    def step(self) -> None:
        self._losses.append(self._engine.forward_backward(next(self._batches)))
        self._engine.update(self._optimizer, self._max_grad_norm)
        next_rate(self._optimizer)

    def losses(self) -> list[float]:
        return self._losses


class Side(TypedDict):
    """One side's steps: losses, milliseconds, and processor milliseconds summed over ranks."""

    losses: list[float]
    steps_ms: list[float]
    cpu_ms: list[float]


def side(losses: list[float], clock: Clock) -> Side:
    cpu = paddle.to_tensor(clock.cpu_ms, "float32")
    if dist.is_initialized():
        dist.all_reduce(cpu)
    return Side(losses=losses, steps_ms=clock.steps_ms, cpu_ms=[float(ms) for ms in cpu])


def with_stock(job: Job, clocks: tuple[Clock, Clock]) -> tuple[list[float], list[float]]:
    """Losses of our runtime and of PaddleNLP's Trainer; our steps run inside its loop."""
    complete_gloo()
    arguments = trainer_arguments(job.plan, job.recipe, len(job.batches))
    source = SeededWeights(SEED, job.shape.initializer_range)
    model = build_model(job.shape, arguments, source)
    ours = Ours(job.plan, job.shape, job.recipe, job.batches)

    def after() -> None:
        clocks[1].__exit__()
        with clocks[0]:
            ours.step()

    callback = StepCallback(clocks[1].__enter__, after)
    trainer = StockTrainer(job.batches, job.plan, model=model, args=arguments, callbacks=[callback])
    trainer.train()
    return ours.losses(), trainer.losses()


@dataclass(frozen=True)
class Job:
    """A request."""

    plan: Plan
    shape: ModelShape
    recipe: Recipe
    batches: list[NDArray[np.int64]]

    @staticmethod
    def of(content: dict[str, Any]) -> Job:
        plan, shape = plan_from_dict(content["plan"]), TypeAdapter(ModelShape).validate_python(content["shape"])
        random = np.random.default_rng(SEED)
        size = (plan.global_batch, (plan.assumed.seq_length or 0) + 1)
        batches = [random.integers(0, shape.vocab_size, size) for _ in range(content["steps"])]
        return Job(plan, shape, Recipe(**content["recipe"]), batches)


def main() -> None:
    content = json.loads(Path(sys.argv[1]).read_text())
    clocks = Clock(), Clock()
    losses = with_stock(Job.of(content), clocks)
    result = {name: side(of, clock) for name, of, clock in zip(("ours", "other"), losses, clocks, strict=True)}
    if world_from_environment()[0] == 0:
        Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    run_as_rank(main)
