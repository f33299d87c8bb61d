"""PaddleNLP's Trainer interface under a plan: the attributes that callbacks, scripts and sub-classes use.

Arguments by PaddleNLP's names come from the run's settings, the model is this rank's part, and features that the plan's
engine handles itself are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from math import gcd
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import paddle
from paddle.distributed.fleet.base.topology import HybridCommunicateGroup
from paddle.nn import Layer
from paddlenlp.trainer import Trainer, TrainerCallback, TrainingArguments
from paddlenlp.trainer.integrations import get_available_reporting_integrations
from paddlenlp.trainer.trainer_utils import ShardingOption

from ...base.errors import UserError
from ...base.reading import read_json
from ...plan import DataParallel, LayerStrategy, Plan, Precision, runs
from ...plan.export import sharding_stage
from ...plan.mesh import OF_A_SAMPLE
from ...runtime import device
from ...runtime.batch import samples_of
from ...runtime.paddle_private import install_group
from ...runtime.stage import Stage
from ..data.source import Rows
from ..settings import TrainSettings, require_reporters

T = TypeVar("T")

# PaddleNLP's arguments without our option that its Trainer and callbacks read.
HANDED_ON = frozenset(
    {"run_name", "logging_strategy", "log_on_each_node", "metrics_output_path", "wandb_api_key", "wandb_http_proxy"}
)
# Same names as in PaddleNLP, but different meaning, values or conditions.
UNLIKE = {"sequence_parallel", "optim", "load_best_model_at_end"}
# PaddleNLP's names -> Paddle's
AXES = {"data": "data", "sharding": "sharding", "sep": "sep", "tensor": "model", "pipeline": "pipe"}
RANKED = ("data", "sharding", "model", "pipe")
STAGES = {1: ShardingOption.SHARD_OP, 2: ShardingOption.SHARD_GRAD_OP, 3: ShardingOption.FULL_SHARD}

# Names of PaddleNLP's Trainer without use under a plan -> reason.
UNSUPPORTED: dict[str, str] = {
    name: row["why"] for row in read_json(Path(__file__).with_name("unsupported.json")) for name in row["names"]
}


def degrees_of(plan: Plan, strategy: LayerStrategy) -> dict[str, int]:
    """The grid of ranks of a layer with this strategy, by Paddle's axes, the last over neighbouring ranks; the product
    is the world. `sep`: context parallel and Ulysses; `sharding`: ranks with other samples, over which ZeRO shards
    model states; `data`: ranks with other samples, over which it does not."""
    dp, sep = plan.dp(strategy), strategy.mesh(plan.stage_size).degree(*OF_A_SAMPLE)
    shards = strategy.shards(plan.stage_size)
    sharding = 1 if strategy.dp_type is DataParallel.DDP else shards // gcd(shards, sep)
    data, split = {"data": dp // sharding, "sharding": sharding}, {"sep": sep, "model": strategy.tp}
    return {"pipe": plan.pipeline} | (data | split if strategy.consecutive else split | data)


class NoCommunicators(UserError, AttributeError):
    """An AttributeError makes PaddleNLP's models assume a world without fleet and compute like one process."""


