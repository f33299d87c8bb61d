"""A run on one rank: the model by its plan, its data, its optimizer, and DPO's reference."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from json import dumps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..base.reading import read_bytes
from ..base.tracing import Event, join_traces, write_events
from ..plan import ModelShape, Plan, Precision, plan_id
from ..runtime.engine import Engine
from ..runtime.setup import ModelSetup
from ..runtime.trace import span, traced
from .checkpoint.companions import companions, config_file, config_like, with_template
from .checkpoint.convert import types_of
from .checkpoint.loading import open_weights
from .checkpoint.saving import Origin, Writer
from .checkpoint.stored import SMALLER, Best
from .checkpoint.tensor_file import DTYPES
from .checkpoint.weight_files import CONFIG
from .data.source import BatchSource
from .data.templates import open_template
from .data.tuning import TuningData
from .initial_weights import Reference, initial_weights, set_rates
from .inputs import Sources, open_data, open_validation
from .settings import TrainSettings
from .step_log import StepLog

OpenTraining = Callable[[TrainSettings, Plan, ModelShape], BatchSource]
OpenEvaluation = Callable[[TrainSettings, Plan, ModelShape], Sources]


@dataclass
class Run:
    """A run on this rank. Its data and weights are equal on all ranks, for any plan."""

    settings: TrainSettings
    engine: Engine
    optimizer: Any
    data: BatchSource
    evaluation: Callable[[], Sources]  # raises UserError
    reference: Reference | None
    steps: int
    epoch_steps: int
    tokenizer: Any = None  # PaddleNLP's, of a trainer that has one
    _events: list[Event] = field(default_factory=list)  # of traced steps

    @classmethod
    def of(
        cls,
        settings: TrainSettings,
        open_training: OpenTraining = open_data,
        open_evaluation: OpenEvaluation = open_validation,
    ) -> Run:
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
            entries["torch_dtype"] = DTYPES[self._types[0]].name
        if base and self.engine.adapters:
            entries["_name_or_path"] = str(base.absolute())
        return files | {CONFIG: (dumps(entries, indent=2) + "\n").encode()}

    @cached_property
    def _types(self) -> tuple[Precision, Mapping[str, Precision]] | None:
        """The types of the initial weights; None: they are drawn, or this is not rank 0."""
        folder = self.settings.initial_weights
        return types_of(open_weights(folder, self.engine.shape)) if folder and not self.engine.rank else None

    @property
    def recipe(self) -> dict[str, Any]:
        """The settings' recipe, the number of steps, on which schedules depend, and the model's own numbers."""
        shape = self.engine.shape
        of_model = {name: getattr(shape, name) for name in ("attention_dropout", "router_aux_loss_coef")}
        weight = {"mtp_loss_scaling_factor": self.engine.mtp_weight} if shape.mtp_layers else {}
        return {"max_steps": self.steps, **self.settings.recipe, **of_model, **weight}

    @cached_property
    def origin(self) -> Origin:
        """Parts of the run that exports need. Weights that came in fp32 among others leave in it, as routers do."""
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
        """How fast some steps were, by PaddleNLP's names. `since`: time.time() when they began."""
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
        engine.gather(0.0)  # all have written
        if engine.rank == 0:
            join_traces(settings.traced, [settings.traced_by(rank) for rank in range(engine.plan.world_size)])
