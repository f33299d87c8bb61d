"""The record of a training run: every option under its own name, checked once, written as JSON that all ranks read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from ..base.errors import UserError, plain_fault
from ..base.limits import Count, CountOrAll, CountOrNone, Positive, Ranks, Rate, RateOrNone, Seed, Size
from ..base.locking import locked
from ..base.reading import read_json
from ..base.writing import make_folder, write_text
from ..model.preference import METRICS, Preference
from ..options.group import Options
from ..options.tuning import PreferenceOptions, TuningOptions
from ..plan import ModelShape, Plan, Precision, load_model, read_plan, with_assumptions, with_defaults
from ..plan.check import require_fits, require_trainable
from .checkpoint.stored import whole_checkpoints
from .recipe import NonFiniteGuard, Recipe

REPORTERS = {"tensorboard": "tensorboardX", "visualdl": "visualdl", "wandb": "wandb"}  # -> a package
RANDOM = "random"  # an input_dir: no data, but random tokens
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
    """A training run by PaddleNLP's names and with its defaults, where it has them."""

    panel = "Run"

    output_dir: Path = Field(Path("output"), description="folder for the training log, checkpoints and the ranks' logs")
    input_dir: str | None = Field(
        None,
        description='Megatron data without .bin/.idx, a folder, or a blend, "0.7 a 0.3 b"; random: random tokens, for '
        "benchmarks",
    )
    split: str = Field("949,50,1", description="relative shares of the documents for training, validation and test")
    max_steps: CountOrAll = Field(-1, description="optimizer steps; -1: as num_train_epochs says")
    num_train_epochs: Positive = Field(1.0, description="passes over the training split")
    sequence_parallel: bool | None = Field(None, description="Megatron-SP; unset: as the plan says")
    no_async_grad_reduce: bool | None = Field(
        None, description="1: reduce gradients after every micro-batch; unset: as the plan says"
    )
    mixed_precision: Precision | None = Field(
        None, description="type of weights and messages, bf16, fp16 or fp32; unset: the plan's"
    )
    bf16: bool | None = Field(None, description="1: the same as mixed_precision bf16")
    fp16: bool | None = Field(None, description="1: the same as mixed_precision fp16")
    amp_master_grad: bool | None = Field(
        None,
        description="sum and reduce gradients in fp32 in 16-bit training; unset: as the plan says, else on GPUs only",
    )
    compute_precision: Precision | None = Field(
        None, description="number type in which layers compute; unset: mixed_precision on GPUs, fp32 on CPUs"
    )
    use_flash_attention: bool | None = Field(
        None, description="Paddle's flash attention, on GPUs; unset: as the plan says, else in 16 bits"
    )
    use_fused_rope: bool | None = Field(
        None, description="Paddle's fused rotary positions, on GPUs; unset: as the plan says, else on"
    )
    use_fused_rms_norm: bool | None = Field(
        None, description="Paddle's fused RMSNorm, on GPUs; unset: as the plan says, else on"
    )
    use_fused_cross_entropy: bool | None = Field(
        None, description="Paddle's fused loss over a split vocabulary, on GPUs; unset: as the plan says, else off"
    )
    load: Path | None = Field(
        None, description="weights to start from: a Hugging Face directory, or a converted or training checkpoint"
    )
    continue_training: bool = Field(False, description="1: take the model's own folder as load")
    load_distributed: bool = Field(False, description="1: load is a training checkpoint, whose run is continued")
    load_iteration: CountOrNone | None = Field(
        None, description="step of the checkpoint to load, if load is the folder of a run; unset: the newest"
    )
    initializer_range: Rate | None = Field(
        None, description="standard deviation of random initial weights; unset: the model's"
    )
    router_aux_loss_coef: RateOrNone | None = Field(
        None,
        description="coefficient of the balance loss of models with experts; unset: config.json's, if "
        "output_router_logits is true there",
    )
    overwrite_output_dir: bool = Field(False, description="1: start from the beginning, as resume_from_checkpoint none")
    device: Literal["cpu", "gpu"] | None = Field(None, description="accepted if ranks run on it anyway, else refused")
    resume_from_checkpoint: str = Field(
        "auto", description="checkpoint to continue from: auto (the newest undamaged one, if any), none, or a folder"
    )
    save_strategy: Interval = Field("steps", description="when checkpoints are written: no, steps or epoch")
    save_steps: CountOrNone = Field(500, description="steps between checkpoints; 0: write one only on SIGTERM")
    save_total_limit: Count | None = Field(
        None, description="number of checkpoints to keep; older ones are deleted; unset: all"
    )
    do_eval: bool = Field(False, description="1: the same as evaluation_strategy steps")
    evaluation_strategy: Interval = Field(
        "no", description="when the validation split is evaluated: no, steps or epoch"
    )
    eval_steps: Count | None = Field(None, description="steps between evaluations; unset: logging_steps")
    max_evaluate_steps: CountOrAll = Field(
        -1, description="number of global batches in an evaluation; -1: the whole split"
    )
    load_best_model_at_end: bool = Field(
        False, description="1: keep the checkpoint that evaluates best, end with its weights, and convert it by default"
    )
    metric_for_best_model: str | None = Field(
        None, description="metric of the best: loss, accuracy or ppl; in DPO loss, rewards/accuracies, …; unset: loss"
    )
    greater_is_better: bool | None = Field(None, description="unset: 0 for loss and ppl, else 1")
    logging_steps: Count = Field(10, description="steps between health lines, and between entries of PaddleNLP's log")
    logging_first_step: bool = Field(False, description="1: also write an entry after the first step")
    peak_tflops: Positive | None = Field(
        None, description="peak TFLOP/s of a device, for MFU; unset: from the data sheet of the device"
    )
    logging_dir: Path | None = Field(
        None, description="folder for the logs of VisualDL and others in report_to; unset: a folder in output_dir"
    )
    report_to: Names | None = Field(
        None, description="visualdl, tensorboard (extra [log]), wandb, … or none; unset: VisualDL if it is installed"
    )
    on_nonfinite: Literal["stop", "skip"] = Field(
        "stop", description="what to do if loss or gradients of a step are NaN or Inf: stop the run or skip the step"
    )
    max_skipped: int = Field(
        20,
        ge=0,
        le=10**6,
        description="the run ends when more than this many of the latest 2 x max_skipped steps were skipped",
    )
    trace: Annotated[str, AfterValidator(lambda value: _steps(value) and value)] | None = Field(
        None, description="steps whose time line is written to trace.json, such as 10 or 10-12"
    )
    seed: Seed = Field(42, description="seed of weights, dropout and the order of the data")

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
        """Type of weights and messages that is requested; None: the plan's."""
        return Precision.BF16 if self.bf16 else Precision.FP16 if self.fp16 else self.mixed_precision

    @property
    def assumptions(self) -> dict[str, Any]:
        """Requested fields of `plan.Assumptions`; the plan says the others."""
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
        }
        return {name: value for name, value in asked.items() if value is not None}

    @property
    def evaluates(self) -> Interval:
        """When the validation split is evaluated."""
        return "steps" if self.do_eval and self.evaluation_strategy == "no" else self.evaluation_strategy

    @property
    def initial_weights(self) -> Path | None:
        """Path of the initial weights; None: they are drawn from the seed."""
        return None if self.load_distributed else self.load

    @property
    def saves(self) -> bool:
        """Whether checkpoints are written without being requested."""
        return self.save_strategy == "epoch" or (self.save_strategy == "steps" and self.save_steps > 0)


