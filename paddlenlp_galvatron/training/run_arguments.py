"""A run as PaddleNLP's TrainingArguments: what callbacks and scripts read as `args`."""

from __future__ import annotations

from dataclasses import fields

from paddlenlp.trainer import TrainingArguments
from paddlenlp.trainer.integrations import get_available_reporting_integrations
from paddlenlp.trainer.trainer_utils import ShardingOption

from ..plan import Plan, Precision
from ..plan.formats.one_degree import sharding_stage
from ..runtime import device
from ..runtime.topology import PlanGroup
from .arguments import HANDED_ON
from .recipe import Recipe
from .settings import TrainSettings, require_reporters

# Named as in PaddleNLP, but for other things, with other values or under other conditions.
UNLIKE = {"sequence_parallel", "optim", "load_best_model_at_end"}
STAGES = {1: ShardingOption.SHARD_OP, 2: ShardingOption.SHARD_GRAD_OP, 3: ShardingOption.FULL_SHARD}


class RunArguments(TrainingArguments):  # type: ignore[misc]
    """PaddleNLP's arguments with the plan's degrees, of which nothing was told to fleet.

    Degrees and ranks are those of the widest decoder layer, the first with the largest degree. Whatever the plan,
    train_batch_size * gradient_accumulation_steps * dataset_world_size is the global batch.
    """

    _ranks: dict[str, int]  # this rank's place on each axis; without: the plan is not told yet

    def tell(self, plan: Plan, group: PlanGroup) -> None:
        """Take over the plan. PaddleNLP's own checks of degrees, which are fleet's, must be over."""
        index = max(range(len(plan.layers)), key=lambda layer: plan.layers[layer].ranks)
        layer, view = plan.layers[index], group.of_layer(index)
        self.tensor_parallel_degree = view.get_model_parallel_world_size()
        self.sep_parallel_degree = view.get_sep_parallel_world_size()
        self.pipeline_parallel_degree = view.get_pipe_parallel_world_size()
        self.sharding_parallel_degree = view.get_sharding_parallel_world_size()
        self.data_parallel_degree = view.get_data_parallel_world_size()
        self.context_parallel_degree = 1
        self.sharding = [STAGES[sharding_stage(plan, layer)]] if self.sharding_parallel_degree > 1 else []
        self.use_hybrid_parallel = self.data_parallel_degree < plan.world_size
        self.sequence_parallel = plan.assumed.sequence_parallel and any(each.tp > 1 for each in plan.layers)
        self.recompute = any(each.recompute for each in plan.layers)
        self.gradient_accumulation_steps = plan.micro_batches
        self.per_device_train_batch_size = self.per_device_eval_batch_size = plan.micro_batch // plan.dp(layer)
        if plan.assumed.mixed_precision is not Precision.FP32:
            self.fp16_opt_level = "O2"
        self._ranks = {
            "data": view.get_data_parallel_rank(),
            "sharding": view.get_sharding_parallel_rank(),
            "model": view.get_model_parallel_rank(),
            "pipe": view.get_stage_id(),
        }

    def _rank(self, axis: str) -> int:
        ranks: dict[str, int] = vars(self).get("_ranks", {})
        return ranks.get(axis, 0)

    @property
    def data_parallel_rank(self) -> int:
        return self._rank("data")

    @property
    def sharding_parallel_rank(self) -> int:
        return self._rank("sharding")

    @property
    def tensor_parallel_rank(self) -> int:
        return self._rank("model")

    @property
    def pipeline_parallel_rank(self) -> int:
        return self._rank("pipe")


def run_arguments(
    settings: TrainSettings, recipe: Recipe, steps: int, precision: Precision, given: TrainingArguments | None = None
) -> RunArguments:
    """The run by PaddleNLP's names, and what else stands in arguments that were `given`. Raises UserError."""
    values = settings.model_dump() | recipe.model_dump()
    known = {field.name for field in fields(TrainingArguments)} - UNLIKE
    values = {name: value for name, value in values.items() if name in known and value is not None}
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
    if given is not None:
        for name in (vars(given).keys() - vars(arguments).keys()) | HANDED_ON:
            setattr(arguments, name, getattr(given, name))
    return arguments


def _reporters(settings: TrainSettings) -> list[str]:
    """Where PaddleNLP's callbacks report to. Raises UserError for what is not installed."""
    if settings.report_to is None:
        return [name for name in ("visualdl",) if name in get_available_reporting_integrations()]
    require_reporters(settings.report_to)
    return list(settings.report_to)
