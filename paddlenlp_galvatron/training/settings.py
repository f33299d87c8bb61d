"""The record of a training run: every option under its own name, checked once, written as JSON that all ranks read."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from ..base.errors import UserError, plain_fault, reported
from ..base.limits import Count, CountOrAll, CountOrNone, Positive, Ranks, Rate, RateOrNone, Seed, Size
from ..base.reading import read_json
from ..base.writing import locked, make_folder, write_text
from ..model.preference import METRICS, Preference
from ..options.group import Options
from ..options.tuning import PreferenceOptions, TuningOptions
from ..plan import ModelShape, Plan, Precision, load_model, read_plan, with_assumptions, with_defaults
from ..plan.check import require_fits, require_trainable
from .checkpoint.stored import whole_checkpoints
from .recipe import NonFiniteGuard, Recipe

REPORTERS = {"tensorboard": "tensorboardX", "visualdl": "visualdl", "wandb": "wandb"}  # name -> its package
RANDOM = "random"  # value of input_dir: train on random tokens
Interval = Literal["no", "steps", "epoch"]
Names = Annotated[tuple[str, ...], BeforeValidator(lambda value: _words(value))]


def _words(value: object) -> object:
    text = " ".join(map(str, value)) if isinstance(value, list | tuple) else value
    return [word for word in text.replace(",", " ").split() if word != "none"] if isinstance(text, str) else value


MOST_TRACED = 100  # steps


def _steps(value: str) -> range:
    """`10` or `10-12`, counted from 1."""
    first, _, last = value.partition("-")
    if not (first.isdecimal() and (last or first).isdecimal() and len(value) < 20):
        raise ValueError("must be a step or the first and last one, such as 10 or 10-12")
    steps = range(int(first), int(last or first) + 1)
    if not 0 < len(steps) <= MOST_TRACED or steps[0] < 1:
        raise ValueError(f"must be 1 to {MOST_TRACED} steps, counted from 1, the first one before the last")
    return steps


class RunOptions(Options):
    """A training run, with PaddleNLP's names and defaults where they exist."""

    panel = "Run"

    output_dir: Path = Path("output")
    input_dir: str | None = None
    split: str = "949,50,1"
    max_steps: CountOrAll = -1
    num_train_epochs: Positive = 1.0
    sequence_parallel: bool | None = None
    no_async_grad_reduce: bool | None = None
    mixed_precision: Precision | None = None
    bf16: bool | None = None
    fp16: bool | None = None
    amp_master_grad: bool | None = None
    compute_precision: Precision | None = None
    use_flash_attention: bool | None = None
    use_fused_rope: bool | None = None
    use_fused_rms_norm: bool | None = None
    use_fused_cross_entropy: bool | None = None
    offload_optimizer: bool | None = None
    load: Path | None = None
    continue_training: bool = False
    load_distributed: bool = False
    load_iteration: CountOrNone | None = None
    initializer_range: Rate | None = None
    router_aux_loss_coef: RateOrNone | None = None
    mtp_loss_scaling_factor: RateOrNone | None = None
    overwrite_output_dir: bool = False
    device: Literal["cpu", "gpu"] | None = None
    resume_from_checkpoint: str = "auto"
    save_strategy: Interval = "steps"
    save_steps: CountOrNone = 500
    save_total_limit: Count | None = None
    do_eval: bool = False
    evaluation_strategy: Interval = "no"
    eval_steps: Count | None = None
    max_evaluate_steps: CountOrAll = -1
    load_best_model_at_end: bool = False
    metric_for_best_model: str | None = None
    greater_is_better: bool | None = None
    logging_steps: Count = 10
    logging_first_step: bool = False
    peak_tflops: Positive | None = None
    logging_dir: Path | None = None
    report_to: Names | None = None
    on_nonfinite: Literal["stop", "skip"] = "stop"
    max_skipped: int = Field(20, ge=0, le=10**6)
    trace: Annotated[str, AfterValidator(lambda value: _steps(value) and value)] | None = None
    seed: Seed = 42

    @model_validator(mode="after")
    def _one_precision(self) -> Self:
        wanted = {Precision(name) for name in ("bf16", "fp16") if getattr(self, name)} | {self.mixed_precision or None}
        if len(wanted - {None}) > 1:
            names = ", ".join(name for name in ("bf16", "fp16", "mixed_precision") if getattr(self, name))
            raise ValueError(f"{names}: contradict each other; give one")
        if self.load_distributed and self.load is None:
            raise ValueError("load_distributed: says how to take load, which is missing; give --load")
        if self.load_iteration is not None and self.load is None:
            raise ValueError("load_iteration: says which checkpoint of load, which is missing; give --load")
        if self.overwrite_output_dir and self.resume_from_checkpoint not in ("auto", "none"):
            raise ValueError("overwrite_output_dir: starts again, but resume_from_checkpoint names a checkpoint")
        return self

    @property
    def precision(self) -> Precision | None:
        """The requested type of weights and messages; None: the plan's."""
        return Precision.BF16 if self.bf16 else Precision.FP16 if self.fp16 else self.mixed_precision

    @property
    def assumptions(self) -> dict[str, Any]:
        """Requested fields of `plan.Assumptions`; the plan has the others."""
        asynchronous = None if self.no_async_grad_reduce is None else not self.no_async_grad_reduce
        asked = {
            "sequence_parallel": self.sequence_parallel,
            "mixed_precision": self.precision,
            "async_grad_reduce": asynchronous,
            "fp32_gradients": self.amp_master_grad,
            "flash_attention": self.use_flash_attention,
            "fused_rope": self.use_fused_rope,
            "fused_rms_norm": self.use_fused_rms_norm,
            "fused_cross_entropy": self.use_fused_cross_entropy,
            "offload_optimizer": self.offload_optimizer,
        }
        return {name: value for name, value in asked.items() if value is not None}

    @property
    def evaluates(self) -> Interval:
        """Strategy of evaluating the validation split."""
        return "steps" if self.do_eval and self.evaluation_strategy == "no" else self.evaluation_strategy

    @property
    def initial_weights(self) -> Path | None:
        """Path of the initial weights; None: they are drawn from the seed."""
        return None if self.load_distributed else self.load

    @property
    def saves(self) -> bool:
        """Whether checkpoints are written by default."""
        return self.save_strategy == "epoch" or (self.save_strategy == "steps" and self.save_steps > 0)


