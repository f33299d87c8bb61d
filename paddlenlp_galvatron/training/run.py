"""A run on one rank: the model under its plan, its data, its optimizer, and DPO's reference; and its resume point: the
newest whole checkpoint, and the next sample."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from json import dumps
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from ..base.errors import UserError
from ..base.reading import read_bytes
from ..base.tracing import Event, join_traces, write_events
from ..plan import ModelShape, Plan, Precision, plan_id
from ..runtime.engine import Engine
from ..runtime.setup import ModelSetup
from ..runtime.trace import span, traced
from .checkpoint.companions import companions, config_file, config_like, with_template
from .checkpoint.convert import types_of
from .checkpoint.loading import from_first, gather_objects, load, open_weights, print_rank_0
from .checkpoint.saving import Origin, Writer
from .checkpoint.stored import SMALLER, Best, BrokenCheckpoint, Checkpoint, open_checkpoint, verify
from .checkpoint.weight_files import CONFIG
from .data.source import BatchSource
from .data.templates import open_template
from .data.tuning import TuningData
from .initial_weights import Reference, initial_weights, set_rates
from .inputs import Sources, candidates, open_data, open_validation, recipe_changes, require_same_adapters, samples_seen
from .settings import TrainSettings
from .step_log import CHANGED, StepLog

OpenTraining = Callable[[TrainSettings, Plan, ModelShape], BatchSource]
OpenEvaluation = Callable[[TrainSettings, Plan, ModelShape], Sources]


@dataclass
class RankRun:
    """A run on this rank. Its data and weights are equal on all ranks, for any plan."""

    settings: TrainSettings
    engine: Engine
    optimizer: Any
    data: BatchSource
    evaluation: Callable[[], Sources]  # raises UserError
    reference: Reference | None
    steps: int
    epoch_steps: int
    tokenizer: Any = None  # PaddleNLP's, if its trainer has one
    _events: list[Event] = field(default_factory=list)  # events of traced steps

    @classmethod
    def of(
        cls,
        settings: TrainSettings,
        open_training: OpenTraining = open_data,
        open_evaluation: OpenEvaluation = open_validation,
    ) -> RankRun:
        """Every rank calls this with equal settings. Raises UserError."""
        plan, shape = settings.load_plan()
        data = open_training(settings, plan, shape)
        evaluation = cache(lambda: open_evaluation(settings, plan, shape))
        if settings.evaluates != "no":
            evaluation()
        steps, epoch_steps = settings.steps_over(data.samples, plan.global_batch)
        settings = settings.over(steps)
        if settings.lora_rate_scale != 1:  # MultiTensorAdamW has one rate for all tensors
            settings = settings.model_copy(update={"use_multi_tensor": False})
        initial = initial_weights(settings, shape)
        setup = ModelSetup.of(
            plan,
            shape,
            plan.assumed.seq_length or 0,
            source=initial.source,
            seed=settings.seed,
            compute_precision=settings.compute_precision,
            packed=settings.effective_packing != "none",
            adapters=initial.adapters,
            preference=settings.preference,
            mtp_weight=settings.mtp_loss_scaling_factor,
        )
        engine = Engine(setup)
        reference = Reference(engine, settings.output_dir, initial.base) if settings.compares else None
        if settings.lora_rate_scale != 1:
            set_rates(engine, settings.lora_rate_scale)
        optimizer = settings.build(engine.tensors, engine.decaying)
        return cls(settings, engine, optimizer, data, evaluation, reference, steps, epoch_steps)

    @cached_property
    def plan_id(self) -> str:
        return plan_id(self.engine.plan)

    @cached_property
    def files(self) -> dict[str, bytes]:
        """The files that turn the weights into a Hugging Face model again, by name: the model's, with the tokenizer and
        the chat template that were trained with. Rank 0 alone has them. Raises UserError."""
        settings = self.settings
        config, tokenizer = settings.model_source or config_file(settings.model), settings.tokenizer_name_or_path
        if self.engine.rank:
            return {}
        folder = config.parent if config and config.name == CONFIG else None
        files = {name: read_bytes(file) for name, file in companions(folder, tokenizer).items()}
        if settings.chat_template is not None:
            files = with_template(files, open_template(settings.chat_template, tokenizer or Path(settings.model)))
        if self.tokenizer is not None:
            with TemporaryDirectory() as saved:
                self.tokenizer.save_pretrained(saved)
                paths = [path for path in Path(saved).rglob("*") if path.is_file()]
                files |= {str(path.relative_to(saved)): path.read_bytes() for path in paths}
        entries, base = config_like(self.engine.shape, config), settings.initial_weights
        if self._types:
            entries["torch_dtype"] = self._types[0].dtype
        if base and self.engine.adapters:
            entries["_name_or_path"] = str(base.absolute())
        return files | {CONFIG: (dumps(entries, indent=2) + "\n").encode()}

    @cached_property
    def _types(self) -> tuple[Precision, Mapping[str, Precision]] | None:
        """The types of the initial weights; None: random weights, or not rank 0."""
        folder = self.settings.initial_weights
        return types_of(open_weights(folder, self.engine.shape)) if folder and not self.engine.rank else None

    @property
    def recipe(self) -> dict[str, Any]:
        """The settings' recipe, the number of steps, on which schedules depend, and the model's values."""
        shape = self.engine.shape
        of_model = {name: getattr(shape, name) for name in ("attention_dropout", "router_aux_loss_coef")}
        weight = {"mtp_loss_scaling_factor": self.engine.mtp_weight} if shape.mtp_layers else {}
        return {"max_steps": self.steps, **self.settings.recipe, **of_model, **weight}

    @cached_property
    def origin(self) -> Origin:
        """Parts of the run that exports need. Weights that were read in fp32, such as routers, are exported in fp32."""
        others = self._types[1] if self._types else {}
        wide = {name: precision for name, precision in others.items() if precision is Precision.FP32}
        return Origin(self.files, self.recipe, wide)

    def writer(self, log: StepLog | None = None) -> Writer:
        """The writer of checkpoints, which adds an event to the log for each."""
        limit = self.settings.save_total_limit
        return Writer(self.settings.checkpoints, self.engine, limit, self.data, self.origin, log)

    def best_until(self, step: int) -> Best | None:
        """The best checkpoint of those up to a step; None: none is requested."""
        metric, greater = self.settings.best_metric, self.settings.greater_is_better
        if metric is None:
            return None
        return Best(self.settings.output_dir, metric, metric not in SMALLER if greater is None else greater, step)

    def compute_reference(self) -> None:
        """Compute DPO's reference log-probabilities of every data set, before the first update."""
        if self.reference is None:
            return
        evaluated = [source for _, source in self.evaluation()] if self.settings.evaluates != "no" else []
        for source in (self.data, *evaluated):
            if isinstance(source, TuningData):
                self.reference.attach(source)
        self.reference.is_gone = self.engine.adapters is None

    def speeds(self, split: str, since: float, steps: int) -> dict[str, float]:
        """Speed of several steps, by PaddleNLP's names. `since`: time.time() at their start."""
        seconds, plan = time.time() - since, self.engine.plan
        steps_per_second = steps / seconds
        samples_per_second = steps_per_second * plan.global_batch
        rates = {
            "runtime": seconds,
            "samples_per_second": samples_per_second,
            "steps_per_second": steps_per_second,
            "tokens_per_second_per_device": samples_per_second * self.engine.seq_length / plan.world_size,
        }
        return {f"{split}_{name}": round(value, 4) for name, value in rates.items()}

    @contextmanager
    def traced(self, step: int) -> Iterator[None]:
        """The time line of a step, counted from 1, if it is traced; the file has all of them so far."""
        engine, settings = self.engine, self.settings
        if step not in settings.traced_steps:
            yield
            return
        with traced(engine.rank, self._events), span(f"step {step}", "step"):
            yield
        write_events(settings.traced_by(engine.rank), self._events)
        engine.gather(0.0)  # barrier: all ranks have written
        if engine.rank == 0:
            join_traces(settings.traced, [settings.traced_by(rank) for rank in range(engine.plan.world_size)])


