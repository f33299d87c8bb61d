"""Prepares a run from options: model, plan and number of ranks. Needs no Paddle."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from json import dumps
from pathlib import Path
from typing import Any

from ..base.errors import UserError
from ..base.limits import Port, Positive, Rank, Ranks
from ..base.reading import read_json
from ..base.writing import write_text
from ..launch.faults import WAIT_S
from ..model import config_of
from ..model.unsupported import MTP_COUNTS
from ..options.foreign import MODEL_FIELDS, Fate, idle_note, same
from ..options.group import Options
from ..options.model_options import Model, ModelOptions
from ..options.tuning import PreferenceOptions, TuningOptions
from ..options.uniform import DegreeOptions, UniformOptions
from ..plan import Assumptions, ModelShape, Plan, load_model, read_plan, write_plan
from ..plan.dialects import as_current
from ..plan.file import LARGEST_BYTES, newest_plan
from .checkpoint.companions import companions, config_file
from .checkpoint.stored import checkpoint_of
from .checkpoint.weight_files import without_absent_mtp
from .recipe import Recipe
from .settings import RunOptions, TrainOptions, TrainSettings

CONFIGS = Path("configs")  # the search writes plans here
PLAN = "galvatron_config.json"  # plan of GLOBAL mode's options
CONFIG = "config.json"  # file in a model's folder
SHARED = {"profile_mode": Fate("it is of profiles")}  # Galvatron's scripts pass it to both commands
TUNING_PATHS = (
    *("dataset_name_or_path", "train_dataset_path", "dev_dataset_path"),
    *("tokenizer_name_or_path", "chat_template", "lora_path"),
)


class PlanOptions(Options):
    """The plan. Unset: that of GLOBAL mode's options, else the newest in configs/ that fits."""

    galvatron_config_path: Path | None = None
    spare: Path | None = None

    def plan_for(self, world_size: int | None) -> Path | None:
        """The plan's file: the named one or, with `spare`, the file of its folder for these ranks. Raises UserError."""
        if self.spare is None:
            return self.galvatron_config_path
        if world_size is None:
            raise UserError("nproc: missing; --spare chooses the plan by the number of processes that are started")
        named = [self.galvatron_config_path] if self.galvatron_config_path else []
        sizes = {path: _world_size(path) for path in [*named, *sorted(self.spare.glob("*.json"))]}
        fitting = [path for path, size in sizes.items() if size == world_size]
        if not fitting:
            there = ", ".join(map(str, sorted(set(sizes.values())))) or "no plan"
            raise UserError(
                f"spare: {self.spare}: no plan for {world_size} GPUs, but for {there}; galvatron plan spare"
            )
        return fitting[0]


class LaunchOptions(Options):
    """The processes; each of several nodes starts the same command."""

    panel = "Processes and nodes"

    nproc: Ranks | None = None
    num_gpus_per_node: Ranks | None = None
    num_nodes: Ranks | None = None
    node_rank: Rank | None = None
    master_addr: str | None = None
    master_port: Port | None = None
    on_event: str | None = None
    timeout: Positive | None = None
    distributed_timeout_minutes: Positive = round(WAIT_S / 60)


