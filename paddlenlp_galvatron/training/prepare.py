"""From options to a run: which model, which plan, how many ranks. Nothing of it needs Paddle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from json import dumps
from pathlib import Path
from typing import Any

from pydantic import Field

from ..base.limits import Port, Positive, Rank, Ranks
from ..base.reading import read_json
from ..base.writing import write_text
from ..interop.foreign import idle_note
from ..interop.plans import as_current
from ..launch.faults import WAIT_S
from ..model import config_of
from ..options.group import Options
from ..options.model_options import ModelOptions
from ..options.tuning import PreferenceOptions, TuningOptions
from ..options.uniform import DegreeOptions, UniformOptions
from ..plan import Assumptions, ModelShape, UserError, load_model, write_plan
from ..plan.file import LARGEST_BYTES, newest_plan
from .checkpoint.choice import checkpoint_of
from .recipe import Recipe
from .settings import RunOptions, TrainSettings

CONFIGS = Path("configs")  # where the search writes plans
PLAN = "galvatron_config.json"  # plan of GLOBAL mode's options
CONFIG = "config.json"  # of a model's folder
BESIDE = {"profile_mode": "it is of profiles"}  # Galvatron's scripts give it to both
TUNING_PATHS = (
    *("dataset_name_or_path", "train_dataset_path", "dev_dataset_path"),
    *("tokenizer_name_or_path", "chat_template", "lora_path"),
)


class PlanOptions(Options):
    """Which plan. Unset: that of GLOBAL mode's options, or without them the newest in configs/ that fits."""

    galvatron_config_path: Path | None = Field(None, description="plan file; unset: GLOBAL mode, or the newest plan")


class LaunchOptions(Options):
    """Which processes; of several nodes each starts the same command."""

    panel = "Processes and nodes"

    nproc: Ranks | None = Field(
        None, description="processes on each node; unset: as the plan says, or one for each GPU"
    )
    num_gpus_per_node: Ranks | None = Field(None, description="the same as nproc")
    num_nodes: Ranks | None = Field(None, description="number of nodes")
    node_rank: Rank | None = Field(None, description="number of this node, from 0")
    master_addr: str | None = Field(None, description="address of node 0")
    master_port: Port | None = Field(None, description="free port of node 0")
    timeout: Positive | None = Field(None, description="seconds after which the run is stopped; unset: never")
    distributed_timeout_minutes: Positive = Field(
        round(WAIT_S / 60),
        description="for which ranks wait for another one in a collective before the run ends and names it",
    )


GROUPS: tuple[type[Options], ...] = (
    *(ModelOptions, UniformOptions, DegreeOptions, PlanOptions),
    *(Recipe, RunOptions, TuningOptions, PreferenceOptions, LaunchOptions),
)


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start, and what the user should hear of it."""

    settings: TrainSettings
    notes: tuple[str, ...]


def prepare(values: Mapping[str, Any], world_size: int | None, folder: Path | None = None) -> Prepared:
    """The run that options by canonical name ask for; a plan or model of their own is written to `folder`, from where
    `settings.keep_files_of` takes it, or else to output_dir.

    `world_size`: ranks that will be started; None: as many as the plan has. Raises UserError.
    """
    run, uniform, choice = (
        RunOptions.from_values(values),
        UniformOptions.from_values(values),
        PlanOptions.from_values(values),
    )
    degrees, tuning = DegreeOptions.from_values(values), TuningOptions.from_values(values)
    pairs = PreferenceOptions.from_values(values)
    if tuning.kind != "dpo" and (said := pairs.model_dump(exclude_defaults=True)):
        raise UserError(f"{', '.join(said)}: of DPO, but the task is {tuning.kind}; give --task dpo")
    if tuning.kind == "dpo" and run.load_distributed:
        raise UserError(
            "load_distributed: DPO compares with the model that it begins with, which a run's checkpoint does not "
            "tell; name that model with --load, and continue in the run's own output_dir"
        )
    given = [*uniform.given, *degrees.given]
    folder = folder or run.output_dir
    notes = []
    if run.load is not None:
        run = run.model_copy(update={"load": checkpoint_of(run.load, run.load_iteration, newest=run.load_distributed)})
    model, shape, seq_length = _model(values, run, folder)
    if ignored := ModelOptions.from_values(values).ignored:
        notes.append(f"left out of account, as set_*_manually is 0: {', '.join(ignored)}")
    if tuning.tunes:
        if run.input_dir is not None:
            raise UserError(f"input_dir: is of pretraining; {tuning.task} learns from dataset_name_or_path")
        _require_trained_with_experts(shape, tuning)
        # PaddleNLP's own defaults: fine-tuning begins with the model's weights, and its rates fall to 0.
        values = {"continue_training": True, "min_learning_rate": None} | dict(values)
        run = run.model_copy(update={"continue_training": RunOptions.from_values(values).continue_training})
        tuning = _with_paths(tuning, ModelOptions.from_values(values).model_size)
    elif tuning.tokenizer_name_or_path is not None:
        notes.append(idle_note({"tokenizer_name_or_path": "data are tokenised before: galvatron data prepare"}))
    if run.continue_training and run.load is None:
        run = run.model_copy(update={"load": _own_folder(ModelOptions.from_values(values))})
    if choice.galvatron_config_path:
        plan = choice.galvatron_config_path
        if given:
            notes.append(f"{', '.join(given)}: left out of account, as the plan {plan} says what holds")
        world_size = world_size or _world_size(plan)
    elif world_size is None:
        raise UserError("nproc: missing; name a plan's file, or say for how many processes one of configs/ is wanted")
    elif given and (uniform.given or degrees.says_degrees):
        uniform = degrees.onto(uniform, world_size)
        plan = folder / PLAN
        write_plan(uniform.plan(shape.layers, world_size, _assumed(run, seq_length)), plan)
        notes.append(f"one strategy for all layers, by {', '.join(given)}: {run.output_dir / PLAN}")
    elif given:
        raise UserError(
            f"{name}: the plan file says the global batch; leave the option out, or give degrees in place of a plan"
            for name in given
        )
    else:
        plan = newest_plan(CONFIGS, shape, world_size, tuning.kind, tuning.adapts)
        notes.append(f"plan: {plan}, the newest in {CONFIGS} for {shape.name} on {world_size} ranks")
    settings = TrainSettings.from_values(
        run.model_dump()
        | {
            "plan": plan.absolute(),
            "model": model,
            "world_size": world_size,
            "seq_length": seq_length or None,
            "output_dir": run.output_dir.absolute(),
            "recipe": Recipe.from_values(values),
            "tuning": tuning,
            "pairs": pairs,
        }
    )
    if settings.best_metric is None:
        needs = "the best checkpoint needs load_best_model_at_end and evaluation"
        best = run.model_dump(include={"load_best_model_at_end", "metric_for_best_model"}, exclude_defaults=True)
        notes += [idle_note(dict.fromkeys(best, needs))] if best else []
    return Prepared(settings, tuple(notes))


def _require_trained_with_experts(shape: ModelShape, tuning: TuningOptions) -> None:
    """Raise UserError for a task that does not go with a model's experts."""
    faults = {
        f"lora: {shape.name} has experts, beside which no adapters learn; train all weights instead": tuning.adapts,
        f"task: {shape.name} has experts, with which DPO is not trained; give --task sft": tuning.kind == "dpo",
    }
    if shape.experts and any(faults.values()):
        raise UserError(fault for fault, is_one in faults.items() if is_one)


