"""Planning in Python: `import paddlenlp_galvatron as galvatron`, then `galvatron.fit("qwen2.5-7b", gpus=8)`.

Every option of the command of the same name is a keyword, under any of its names. Nothing here needs Paddle.
"""

from __future__ import annotations

import inspect
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from galvatron_dp_core import Cancel

from . import plan as plans
from .base.printing import Console
from .base.process import stop_signals
from .options.group import Options, canonical_options
from .options.model_options import ModelOptions
from .options.prices import JobOptions
from .options.texts import text_of
from .planner import SearchOptions, SearchResult
from .planner.explain import Explanation
from .planner.explain import explain as find_out
from .planner.fit import PRECISION, FitOptions, hints_of
from .planner.fit import fit as find_rows
from .planner.hints import Hint, hints
from .planner.origin import OriginOptions, read_origin
from .planner.question import Question
from .planner.whole_run import Job
from .report import explain as explaining
from .report import fit as fitting
from .report import search as searching
from .report.plan import describe

SEARCHED = (ModelOptions, SearchOptions, JobOptions)
Answering = TypeVar("Answering", bound=Callable[..., Any])
WIDE = 120  # columns of the tables
HTML = '<pre style="white-space:pre;overflow-x:auto;line-height:1.3">{code}</pre>'


class Shown:
    """A result that is shown as a table in a notebook and as one line in Python."""

    def _parts(self) -> Sequence[Any]:
        raise NotImplementedError

    def show(self) -> None:
        """Print the whole result."""
        Console(width=WIDE).print(*self._parts(), sep="\n")

    def _repr_html_(self) -> str:
        console = Console(width=WIDE, record=True, file=StringIO())
        console.print(*self._parts(), sep="\n")
        return console.export_html(inline_styles=True, code_format=HTML)


@dataclass(frozen=True, repr=False)
class PlanFile(Shown):
    """A plan file's content: the parallelism of a model, layer by layer."""

    strategy: plans.Plan  # plan.strategy.Plan, with the fields below

    @classmethod
    def load(cls, path: str | Path, gpus: int | None = None) -> PlanFile:
        """Read a plan from a file of this project or of Galvatron, whose files may leave the number of GPUs open.
        Raises UserError."""
        return cls(plans.read_plan(Path(path), gpus, smallest_world=True))

    def save(self, path: str | Path) -> None:
        """Write a plan file, which `galvatron train` runs."""
        plans.write_plan(self.strategy, Path(path))

    def __repr__(self) -> str:
        strategy = self.strategy
        return f"<PlanFile: {len(strategy.layers)} layers on {strategy.world_size} GPUs: {fitting.in_words(strategy)}>"

    def _parts(self) -> Sequence[Any]:
        return describe(self.strategy)


@dataclass(frozen=True, repr=False)
class Fits(Shown):
    """An answer of `fit`."""

    rows: list[dict[str, Any]]  # one for each number of GPUs, as `galvatron fit --json` has them
    printed: tuple[Any, ...]  # printed by `show`, notes included
    hints: tuple[Hint, ...]  # options that would pay

    @property
    def plans(self) -> dict[int, PlanFile]:
        """The fastest plan by number of GPUs, where one fits; of several devices the fastest one's."""
        fitting_rows = sorted((row for row in self.rows if row["plan"]), key=lambda row: row["tokens_per_s"])
        return {row["gpus"]: PlanFile(plans.plan_from_dict(row["plan"])) for row in fitting_rows}

    def __repr__(self) -> str:
        speeds = [f"{row['gpus']} GPUs: {_speed(row) if row['fits'] else '-'}" for row in self.rows]
        return f"<Fits: {'; '.join(speeds)}>"

    def _parts(self) -> Sequence[Any]:
        return self.printed


def _speed(row: dict[str, Any]) -> str:
    share = f", MFU {row['mfu']:.1%}" if row["mfu"] else ""
    return f"{row['tokens_per_s']:,.0f} tokens/s{share}"


@dataclass(frozen=True, repr=False)
class Found(Shown):
    """An answer of `search`, with its certificate: `lower_bound_s` is a step time that no plan beats."""

    result: SearchResult  # plans, times and bounds
    notes: tuple[str, ...]  # assumptions, and options without an effect
    hints: tuple[Hint, ...]  # options that would pay
    job: Job | None = None  # days, cost and checkpoints; None: nothing fits

    @property
    def plan(self) -> PlanFile:
        """Raises Infeasible where none fits."""
        return PlanFile(self.result.plan)

    def __repr__(self) -> str:
        best = self.result.best
        if best is None:
            return f"<Found: {self.result.need or 'no plan'}>"
        return f"<Found: {best.time_s:.4g} s a step, gap {self.result.gap:.2g}; {self.plan!r}>"

    def _parts(self) -> Sequence[Any]:
        job = [str(self.job)] if self.job else []
        lines = [*job, *_as_notes(self.notes), *map(searching.hint_line, self.hints)]
        return [*searching.explain(self.result), *lines]