GROUPS: tuple[type[Options], ...] = (
    *(ModelOptions, UniformOptions, DegreeOptions, PlanOptions),
    *(Recipe, RunOptions, TuningOptions, PreferenceOptions, LaunchOptions),
)


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start: its plan and model, checked against each other, and notes for the user."""

    settings: TrainSettings
    plan: Plan  # device-dependent fields are unset: `plan.check.with_defaults`
    shape: ModelShape
    notes: tuple[str, ...]


def prepare(values: Mapping[str, Any], world_size: int | None, folder: Path | None = None) -> Prepared:
    """The run of options by canonical name. A plan or model given by options is written to `folder`, from which
    `settings.keep_files_of` copies it, or else to output_dir.

    `world_size`: ranks to start; None: as many as the plan has. Raises UserError.
    """
    options, choice = TrainOptions.from_values(values), PlanOptions.from_values(values)
    uniform, degrees = UniformOptions.from_values(values), DegreeOptions.from_values(values)
    if options.tunes:  # PaddleNLP's own defaults: fine-tuning begins with the model's weights, and its rates fall to 0
        options = TrainOptions.from_values({"continue_training": True, "min_learning_rate": None} | dict(values))
    folder, load = folder or options.output_dir, options.load
    if load is not None:
        load = checkpoint_of(load, options.load_iteration, newest=options.load_distributed)
    named = ModelOptions.from_values(values)
    model, shape, seq_length = _model(named, options, load, folder)
    _require_settled(values, shape)
    notes = [f"{', '.join(ignored)} ignored, as set_*_manually is 0"] if (ignored := named.ignored) else []
    paths: dict[str, str] = {}
    if options.tunes:
        if options.kind == "dpo" and shape.mtp_layers:
            raise UserError(f"task: {shape.name} has MTP, with which DPO is not trained; add --{MTP_COUNTS[0]} 0")
        paths = _absolute_paths(options, named.model_size)
    elif (tokenizer := options.tokenizer_name_or_path) and tokenizer.exists():
        paths = {"tokenizer_name_or_path": str(tokenizer.absolute())}
    elif tokenizer:
        notes.append(idle_note({"tokenizer_name_or_path": "data are tokenised before: galvatron data prepare"}))
    if options.continue_training and load is None:
        load = _own_folder(named)
    if plan_file := choice.plan_for(world_size):
        plan = plan_file
        if choice.spare:
            notes.append(f"the plan for {world_size} processes is {plan}")
        world_size = world_size or _world_size(plan)
        if names := [*uniform.given, *degrees.given]:
            notes.append(f"{', '.join(names)} ignored: the plan {plan} decides")
    elif world_size is None:
        raise UserError("nproc: missing; name a plan's file, or say for how many processes one of configs/ is wanted")
    else:
        plan, note = _plan_without_file(options, uniform, degrees, shape, world_size, seq_length, folder)
        notes.append(note)
    resolved = {"plan": plan.absolute(), "model": model, "world_size": world_size, "seq_length": seq_length or None}
    resolved |= {"load": load, "output_dir": options.output_dir.absolute()}
    resolved["model_source"] = _source(named.model_size, load)
    settings = TrainSettings.from_values(options.model_dump() | paths | resolved)
    notes += _idle_evaluation(settings, options)
    return Prepared(settings, settings.fitting(read_plan(plan, world_size), shape), shape, tuple(notes))


def _plan_without_file(
    options: TrainOptions,
    uniform: UniformOptions,
    degrees: DegreeOptions,
    shape: ModelShape,
    world_size: int,
    seq_length: int,
    folder: Path,
) -> tuple[Path, str]:
    """Plan of GLOBAL mode's options, written to `folder`, or the newest in configs/, and a note. Raises UserError."""
    names = [*uniform.given, *degrees.given]
    if not names:
        plan = newest_plan(CONFIGS, shape, world_size, options.kind, options.adapts)
        return plan, f"plan: {plan}, the newest in {CONFIGS} for {shape.name} on {world_size} ranks"
    if not (uniform.given or degrees.says_degrees):
        raise UserError(
            f"{name}: the plan file says the global batch; leave the option out, or give degrees in place of a plan"
            for name in names
        )
    uniform = degrees.onto(uniform, world_size)
    if not seq_length:
        raise UserError("seq_length: missing; give the sequence length, such as --seq_length 4096")
    assumed = Assumptions(seq_length=seq_length, **options.assumptions)
    write_plan(uniform.plan(shape.layers, world_size, assumed, shape.dense_layers), folder / PLAN)
    note = f"one strategy for all layers, by {', '.join(names)}; a run writes {options.output_dir / PLAN}"
    return folder / PLAN, note


def _idle_evaluation(settings: TrainSettings, options: TrainOptions) -> list[str]:
    """Notes on options of evaluation that have no effect."""
    reasons: dict[str, str] = {}
    if settings.evaluates == "no":  # Megatron-LM's switches of evaluation
        reasons |= dict.fromkeys(("eval_steps", "max_evaluate_steps"), "nothing is evaluated without do_eval")
    if settings.best_metric is None:
        needs = "the best checkpoint needs load_best_model_at_end and evaluation"
        reasons |= dict.fromkeys(("load_best_model_at_end", "metric_for_best_model"), needs)
    changed = options.model_dump(include={*reasons}, exclude_defaults=True)
    return [idle_note({name: reasons[name] for name in changed})] if changed else []


def _require_settled(values: Mapping[str, Any], shape: ModelShape) -> None:
    """Raise UserError for numbers of Megatron-LM's options that the model does not have."""
    wanted = {name: getattr(shape, field, getattr(shape.latents, field, 0)) for name, field in MODEL_FIELDS.items()}
    if faults := [
        f"{name}: is {values[name]}, but the model has {number}; leave it out, or name a config.json that has it"
        for name, number in wanted.items()
        if values.get(name) is not None and not same(str(values[name]), str(number))
    ]:
        raise UserError(faults)


