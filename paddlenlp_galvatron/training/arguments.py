"""The options as PaddleNLP's PdArgumentParser takes them: dataclasses, of which one extends its TrainingArguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field, fields, make_dataclass
from enum import Enum
from json import dumps
from pathlib import Path
from typing import Any, NoReturn, Optional

import paddle.distributed as dist
from paddlenlp.trainer import PdArgumentParser, TrainingArguments

from ..base.writing import write_text
from ..options.degrees import DegreeOptions
from ..options.foreign import HOLDS, IDLE
from ..options.group import Options, canonical_options, is_boolean
from ..options.model_options import ModelOptions
from ..options.preference import PreferenceOptions
from ..options.tuning import TuningOptions
from ..options.uniform import UniformOptions
from ..plan import UserError, read_plan
from ..runtime.groups import start_world
from .checkpoint.huggingface import CONFIG
from .prepare import GROUPS, LaunchOptions, PlanOptions, prepare
from .recipe import Recipe
from .settings import RunOptions, TrainSettings

OF_DATA = ("input_dir", "split", *TuningOptions.model_fields, *PreferenceOptions.model_fields)
KERNELS = ("use_flash_attention", "use_fused_rope", "use_fused_rms_norm", "use_fused_cross_entropy")
OF_MODEL = (*ModelOptions.model_fields, "load", "load_distributed", *KERNELS)
# On which PaddleNLP's arguments act as soon as they are read, or which they do not know.
OURS = {*DegreeOptions.model_fields, "device", "dry_run", "load_best_model_at_end"}
OPTIONS = {name: info for group in GROUPS for name, info in group.model_fields.items()}
STOCK = {own.name for own in fields(TrainingArguments)}
# Of PaddleNLP's arguments without an option, what its Trainer and callbacks heed where they are handed on.
HANDED_ON = frozenset(
    {"run_name", "logging_strategy", "log_on_each_node", "metrics_output_path", "wandb_api_key", "wandb_http_proxy"}
)


class WorldStarter(TrainingArguments):  # type: ignore[misc]
    """PaddleNLP's training arguments, which start the world where nothing has; here it is started the plugin's way."""

    def __post_init__(self) -> None:
        start_world()
        super().__post_init__()


def _arguments(name: str, doc: str, options: Sequence[str], base: type[Any] = object) -> type[Any]:
    """A dataclass with these options as fields, unset by default, beside those of its base."""
    taken = {own.name for own in fields(base)} if base is not object else set()
    own = [
        (option, _kind(option), field(default=None, metadata={"help": OPTIONS[option].description}))
        for option in options
        if option not in taken
    ]
    return make_dataclass(name, own, bases=(base,), namespace={"__doc__": doc})


def _kind(option: str) -> Any:
    """What PdArgumentParser can read, which knows no unions; `Options` checks it further."""
    return Optional[bool] if is_boolean(OPTIONS[option]) else Optional[str]  # noqa: UP045


def _options(*groups: type[Options]) -> list[str]:
    return [name for group in groups for name in group.model_fields if name not in (*OF_DATA, *OF_MODEL)]


ModelArguments = _arguments("ModelArguments", "Which model, and the weights to begin with.", OF_MODEL)
DataArguments = _arguments("DataArguments", "Which data.", OF_DATA)
GalvatronTrainingArguments = _arguments(
    "GalvatronTrainingArguments",
    "PaddleNLP's training arguments, and those of a plan and its launch.",
    _options(PlanOptions, UniformOptions, Recipe, RunOptions, LaunchOptions),
    WorldStarter,
)


def parse_options(words: Sequence[str]) -> dict[str, Any]:
    """The options that canonical words (`--name=value`) give, as PaddleNLP's parser understands them.

    Raises UserError for what it refuses.
    """
    pairs = [(name, value, word) for word in words for name, _, value in [word.removeprefix("--").partition("=")]]
    ours = {name: value for name, value, _ in pairs if name in OURS}
    words = [word for name, _, word in pairs if name not in OURS]
    parser = PdArgumentParser([ModelArguments, DataArguments, GalvatronTrainingArguments])
    parser.error = _refuse
    default = f"--output_dir={OPTIONS['output_dir'].default}"
    try:
        objects = parser.parse_args_into_dataclasses([default, *words])
    except (ValueError, AssertionError) as error:
        raise UserError(str(error)) from None
    given = {word.removeprefix("--").partition("=")[0] for word in words}
    return ours | _plain({name: getattr(one, name) for one in objects for name in given if hasattr(one, name)})


def settings_of(*arguments: Any) -> TrainSettings:
    """The run that parsed arguments ask for, in a script of one's own: `GalvatronTrainer(settings_of(...)).train()`.

    What has its default counts as not given. Raises UserError.
    """
    return _settings({name: value for one in arguments for name, value in _given(one)}, frozenset())


def settings_for(model: Any, arguments: Any, sample_length: int | None) -> TrainSettings:
    """The run that a trainer is made for. `model`: its preset's name, directory or config.json, or PaddleNLP's config.

    `sample_length`: tokens of a sample of the user's own data, for where the plan leaves it open. Raises UserError.
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
    return any(name in values for name in UniformOptions.model_fields)


def _settings(values: dict[str, Any], handed_on: frozenset[str]) -> TrainSettings:
    unheeded = sorted(values.keys() & STOCK - OPTIONS.keys() - HOLDS.keys() - IDLE.keys() - handed_on)
    if unheeded:
        raise UserError(f"{name}: {values[name]} would change nothing here; leave it out" for name in unheeded)
    known = {name: value for name, value in values.items() if name in OPTIONS}
    canonical_options({name: value for name, value in values.items() if name in HOLDS and value}, OPTIONS)
    return prepare(_plain(known), dist.get_world_size()).settings


def _given(arguments: Any) -> Iterator[tuple[str, Any]]:
    """What differs from the default, and from what PaddleNLP makes of it."""
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


def _refuse(message: str) -> NoReturn:
    raise UserError(message.removeprefix("argument "))