def _model(values: Mapping[str, Any], run: RunOptions, folder: Path) -> tuple[str, ModelShape, int]:
    """The model as the settings name it, its shape, and the sequence length, 0 where the plan says them."""
    options = ModelOptions.from_values(values)
    if options.model_size is None and run.load is not None and (run.load / CONFIG).exists():
        options = options.model_copy(update={"model_size": str(run.load)})
    model = options.resolve(default_seq_length=0)
    if len(model.shapes) > 1:
        raise UserError(f"num_layertype: training takes one type of layers, but {len(model.shapes)} are given")
    shape = model.shapes[0]
    if run.initializer_range is not None:
        shape = replace(shape, initializer_range=run.initializer_range)
    if run.router_aux_loss_coef is not None:
        if not shape.experts:
            raise UserError(f"router_aux_loss_coef: {shape.name} has no experts to balance; leave it out")
        shape = replace(shape, router_aux_loss_coef=run.router_aux_loss_coef)
    if options.model_size is not None and shape == load_model(options.model_size):
        return options.model_size, shape, model.seq_length
    path = folder.absolute() / CONFIG
    write_text(path, dumps(config_of(shape), indent=2) + "\n")
    return str(path), shape, model.seq_length


def _with_paths(tuning: TuningOptions, model: str | None) -> TuningOptions:
    """The same, wherever ranks are started, with the tokenizer of the model's folder where none is named. Raises
    UserError."""
    given = tuning.model_dump(exclude_unset=True)
    if tuning.tokenizer_name_or_path is None:
        folder = Path(model or "")
        folder = folder.parent if folder.name == CONFIG else folder
        if model is None or not folder.is_dir():
            raise UserError("tokenizer_name_or_path: missing; the model is no folder that brings a tokenizer.json")
        given["tokenizer_name_or_path"] = folder
    paths = {name: Path(given[name]) for name in TUNING_PATHS if given.get(name)}
    given |= {name: str(path.absolute()) for name, path in paths.items() if path.exists()}
    return TuningOptions.model_validate(given)


def _own_folder(options: ModelOptions) -> Path:
    """Where the model's own weights are, whatever numbers are given beside it. Raises UserError."""
    folder = Path(options.model_size or "")
    folder = folder.parent if folder.name == CONFIG else folder
    if options.model_size is None or not folder.is_dir():
        raise UserError(
            f"continue_training: {options.model_size or 'the model'} is no folder with weights to go on from; "
            "name one in model_size, or give --load"
        )
    return folder


def _assumed(run: RunOptions, seq_length: int) -> Assumptions:
    if not seq_length:
        raise UserError("seq_length: missing; say how many tokens a sample has")
    chosen: dict[str, Any] = {"sequence_parallel": run.sequence_parallel, "mixed_precision": run.precision}
    chosen |= {"fp32_gradients": run.amp_master_grad, "flash_attention": run.use_flash_attention} | run.fused_kernels
    if run.no_async_grad_reduce is not None:
        chosen["async_grad_reduce"] = not run.no_async_grad_reduce
    return Assumptions(seq_length=seq_length, **{name: value for name, value in chosen.items() if value is not None})


def _world_size(path: Path) -> int:
    try:
        world_size = as_current(read_json(path, LARGEST_BYTES, comments=True))[0].get("world_size")
    except UserError as error:
        raise UserError(f"{path}: {fault.removeprefix(f'{path}: ')}" for fault in error.faults) from None
    if not isinstance(world_size, int):
        raise UserError(f"{path}: world_size: missing; add it to the file or pass --nproc")
    return world_size