VISIBLE_S = 10.0  # time for a file to appear on other nodes, as network file systems cache listings
POLL_S = 0.1


def resume(
    settings: TrainSettings,
    engine: Engine,
    optimizer: Any,
    data: BatchSource,
    recipe: Mapping[str, Any] = MappingProxyType({}),
    log: StepLog | None = None,
) -> int:
    """Load the settings' checkpoint and continue the data there; returns the number of finished steps.
    `recipe`: `Run.recipe`; a note names the numbers that differ from the checkpoint's. `log` gets the event.

    `auto` takes the newest whole checkpoint and reports the faults of newer ones. Raises UserError if checkpoints exist
    but none is whole, if the named one is not whole, if it is another model's, or if `auto` finds other data. A named
    checkpoint may be used with other data, from their first sample.
    """
    require_shared(settings.output_dir, engine)
    seen = candidates(settings) if engine.rank == 0 else None
    wanted, folders = from_first(engine, seen)  # another node may see an older state of a shared folder
    if wanted == "none":
        return 0
    automatic = wanted == "auto"
    faults: list[str] = []
    say = partial(print_rank_0, engine)
    for folder in folders:
        checkpoint, found_faults = _open(folder, engine)
        if checkpoint is None or found_faults:
            faults += found_faults
            continue
        require_same_adapters(checkpoint, engine.adapters)
        samples = samples_seen(checkpoint, data.identity, data.global_batch, automatic, say)
        if found_faults := _faults_of(engine, partial(load, checkpoint, engine, optimizer)):
            faults += found_faults
            continue
        for fault in faults:
            print_rank_0(engine, f"warning: {fault}; the checkpoint before is taken")
        data.continue_at(checkpoint.step, samples)
        text, changed = f"resuming from {folder}", recipe_changes(checkpoint, recipe)
        say(text)
        if changed:
            words = "; ".join(f"{name}: {was} -> {now}" for name, (was, now) in changed.items())
            say(f"{CHANGED}{words}; the new ones hold from here on")
        if log is not None:
            log.event("resumed", text, step=checkpoint.step, checkpoint=str(folder), changed=changed)
        return checkpoint.step
    if faults:
        mend = "repair one, or start again: --resume_from_checkpoint none" if automatic else "name one that is whole"
        raise UserError([*faults, f"{settings.checkpoints if automatic else wanted}: no checkpoint is whole; {mend}"])
    return 0


