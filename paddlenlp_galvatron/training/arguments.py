"""A run by PaddleNLP's names: the arguments that a user's script gives, and those that callbacks read as `args`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import field, fields, make_dataclass
from enum import Enum
from json import dumps
from pathlib import Path
from typing import Any, Optional

import paddle.distributed as dist
from paddlenlp.trainer import TrainingArguments
from paddlenlp.trainer.integrations import get_available_reporting_integrations
from paddlenlp.trainer.trainer_utils import ShardingOption

from ..base.writing import write_text
from ..interop.arguments import sharding_stage
from ..interop.foreign import HOLDS, IDLE
from ..options.group import canonical_options, is_boolean, read_options
from ..options.group import read_words as read_option_words
from ..options.uniform import UniformOptions
from ..plan import Plan, Precision, UserError, read_plan
from ..runtime import device
from ..runtime.groups import start_world
from ..runtime.topology import PlanGroup
from .prepare import BESIDE, CONFIG, GROUPS, prepare
from .recipe import Recipe
from .settings import TrainSettings, require_reporters

OPTIONS = {name: info for group in GROUPS for name, info in group.model_fields.items()}
STOCK = {own.name for own in fields(TrainingArguments)}
# PaddleNLP's arguments without an option that its Trainer and callbacks heed.
HANDED_ON = frozenset(
    {"run_name", "logging_strategy", "log_on_each_node", "metrics_output_path", "wandb_api_key", "wandb_http_proxy"}
)
# Named as in PaddleNLP, but for other things, with other values or under other conditions.
UNLIKE = {"sequence_parallel", "optim", "load_best_model_at_end"}
STAGES = {1: ShardingOption.SHARD_OP, 2: ShardingOption.SHARD_GRAD_OP, 3: ShardingOption.FULL_SHARD}
DRY_RUN = "dry_run"


class WorldStarter(TrainingArguments):  # type: ignore[misc]
    """PaddleNLP's training arguments; the world is started as the plugin needs it, before they would start it."""

    def __post_init__(self) -> None:
        start_world()
        super().__post_init__()


def _option_fields() -> Iterator[tuple[str, Any, Any]]:
    """All options as fields of a dataclass, unset by default, in types that PdArgumentParser reads."""
    for option, info in OPTIONS.items():
        if option not in STOCK:
            kind = Optional[bool] if is_boolean(info) else Optional[str]  # noqa: UP045
            yield option, kind, field(default=None, metadata={"help": info.description})


GalvatronTrainingArguments = make_dataclass(
    "GalvatronTrainingArguments",
    _option_fields(),
    bases=(WorldStarter,),
    namespace={"__doc__": "PaddleNLP's training arguments, and all options of training."},
)


def read_words(
    words: Sequence[str], say: Callable[[str], None] = lambda note: None, task: str | None = None
) -> dict[str, Any]:
    """Options by canonical name, and DRY_RUN, from a command line: flags, or one JSON file and flags that win over it.

    `task`: the script's own, where none is given. `say` is told which have no effect. Raises UserError.
    """
    file, flags = (Path(words[0]), words[1:]) if words and words[0].endswith(".json") else (None, words)
    from_file = [f"--{name}={_word(value)}" for name, value in read_options(file).items()] if file else []
    booleans = {name: is_boolean(info) for name, info in OPTIONS.items()} | {DRY_RUN: True}
    pairs, loose = read_option_words([*from_file, *flags], booleans, say, BESIDE)
    if loose:
        raise UserError(f"{loose[0]}: is no option; write name=value")
    return ({"task": task} if task else {}) | dict(pairs)


def _word(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def settings_of(words: Sequence[str]) -> TrainSettings:
    """The run that a command line asks for, in a script of one's own, on each rank of a world that has started:
    `GalvatronTrainer(settings_of(sys.argv[1:])).train()`. Raises UserError."""
    start_world()
    return prepare(read_words(words), dist.get_world_size()).settings


def settings_for(model: Any, arguments: Any, sample_length: int | None) -> TrainSettings:
    """The run that a trainer is made for. `model`: its preset's name, directory or config.json, or PaddleNLP's config.

    `sample_length`: sequence length of the user's own data, for where the plan leaves it open. Raises UserError.
    """
    if not isinstance(arguments, TrainingArguments):
        found = "missing" if arguments is None else f"is a {type(arguments).__name__}"
        raise UserError(f"args: {found}; give GalvatronTrainingArguments, or PaddleNLP's TrainingArguments")
    values = dict(_given(arguments))
    if hasattr(model, "to_dict") and hasattr(model, "model_type"):
        path = Path(arguments.output_dir).absolute() / CONFIG
        write_text(path, dumps(model.to_dict() | {"model_type": model.model_type}, indent=2, default=str) + "\n")
        model = path
    if not isinstance(model, str | Path):
        raise UserError(
            f"model: is a {type(model).__name__}; give a preset's name, a Hugging Face directory, a config.json or "
            "PaddleNLP's config of a Llama or Qwen2: the plan says how its layers are built"
        )
    values["model_size"] = str(model)
    if sample_length is not None and "seq_length" not in values and _leaves_length_open(values):
        values["seq_length"] = sample_length
    return _settings(values, HANDED_ON)


def _leaves_length_open(values: dict[str, Any]) -> bool:
    """Whether the plan that is named does not say how many tokens a sample has."""
    if plan := values.get("galvatron_config_path"):
        return read_plan(plan, dist.get_world_size()).assumed.seq_length is None
    return bool(UniformOptions.from_values(values).given)


def _settings(values: dict[str, Any], handed_on: frozenset[str]) -> TrainSettings:
    unheeded = sorted(values.keys() & STOCK - OPTIONS.keys() - HOLDS.keys() - IDLE.keys() - handed_on)
    if unheeded:
        raise UserError(f"{name}: {values[name]} would change nothing here; leave it out" for name in unheeded)
    known = {name: value for name, value in values.items() if name in OPTIONS}
    canonical_options({name: value for name, value in values.items() if name in HOLDS and value}, OPTIONS)
    return prepare(_plain(known), dist.get_world_size()).settings


def _given(arguments: Any) -> Iterator[tuple[str, Any]]:
    """Arguments that differ from the default, and from PaddleNLP's own change of it."""
    training = isinstance(arguments, TrainingArguments)
    made = TrainingArguments(output_dir=arguments.output_dir) if training else arguments
    for own in fields(arguments):
        value = getattr(arguments, own.name, own.default)  # PaddleNLP deletes one of its fields
        if value != own.default and (
            not training or own.name == "output_dir" or value != getattr(made, own.name, None)
        ):
            yield own.name, value


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value.value if isinstance(value, Enum) else value for name, value in values.items()}


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