class PlanGroup:
    """The result of `fleet.get_hybrid_communicate_group()` during training: degrees and this rank's positions, by the
    names of Paddle's class, if all layers agree."""

    def __init__(self, plan: Plan, rank: int, layers: Sequence[LayerStrategy] = ()):
        """`layers`: the layers in question; none: all decoder layers."""
        stage = rank // plan.stage_size
        self.nranks, self.global_rank, self.stage_id = plan.world_size, rank, stage
        self.is_first_stage, self.is_last_stage = stage == 0, stage == plan.pipeline - 1
        self._plan, self._answers = plan, [self._of(plan, layer) for layer in layers or plan.layers]

    def _of(self, plan: Plan, layer: LayerStrategy) -> dict[str, tuple[int, ...]]:
        """The answers on every rank, as all ranks must refuse the same calls."""
        degrees, ranks = degrees_of(plan, layer), range(plan.world_size)
        places = zip(degrees, np.unravel_index(ranks, [*degrees.values()]), strict=True)
        answers = {f"get_{axis}_parallel_rank": tuple(numbers.tolist()) for axis, numbers in places}
        answers |= {f"get_{axis}_parallel_world_size": (degree,) * len(ranks) for axis, degree in degrees.items()}
        stages = tuple(rank // plan.stage_size for rank in ranks)
        return answers | {"get_global_rank": tuple(ranks), "get_stage_id": stages}

    def of_layer(self, index: int) -> PlanGroup:
        """The answers of decoder layer `index`, counted from 0 over all stages. Raises UserError."""
        if not 0 <= index < (count := len(self._plan.layers)):
            raise UserError(f"of_layer: there is no layer {index}; the model has layers 0-{count - 1}")
        return PlanGroup(self._plan, self.global_rank, [self._plan.layers[index]])

    def of_vocabulary(self) -> PlanGroup:
        """The answers of embedding and LM head."""
        return PlanGroup(self._plan, self.global_rank, [self._plan.vocab.as_layer()])

    def __getattr__(self, name: str) -> Callable[[], int]:
        """A method of Paddle's class. Raises UserError if it depends on the layer or is not about degrees and ranks."""
        if name.startswith("_") or not hasattr(HybridCommunicateGroup, name):
            raise AttributeError(name)
        if name not in self._answers[0]:
            raise NoCommunicators(
                f"hybrid communicate group: {name} is not answered under a plan, whose layers have communicators of "
                "their own; ask for degrees and ranks, such as get_model_parallel_world_size()"
            )
        answers = list(runs([answers[name] for answers in self._answers]))
        if len(answers) == 1:
            return lambda: answers[0][1][self.global_rank]
        different = ", ".join(
            f"{answer[self.global_rank]} in " + (f"layer {at[0]}" if len(at) == 1 else f"layers {at[0]}-{at[-1]}")
            for at, answer in answers
        )
        raise UserError(
            f"hybrid communicate group: {name}() depends on the layer in this plan ({different}); ask for one layer, "
            f"such as fleet.get_hybrid_communicate_group().of_layer(0).{name}()"
        )


def _rank_along(axis: str) -> property:
    return property(lambda self: vars(self).get("_ranks", {}).get(axis, 0))


class RunArguments(TrainingArguments):  # type: ignore[misc]
    """PaddleNLP's arguments with the plan's degrees instead of fleet's.

    Degrees and ranks are those of the widest decoder layer, the first with the largest degree. Under any plan,
    train_batch_size * gradient_accumulation_steps * dataset_world_size is the global batch.
    """

    _ranks: dict[str, int]  # this rank's position on each axis; absent before the plan is set

    def set_plan(self, plan: Plan, group: PlanGroup) -> None:
        """Set the plan, after PaddleNLP's checks of degrees, which use fleet."""
        index = max(range(len(plan.layers)), key=lambda layer: plan.layers[layer].ranks)
        layer, view = plan.layers[index], group.of_layer(index)
        for name, axis in AXES.items():
            setattr(self, f"{name}_parallel_degree", getattr(view, f"get_{axis}_parallel_world_size")())
        self.context_parallel_degree = 1
        self.sharding = [STAGES[sharding_stage(plan, layer)]] if self.sharding_parallel_degree > 1 else []
        self.use_hybrid_parallel = self.data_parallel_degree < plan.world_size
        self.sequence_parallel = plan.assumed.sequence_parallel and any(each.tp > 1 for each in plan.layers)
        self.recompute = any(each.recompute for each in plan.layers)
        self.gradient_accumulation_steps = plan.micro_batches
        self.per_device_train_batch_size = self.per_device_eval_batch_size = plan.micro_batch // plan.dp(layer)
        if plan.assumed.mixed_precision.mixed:
            self.fp16_opt_level = "O2"
        self._ranks = {axis: getattr(view, f"get_{axis}_parallel_rank")() for axis in RANKED[:3]}
        self._ranks["pipe"] = view.get_stage_id()

    data_parallel_rank, sharding_parallel_rank, tensor_parallel_rank, pipeline_parallel_rank = map(_rank_along, RANKED)


class SyncParallelInfo(TrainerCallback):  # type: ignore[misc]
    """Sets the plan for fleet and `args` after PaddleNLP's Trainer, which checks fleet's degrees, is constructed, and
    before the user's callbacks."""

    def __init__(self, plan: Plan, group: PlanGroup):
        self._plan, self._group = plan, group

    def on_init_end(self, args: RunArguments, *_: Any, **__: Any) -> None:
        install_group(self._group)
        args.set_plan(self._plan, self._group)


def run_arguments(
    settings: TrainSettings, steps: int, precision: Precision, user: TrainingArguments | None = None
) -> RunArguments:
    """The run by PaddleNLP's names, with further arguments of the `user`. Raises UserError."""
    names = {field.name for field in fields(TrainingArguments)} - UNLIKE
    values = {name: value for name, value in settings.model_dump(include=names).items() if value is not None}
    arguments = RunArguments(
        **values
        | {
            "output_dir": str(settings.output_dir),
            "max_steps": steps,
            "do_train": True,
            "evaluation_strategy": settings.evaluates,
            "bf16": precision is Precision.BF16,
            "fp16": precision is Precision.FP16,
            "device": device.name(),
            "report_to": _reporters(settings),
            "disable_tqdm": True,
        }
    )
    arguments.load_best_model_at_end = settings.best_metric is not None
    arguments.metric_for_best_model = settings.best_metric
    if user is not None:
        for name in (vars(user).keys() - vars(arguments).keys()) | HANDED_ON:
            setattr(arguments, name, getattr(user, name))
    return arguments


def _reporters(settings: TrainSettings) -> list[str]:
    """Names of PaddleNLP's reporting callbacks. Raises UserError for a package that is not installed."""
    if settings.report_to is None:
        return [name for name in ("visualdl",) if name in get_available_reporting_integrations()]
    require_reporters(settings.report_to)
    return list(settings.report_to)


class LocalModel(Layer):  # type: ignore[misc]
    """The weights of this rank's layers, under their names in PaddleNLP's whole model.

    A parameter is the rank's slice of a weight; under zero3 the flat part of that slice on this rank, possibly empty.
    Their values are the current ones whenever a callback runs.
    """

    def __init__(self, stage: Stage):
        super().__init__()
        self.config = stage.config
        pairs = [pair for unit in stage.units for pair in unit.held()]
        for weight, parameter in [*pairs, *((vector, vector.tensor) for vector in (*stage.vectors, *stage.frozen))]:
            self._adopt(weight.name, parameter)

    def _adopt(self, path: str, parameter: Any) -> None:
        *layers, name = path.split(".")
        owner: Layer = self
        for step in layers:
            if step not in owner._sub_layers:
                owner.add_sublayer(step, Layer())
            owner = owner._sub_layers[step]
        owner.add_parameter(name, parameter)

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        """Raises UserError, as these are only one rank's parts."""
        raise UserError(
            "model: a rank holds parts of it, which the plan's engine runs; for a forward pass of your own save it "
            "(trainer.save_model) and load it whole with PaddleNLP"
        )


def inputs_of(rows: Rows, step: int, micro_batch: int, plan: Plan, args: RunArguments) -> dict[str, Any]:
    """This rank's share of a micro-batch of a step, on the CPU: input_ids and labels [samples of a device, S]."""
    first = micro_batch * plan.micro_batch + args.dataset_rank * args.train_batch_size
    ids, labels, *_ = samples_of(rows(step, range(first, first + args.train_batch_size)))
    parts = {"input_ids": ids, "labels": labels}
    return {name: paddle.to_tensor(array, place=paddle.CPUPlace()) for name, array in parts.items()}


def refuse_arguments(values: Mapping[str, Any]) -> None:
    """Raise UserError for arguments of PaddleNLP's Trainer without use under a plan, TypeError for unknown
    arguments."""
    if unknown := values.keys() - UNSUPPORTED.keys():
        raise TypeError(f"GalvatronTrainer got an unexpected keyword argument {min(unknown)!r}")
    _refuse([name for name, value in values.items() if value is not None and value != (None, None)])


def refuse_overrides(trainer: type[Any]) -> None:
    """Raise UserError for methods of a sub-class that would never be called."""
    _refuse([name for name in vars(trainer) if name in UNSUPPORTED])


def without_unsupported(trainer: type[T]) -> type[T]:
    """A trainer whose unsupported methods raise an error with the reason."""
    for name in UNSUPPORTED.keys() & vars(Trainer).keys() - vars(trainer).keys():

        def refuse(*_: Any, name: str = name, **__: Any) -> NoReturn:
            raise UserError(f"{name}: is not available under a plan: {UNSUPPORTED[name]}")

        setattr(trainer, name, refuse)
    return trainer


def _refuse(names: list[str]) -> None:
    if names:
        raise UserError(f"{name}: cannot be overridden under a plan: {UNSUPPORTED[name]}" for name in names)