def require_reporters(names: Sequence[str]) -> None:
    """Raises UserError if a package of `report_to` is not installed."""
    lacking = [name for name in names if name in REPORTERS and find_spec(REPORTERS[name]) is None]
    if lacking:
        installed = ", ".join(name for name, package in REPORTERS.items() if find_spec(package)) or "none"
        extra = "pip install 'paddlenlp-galvatron[log]'" if "tensorboard" in lacking else f"pip install {lacking[0]}"
        raise UserError(f"report_to: {', '.join(lacking)} is not installed ({extra}); installed: {installed}")


class TrainOptions(Recipe, RunOptions, TuningOptions, PreferenceOptions):
    """All options of training, unresolved."""

    @model_validator(mode="after")
    def _fits_the_task(self) -> Self:
        of_pairs = self.model_dump(include=set(PreferenceOptions.model_fields), exclude_defaults=True)
        if self.kind != "dpo" and of_pairs:
            raise ValueError(f"{', '.join(of_pairs)}: of DPO, but the task is {self.kind}; give --task dpo")
        if self.kind == "dpo" and self.load_distributed:
            raise ValueError(
                "load_distributed: DPO compares with the model that it begins with, which is not in a run's "
                "checkpoint; name that model with --load, and continue in the run's own output_dir"
            )
        if self.tunes and self.input_dir is not None:
            raise ValueError(f"input_dir: is of pretraining; {self.task} learns from dataset_name_or_path")
        return self