def _model(named: ModelOptions, options: TrainOptions, load: Path | None, folder: Path) -> tuple[str, ModelShape, int]:
    """The model's name in the settings, its shape, and the sequence length; 0: the plan's."""
    if named.model_size is None and load is not None and (load / CONFIG).exists():
        named = named.model_copy(update={"model_size": str(load)})
    model = named.resolve(default_seq_length=0)
    _require_one_type(model)
    shape = model.shapes[0].trained()
    if named.num_nextn_predict_layers is None and (config := config_file(named.model_size)):
        shape = without_absent_mtp(shape, config.parent)
    if options.initializer_range is not None:
        shape = replace(shape, initializer_range=options.initializer_range)
    if options.router_aux_loss_coef is not None:
        if not shape.experts:
            raise UserError(f"router_aux_loss_coef: {shape.name} has no experts to balance; leave it out")
        shape = replace(shape, router_aux_loss_coef=options.router_aux_loss_coef)
    if options.mtp_loss_scaling_factor is not None and not shape.mtp_layers:
        raise UserError(f"mtp_loss_scaling_factor: {shape.name} is trained without MTP; leave it out")
    if named.model_size is not None and shape == load_model(named.model_size):
        return named.model_size, shape, model.seq_length
    path = folder.absolute() / CONFIG
    write_text(path, dumps(config_of(shape), indent=2) + "\n")
    return str(path), load_model(path), model.seq_length


def _source(*models: str | Path | None) -> Path | None:
    """The config.json in whose folder the files next to the weights are: the first with such files."""
    configs = [config.absolute() for model in models if (config := config_file(model))]
    return next((config for config in configs if companions(config.parent)), configs[0] if configs else None)


def _require_one_type(model: Model) -> None:
    """Raise UserError for several layer types, with the reason why such a model cannot be trained."""
    shapes = model.shapes
    if len(shapes) == 1:
        return
    widths, lengths = zip(*((shape.hidden_size, shape.seq_length or model.seq_length) for shape in shapes), strict=True)
    if len(set(widths)) > 1:
        name, numbers, why = "hidden_size_list", widths, "layers of several widths need projections between them"
    elif len(set(lengths)) > 1:
        name, numbers, why = "seqlen_list", lengths, "samples that change their length need a layer that does so"
    else:
        raise UserError(f"num_layertype: the {len(shapes)} types are equal; leave it out, and give all layers as one")
    raise UserError(
        f"{name}: {', '.join(map(str, numbers))}: {why}, which no supported model family has; such a model can be "
        "planned, not trained"
    )


def _absolute_paths(options: TrainOptions, model: str | None) -> dict[str, str]:
    """Absolute, existing paths of fine-tuning; the default tokenizer is that of the model's folder. Raises
    UserError."""
    paths = {name: Path(value) for name in TUNING_PATHS if (value := getattr(options, name))}
    if options.tokenizer_name_or_path is None:
        paths["tokenizer_name_or_path"] = folder = _folder_of(model)
        if model is None or not folder.is_dir():
            raise UserError(
                f"tokenizer_name_or_path: missing, and {model or 'the model'} is no folder here; give the folder of a "
                "downloaded model, with weights and tokenizer.json, as --model"
            )
    return {name: str(path.absolute()) for name, path in paths.items() if path.exists()}


def _folder_of(model: str | None) -> Path:
    """The folder that a model's name or config.json refers to."""
    folder = Path(model or "")
    return folder.parent if folder.name == CONFIG else folder


def _own_folder(options: ModelOptions) -> Path:
    """Folder of the model's weights, even if sizes are given. Raises UserError."""
    folder = _folder_of(options.model_size)
    if options.model_size is None or not folder.is_dir():
        raise UserError(
            f"continue_training: {options.model_size or 'the model'} is no folder with weights to start from; "
            "name one in model_size, or give --load"
        )
    return folder


def _world_size(path: Path) -> int:
    try:
        world_size = as_current(read_json(path, LARGEST_BYTES, comments=True))[0].get("world_size")
    except UserError as error:
        raise UserError(f"{path}: {fault.removeprefix(f'{path}: ')}" for fault in error.faults) from None
    if not isinstance(world_size, int):
        raise UserError(f"{path}: world_size: missing; add it to the file or pass --nproc")
    return world_size