def require_shared(folder: Path, engine: Engine) -> None:
    """Raise UserError, on all ranks, if a rank does not see rank 0's files in a folder, as on another node or disk. A
    checkpoint would wait for its part for ever."""
    name = f".seen-{secrets.token_hex(8)}"
    if engine.rank == 0:
        (folder / name).touch()
    name = from_first(engine, name)
    deadline = time.monotonic() + VISIBLE_S
    while not (seen := (folder / name).exists()) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    blind = [str(rank) for rank, sees in enumerate(gather_objects(engine, seen)) if not sees]
    if engine.rank == 0:
        (folder / name).unlink()
    if blind:
        who = ", ".join(blind[:8]) + (", …" if len(blind) > 8 else "")
        raise UserError(
            f"output_dir: {folder}: rank {who} does not see what rank 0 writes; name a folder that all nodes share"
        )


def _open(folder: Path, engine: Engine) -> tuple[Checkpoint | None, list[str]]:
    """A checkpoint, whose index rank 0 reads for all, and its faults, found by all ranks, each reading a share of its
    files.

    Raises UserError if it is another model's.
    """
    opened: Checkpoint | UserError | None = None
    if engine.rank == 0:
        try:
            opened = open_checkpoint(folder, engine.shape)
        except UserError as error:
            opened = error
    opened = from_first(engine, opened)
    if isinstance(opened, BrokenCheckpoint):
        return None, [str(opened)]
    if isinstance(opened, UserError):
        raise opened
    assert opened is not None
    files = range(engine.rank, len(opened.index.files), engine.plan.world_size)
    return opened, _faults_of(engine, partial(verify, opened, files))


def _faults_of(engine: Engine, read: Callable[[], object]) -> list[str]:
    """Faults that any rank finds while it reads a checkpoint; all ranks call this together."""
    fault = ""
    try:
        read()
    except BrokenCheckpoint as error:
        fault = str(error)
    return sorted(set(gather_objects(engine, fault)) - {""})