def require_reporters(names: Sequence[str]) -> None:
    """Raises UserError for one of `report_to` whose package is not installed."""
    lacking = [name for name in names if name in REPORTERS and find_spec(REPORTERS[name]) is None]
    if lacking:
        known = ", ".join(name for name, package in REPORTERS.items() if find_spec(package)) or "none"
        extra = "pip install 'paddlenlp-galvatron[log]'" if "tensorboard" in lacking else f"pip install {lacking[0]}"
        raise UserError(f"report_to: {', '.join(lacking)} is not installed ({extra}); installed: {known}")


class TrainOptions(Recipe, RunOptions, TuningOptions, PreferenceOptions):
    """All options of training, as they are given."""

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
    """A training run: its options, and what they come to. Paths are absolute or relative to where it is started."""

    plan: Path = Field(description="strategy file")
    model: str = Field(description="config.json, its folder, or the name of a preset")
    world_size: Ranks = Field(description="ranks that are started")
    seq_length: Size | None = Field(None, description="sequence length; absent: the plan's")
    model_source: Path | None = Field(
        None, description="config.json whose folder has the model's files; absent: model's"
    )

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
        """How weights are updated and what the loss is: a resumed run may have others than the checkpoint's run."""
        names = {*Recipe.model_fields} - {"warmup_ratio", "use_multi_tensor"}  # which `over` or the device resolves
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
        """auto, none, or the checkpoint to resume from: `load` is one, too, until the run has its own."""
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
        known = ("loss", *METRICS) if self.preference else ("loss", "accuracy", "ppl")
        if name not in known:
            raise UserError(f"metric_for_best_model: {name} is not evaluated; choose one of {', '.join(known)}")
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
        """Raises UserError: it cannot be made, or it was prepared to redirect files elsewhere."""
        try:
            make_folder(self.output_dir)
        except OSError as error:
            raise UserError(f"{self.output_dir}: cannot be made: {error.strerror}") from None
        for folder in (self.checkpoints, self.rank_logs, self.traced_by(0).parent):
            if folder.is_symlink():
                raise UserError(f"{folder}: is a link, through which nothing is written; remove it, or link output_dir")

    @contextmanager
    def folder_locked(self, wait_s: float = 0.0) -> Iterator[None]:
        """Make output_dir, and let no other run write there meanwhile. `wait_s`: how long one that ends may take.
        Raises UserError: another run writes there; the folder cannot be made."""
        self.make_output_dir()
        with locked(self.output_dir, wait_s=wait_s):
            yield

    def require_free(self) -> None:
        """Raise UserError where another run writes to output_dir. A resumed run locks it when all is checked."""
        if self.output_dir.is_dir():
            with locked(self.output_dir):
                pass

    def keep_files_of(self, folder: Path) -> Self:
        """Copies a plan and a model that lie in `folder` to output_dir; returns the run with them. Raises UserError."""
        kept = {}
        for name in ("plan", "model"):
            path = Path(getattr(self, name))
            if path.parent == folder:
                target = self.output_dir / path.name
                write_text(target, path.read_text(encoding="utf-8"))
                kept[name] = target
        return type(self).model_validate(self.model_dump() | {name: str(path) for name, path in kept.items()})

    def load_plan(self, on_gpus: bool | None = None) -> tuple[Plan, ModelShape]:
        """The plan, with all fields set, and the model, checked against each other and the world. `on_gpus`: the
        device of the defaults; None: this machine's. Raises UserError."""
        read, shape = read_plan(self.plan, self.world_size), load_model(self.model)
        plan = self.fitting(read, shape)
        if on_gpus is None:
            from ..launch import gpus  # here, as it imports Paddle

            on_gpus = gpus.gpu_count() > 0
        return with_defaults(plan, on_gpus), shape

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