class TrainSettings(TrainOptions):
    """A training run: its options and their results. Paths are absolute or relative to the start folder."""

    plan: Path
    model: str
    world_size: Ranks
    seq_length: Size | None = None
    model_source: Path | None = None

    @property
    def preference(self) -> Preference | None:
        """The loss of pairs; None: the run has none."""
        return self.pair_loss if self.kind == "dpo" else None

    @property
    def compares(self) -> bool:
        """Whether the loss needs the reference's log-probabilities."""
        return self.preference is not None and self.preference.has_reference

    @property
    def recipe(self) -> dict[str, Any]:
        """Update of weights and loss, which may differ in a resumed run."""
        names = {*Recipe.model_fields} - {"warmup_ratio", "use_multi_tensor"}  # `over` or the device resolves these
        names |= {*PreferenceOptions.model_fields} if self.kind == "dpo" else set()
        return self.model_dump(mode="json", include=names) | {"lora_plus_scale": self.lora_rate_scale}

    @property
    def log(self) -> Path:
        """One JSON line a step, and events."""
        return self.output_dir / "train_log.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.output_dir / "checkpoints"

    @property
    def continue_from(self) -> str:
        """auto, none, or the checkpoint to resume from; `load` until the run has saved a checkpoint."""
        if self.resume_from_checkpoint != "auto":
            return self.resume_from_checkpoint
        if self.load_distributed and (self.overwrite_output_dir or not whole_checkpoints(self.checkpoints)):
            return str(self.load)
        return "none" if self.overwrite_output_dir else "auto"

    @property
    def best_metric(self) -> str | None:
        """Metric of the best checkpoint; None: none is kept. Raises UserError."""
        if not self.load_best_model_at_end or self.evaluates == "no":
            return None
        name = (self.metric_for_best_model or "loss").removeprefix("eval_")
        metrics = ("loss", *METRICS) if self.preference else ("loss", "accuracy", "ppl")
        if name not in metrics:
            raise UserError(f"metric_for_best_model: {name} is not evaluated; choose one of {', '.join(metrics)}")
        return name

    @property
    def traffic(self) -> Path:
        """The file with the first step's traffic: groups, and calls and bytes by collective."""
        return self.output_dir / "traffic.json"

    @property
    def traced_steps(self) -> range:
        """Steps whose time line is written."""
        return range(0) if self.trace is None else _steps(self.trace)

    @property
    def traced(self) -> Path:
        """Time lines of all ranks."""
        return self.output_dir / "trace.json"

    def traced_by(self, rank: int) -> Path:
        """The time line of one rank."""
        return self.output_dir / "trace" / f"rank-{rank}.json"

    @property
    def rank_logs(self) -> Path:
        """Folder of the ranks' output."""
        return self.output_dir / "log"

    def make_output_dir(self) -> None:
        """Raises UserError if it cannot be made, or is a link that redirects files elsewhere."""
        with reported(f"{self.output_dir}: cannot be made"):
            make_folder(self.output_dir)
        for folder in (self.checkpoints, self.rank_logs, self.traced_by(0).parent):
            if folder.is_symlink():
                raise UserError(f"{folder}: is a link, through which nothing is written; remove it, or link output_dir")

    @contextmanager
    def folder_locked(self, wait_s: float = 0.0) -> Iterator[None]:
        """Make output_dir and lock it against other runs. `wait_s`: time for another run to end. Raises UserError if
        another run writes there or the folder cannot be made."""
        self.make_output_dir()
        with locked(self.output_dir, wait_s=wait_s):
            yield

    def require_free(self) -> None:
        """Raise UserError if another run writes to output_dir. A resumed run locks it after all checks."""
        if self.output_dir.is_dir():
            with locked(self.output_dir):
                pass

    def keep_files_of(self, folder: Path) -> Self:
        """Copies a plan and a model from `folder` to output_dir; returns the run with them. Raises UserError."""
        kept = {}
        for name in ("plan", "model"):
            path = Path(getattr(self, name))
            if path.parent == folder:
                target = self.output_dir / path.name
                write_text(target, path.read_text(encoding="utf-8"))
                kept[name] = target
        return type(self).model_validate(self.model_dump() | {name: str(path) for name, path in kept.items()})

    def load_plan(self) -> tuple[Plan, ModelShape]:
        """The plan, with all fields set as by default on this machine, and the model, checked against each other and
        the world. Raises UserError."""
        from ..launch import gpus  # here, as it imports Paddle

        read, shape = read_plan(self.plan, self.world_size), load_model(self.model).trained()
        return with_defaults(self.fitting(read, shape), gpus.gpu_count() > 0), shape

    def fitting(self, plan: Plan, shape: ModelShape) -> Plan:
        """The plan with this run's assumptions, checked against the model. Raises UserError."""
        plan = with_assumptions(plan, seq_length=self.seq_length, **self.assumptions)
        if plan.assumed.seq_length is None:
            raise UserError(f"{self.plan}: names no seq_length; pass --seq_length")
        require_trainable(plan, self.kind, self.adapts)
        require_fits(plan, shape)
        return plan

    def nonfinite_guard(self, scaled: bool) -> NonFiniteGuard:
        return NonFiniteGuard(self.on_nonfinite == "skip", self.max_skipped, scaled)

    def nothing_to_do(self, steps: int) -> str:
        """Message of a run whose checkpoints have all its steps."""
        return (
            f"nothing to do: {self.checkpoints} has all {steps} steps; raise max_steps, or start in another "
            "output_dir or with --overwrite_output_dir"
        )

    @property
    def how_to_resume(self) -> str:
        """Message of a run that was stopped."""
        if self.overwrite_output_dir:
            return "the same command without --overwrite_output_dir resumes"
        if self.resume_from_checkpoint != "auto":
            return "the same command with --resume_from_checkpoint auto resumes"
        return "the same command resumes"

    def steps_over(self, samples: int | None, global_batch: int) -> tuple[int, int]:
        """Steps of the run and of an epoch; `samples` are those of the training split. Raises UserError."""
        if samples is None:
            if self.max_steps < 0:
                raise UserError(
                    "max_steps: missing; random tokens have no end: give --max_steps, or data as --input_dir"
                )
            return self.max_steps, max(1, self.max_steps)
        epoch = max(1, samples // global_batch)
        return self.max_steps if self.max_steps >= 0 else math.ceil(self.num_train_epochs * epoch), epoch

    def save(self, path: Path) -> None:
        write_text(path, self.model_dump_json(indent=2) + "\n")


def read_settings(path: str | Path) -> TrainSettings:
    """Raises UserError with one line a fault."""
    try:
        return TrainSettings.model_validate(read_json(path))
    except ValidationError as error:
        raise UserError(f"{path}: {'.'.join(map(str, e['loc']))}: {plain_fault(e)}" for e in error.errors()) from None
