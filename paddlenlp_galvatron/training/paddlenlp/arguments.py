"""Options of training from a user's script: a command line, or PaddleNLP's training arguments."""

from collections.abc import Iterator, Sequence
from dataclasses import field, fields, make_dataclass
from enum import Enum
from json import dumps
from pathlib import Path
from typing import Any, Optional

import paddle.distributed as dist
from paddlenlp.trainer import TrainingArguments
from paddlenlp.utils.log import logger

from ...base import Note, UserError, no_note
from ...base.writing import write_text
from ...options.foreign import FOREIGN
from ...options.group import canonical_options, is_boolean, read_options
from ...options.group import read_words as read_option_words
from ...options.texts import text_of
from ...options.uniform import UniformOptions
from ...plan import read_plan
from ...runtime.groups import start_world
from ..prepare import CONFIG, GROUPS, SHARED, Prepared, prepare
from ..settings import TrainSettings
from .surface import HANDED_ON

OWNERS = {name: group for group in GROUPS for name in group.model_fields}
OPTIONS = {name: group.model_fields[name] for name, group in OWNERS.items()}
STOCK = {field.name for field in fields(TrainingArguments)}
DRY_RUN = "dry_run"


class WorldStarter(TrainingArguments):  # type: ignore[misc]
    """PaddleNLP's training arguments; starts the world as needed here before the base class would."""

    def __post_init__(self) -> None:
        start_world()
        super().__post_init__()


def _option_fields() -> Iterator[tuple[str, Any, Any]]:
    """All options as fields of a dataclass, unset by default, in types that PdArgumentParser reads."""
    for option, info in OPTIONS.items():
        if option not in STOCK:
            kind = Optional[bool] if is_boolean(info) else Optional[str]  # noqa: UP045
            yield option, kind, field(default=None, metadata={"help": text_of(OWNERS[option], option)})


GalvatronTrainingArguments = make_dataclass(
    "GalvatronTrainingArguments",
    _option_fields(),
    bases=(WorldStarter,),
    namespace={"__doc__": "PaddleNLP's training arguments, and all options of training."},
)


def read_words(words: Sequence[str], say: Note = no_note, task: str | None = None) -> dict[str, Any]:
    """Options by canonical name, and DRY_RUN, from a command line: flags, or one JSON file and flags that override it.

    `task`: the script's default task. `say` receives options without effect. Raises UserError.
    """
    file, flags = (Path(words[0]), words[1:]) if words and words[0].endswith(".json") else (None, words)
    from_file = [f"--{name}={_word(value)}" for name, value in read_options(file).items()] if file else []
    booleans = {name: is_boolean(info) for name, info in OPTIONS.items()} | {DRY_RUN: True}
    pairs, loose = read_option_words([*from_file, *flags], booleans, say, SHARED)
    if loose:
        raise UserError(f"{loose[0]}: is no option; write name=value")
    return ({"task": task} if task else {}) | dict(pairs)


def _word(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def settings_of(words: Sequence[str]) -> TrainSettings:
    """The run of a command line, for user scripts, on each rank of a started world:
    `GalvatronTrainer(settings_of(sys.argv[1:])).train()`. Raises UserError."""
    start_world()
    notes: list[str] = []
    return _noted(prepare(read_words(words, notes.append), dist.get_world_size()), notes)


def settings_for(model: Any, arguments: Any, sample_length: int | None) -> TrainSettings:
    """The run of a trainer. `model`: its preset's name, directory or config.json, or PaddleNLP's config.

    `sample_length`: sequence length of the user's data, used if the plan has none. Raises UserError.
    """
    if not isinstance(arguments, TrainingArguments):
        fault = "missing" if arguments is None else f"is a {type(arguments).__name__}"
        raise UserError(f"args: {fault}; give GalvatronTrainingArguments, or PaddleNLP's TrainingArguments")
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
    unheeded = sorted(values.keys() & STOCK - OPTIONS.keys() - FOREIGN.keys() - HANDED_ON)
    if unheeded:
        raise UserError(f"{name}: {values[name]} would change nothing here; leave it out" for name in unheeded)
    notes: list[str] = []
    others = {name: value for name, value in values.items() if name in FOREIGN}
    canonical_options(others, OPTIONS, notes.append)
    options = {name: value for name, value in values.items() if name in OPTIONS}
    return _noted(prepare(options, dist.get_world_size()), notes)


def _noted(run: Prepared, notes: Sequence[str]) -> TrainSettings:
    """The run's settings; rank 0 logs arguments without effect and those that the plan decides."""
    for note in (*notes, *run.notes) if dist.get_rank() == 0 else ():
        logger.warning(note)
    return run.settings


def _leaves_length_open(values: dict[str, Any]) -> bool:
    """Whether the named plan has no sequence length."""
    if plan := values.get("galvatron_config_path"):
        return read_plan(plan, dist.get_world_size()).assumed.seq_length is None
    return bool(UniformOptions.from_values(values).given)


def _given(arguments: TrainingArguments) -> Iterator[tuple[str, Any]]:
    """Arguments that differ from the default and from PaddleNLP's automatic value."""
    made = TrainingArguments(output_dir=arguments.output_dir)
    for each in fields(arguments):
        value = getattr(arguments, each.name, each.default)  # PaddleNLP deletes one of its fields
        if value != each.default and (each.name == "output_dir" or value != getattr(made, each.name, None)):
            yield each.name, value.value if isinstance(value, Enum) else value