@dataclass(frozen=True, repr=False)
class Explained(Shown):
    """An answer of `explain`; `summary` is the output of `galvatron explain --json`."""

    explanation: Explanation  # the source of `summary`
    notes: tuple[str, ...] = ()  # like those of a search
    job: Job | None = None  # None: layers are of several types

    @property
    def summary(self) -> dict[str, Any]:
        return explaining.summary(self.explanation, self.job)

    def __repr__(self) -> str:
        facts = self.summary
        return f"<Explained: {facts['time_s']:.4g} s a step; {'; '.join(facts['binds'])}>"

    def _parts(self) -> Sequence[Any]:
        return [*explaining.printed(self.explanation, self.job), *_as_notes(self.notes)]


def _as_notes(notes: Iterable[str]) -> list[str]:
    return [f"note: {note}" for note in dict.fromkeys(notes)]


def _listing(*groups: type[Options]) -> Callable[[Answering], Answering]:
    """Add the options of these groups to the docstring of the decorated function."""

    def add(function: Answering) -> Answering:
        owners = {name: group for group in groups for name in group.model_fields}
        fields = {name: group.model_fields[name] for name, group in owners.items()}
        unset = {name: field.is_required() or field.default is None for name, field in fields.items()}
        shown = {name: name if unset[name] else f"{name} = {field.default}" for name, field in fields.items()}
        lines = "".join(f"\n    {shown[name]}: {text_of(group, name)}" for name, group in owners.items())
        function.__doc__ = f"{inspect.getdoc(function)}\n\nOptions and their defaults:{lines}"
        return function

    return add


@_listing(FitOptions)
def fit(model: str | Path, **options: Any) -> Fits:
    """How many GPUs a model needs, and how fast it is on them: `fit("qwen2.5-7b", gpus=8, device="h100-80gb")`. Raises
    UserError."""
    notes: list[str] = []
    values = canonical_options({"model_size": str(model), **options}, FitOptions.model_fields, notes.append, PRECISION)
    request = FitOptions.from_values(values)
    shape = plans.load_model(request.model_size)
    asked = request.of(shape)
    rows = list(find_rows(shape, asked, notes.append))
    paying = tuple(hints_of(rows, asked))
    printed = (*fitting.explain(rows, shape, asked, paying), *_as_notes(notes))
    return Fits(fitting.rows(rows, shape, asked), printed, paying)


@_listing(*SEARCHED)
def search(model: str | Path, **options: Any) -> Found:
    """The fastest plan, with a lower bound: `search("qwen2.5-7b", device="h100-80gb", gpus=8, batch=256)`. Raises
    UserError; where nothing fits, the answer says so. Ctrl-C ends it with the best plan so far, and a note that says
    so; KeyboardInterrupt where there is none yet."""
    noted: list[str] = []
    fields = [name for group in SEARCHED for name in group.model_fields]
    values = canonical_options({"model_size": str(model), **options}, fields, noted.append)
    question, cancel = Question.of(values, noted.append), Cancel()
    with stop_signals(cancel.cancel, [signal.SIGINT]) as signals:
        result = question.search(cancel=cancel)
    if cancel.cancelled:
        noted.append(result.so_far(bool(signals)))
    noted += result.left_out
    paying = () if cancel.cancelled else hints(question, result.best, values)
    job = question.job(JobOptions.from_values(values), result.best)
    return Found(result, tuple(dict.fromkeys(noted)), tuple(paying), job)


@_listing(OriginOptions, JobOptions)
def explain(plan: PlanFile | Found | str | Path, **options: Any) -> Explained:
    """Where a plan's time and memory go, and what would change it: `explain("plan.json")`. Raises UserError."""
    with TemporaryDirectory(prefix="galvatron-") as folder:
        if isinstance(plan, Found):
            plan = plan.plan
        if isinstance(plan, PlanFile):
            plan.save(Path(folder) / "plan.json")
            plan = Path(folder) / "plan.json"
        notes: list[str] = []
        fields = [*OriginOptions.model_fields, *JobOptions.model_fields]
        values = canonical_options({"plan": Path(plan), **options}, fields, notes.append)
        asked = JobOptions.from_values(values)
        read, question = read_origin(OriginOptions.from_values(values), notes.append)
        explanation = find_out(read, question)
        job = question.job(asked, explanation.prediction)
        return Explained(explanation, tuple(dict.fromkeys(notes)), job)
