"""A validation: chooses plans, runs them in few launches, and computes the accuracy."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from time import monotonic

from ...base import Note, UserError, no_note
from ...base.printing import Bars
from ...base.writing import scratch_folder, write_text
from ...cost_model import CostModel, CostOptions, Task, load
from ...launch.processes import Launch, LaunchError, World
from ...measure.journal import Journal
from ...measure.launcher import PROGRESS, meta_of_rank
from ...plan import Assumptions, ModelShape, Plan, load_model, plan_to_dict, read_plan, require_trainable, require_valid
from .accuracy import Accuracy, PlanOutcome, outcome_of
from .plans import sample_plans
from .work import FILE, JOURNAL, MeasuredPlan, ValidateOptions, Visit, Work, key_of, visit_of

METHOD = 6  # version of the measurement; raised when it changes
WORKER = f"{__package__}.worker"
SPARE_S = 600  # beyond `minutes`, for the start and the running plan
MOST_FAILURES = 10  # failed plans that end the validation
LEAST_S = 1.0


class Validation:
    """A validation: its options, its work, its results."""

    def __init__(self, options: ValidateOptions, note: Note = no_note):
        """Raises UserError for a plan that cannot be run or priced."""
        self.options = options
        self.shape = load_model(options.model_size)
        self.cost = _cost(options, self.shape, note)
        self.kinds: dict[Plan, str] = {}  # each plan once -> kind for which it was first chosen
        for path in options.plans:
            self.kinds.setdefault(self._read(path), "yours")
        for kind, plan in self._drawn():
            self.kinds.setdefault(plan, kind)

    def _drawn(self) -> Iterator[tuple[str, Plan]]:
        options = self.options
        batch, assumed = options.global_train_batch_size, self.cost.assumed
        return sample_plans(self.shape, options.world_size, batch, assumed, options.count, options.seed, self._priced)

    def _priced(self, plan: Plan) -> bool:
        try:
            self.cost.predict(plan)
        except UserError:
            return False
        return True

    def _read(self, path: Path) -> Plan:
        plan = read_plan(path, self.options.world_size)
        plan = replace(plan, assumed=plan.assumed.completed(self.cost.assumed), metadata={})
        require_trainable(plan)
        require_valid(plan, self.shape)
        self.cost.predict(plan)
        return plan

    @property
    def identity(self) -> dict[str, object]:
        """The journal's key: everything that changes a measurement."""
        options = self.options
        meta = meta_of_rank(options.world_size, model=self.shape.fingerprint, dtype=options.mixed_precision.value)
        how: dict[str, object] = {"validation": METHOD, "steps": options.steps, "seed": options.seed}
        adapters = {"adapter_rank": options.adapter_rank} if options.adapter_rank else {}
        return how | adapters | meta.fingerprint.model_dump()

    def run(self) -> None:
        """Run all plans that have not run yet, within `minutes`. On one node a failed plan is recorded and the others
        continue. Raises LaunchError if no plan has begun, on several nodes, or if MOST_FAILURES plans fail."""
        options, plans = self.options, [*self.kinds]
        if options.fresh:
            self._journal(fresh=True)
        end, failures, total = monotonic() + 60 * options.minutes, 0, options.visits * len(plans)
        with Bars() as progress:
            task = progress.add_task("plans", total=total)
            while (options.num_nodes > 1 or self._missing()) and (left_s := end - monotonic()) > LEAST_S:
                done = None
                try:
                    for done in self._launch(left_s):
                        progress.update(task, completed=done)
                    return
                except LaunchError as error:
                    failures += 1
                    number, index = divmod(done or 0, len(plans))
                    if done is None or plans[index] not in self._missing():
                        raise
                    if options.num_nodes > 1 or failures > MOST_FAILURES:
                        raise
                    self._journal().get(visit_of(plans[index], number), Visit(failed=str(error)).model_dump)

    def _launch(self, seconds: float) -> Iterator[int]:
        """Run the plans; yields the number of finished visits whenever another begins. Raises LaunchError."""
        options = self.options
        work = Work(
            output=options.output.absolute(),
            shape=self.shape,
            plans=tuple(plan_to_dict(plan) for plan in self.kinds),
            identity=self.identity,
            visits=options.visits,
            steps=options.steps,
            seed=options.seed,
            seconds=seconds,
            ranks_per_node=options.nproc,
            adapter_rank=options.adapter_rank,
        )
        with scratch_folder("galvatron-validate-") as folder:
            write_text(folder / FILE, work.model_dump_json())
            logs = folder / "log"
            log = logs / f"workerlog.{options.node_rank * options.nproc}"

            def done() -> Iterator[int]:
                for number, _ in PROGRESS.findall(log.read_text(errors="replace"))[-1:]:
                    yield int(number)

            with Launch(
                WORKER, [str(folder / FILE)], World(options.nproc, options.nodes), logs, seconds + SPARE_S
            ) as running:
                try:
                    for _ in running.wait():
                        yield from done()
                except LaunchError:
                    yield from done()
                    raise
                yield from done()

    def _journal(self, fresh: bool = False) -> Journal:
        return Journal.open(self.options.output, JOURNAL, self.identity, rank=0, world_size=1, fresh=fresh)

    def _missing(self) -> list[Plan]:
        visits_of_plan, enough = visits_in(self._journal()), self.options.visits
        visits = {plan: visits_of_plan.get(key_of(plan), []) for plan in self.kinds}
        return [
            plan
            for plan, of_plan in visits.items()
            if len(of_plan) < enough and not any(visit.failed for visit in of_plan)
        ]

    def accuracy(self) -> Accuracy:
        """Accuracy over the plans that ran. Raises UserError where none did."""
        visits_of_plan = visits_in(self._journal())
        outcomes: list[PlanOutcome] = []
        failed: dict[str, str] = {}
        for plan, kind in self.kinds.items():
            visits = visits_of_plan.get(key_of(plan), [])
            if why := next((visit.failed for visit in visits if visit.failed), ""):
                failed[key_of(plan)] = why
            elif visits:
                outcomes.append(outcome_of(plan, kind, MeasuredPlan.of(visits), self.cost, self.shape))
        if not outcomes:
            why = next(iter(failed.values()), "there was no time")
            raise UserError(f"minutes: no plan was run to its end: {why}")
        return Accuracy(outcomes, failed, len(self.kinds) - len(outcomes) - len(failed))


def visits_in(journal: Journal) -> dict[str, list[Visit]]:
    """All visits, by plan key."""
    visits: dict[str, list[Visit]] = {}
    for name, value in journal.items():
        visits.setdefault(name.partition(" ")[0], []).append(Visit.model_validate(value))
    return visits


def _cost(options: ValidateOptions, shape: ModelShape, note: Callable[[str], None]) -> CostModel:
    length = options.seq_length or shape.max_position_embeddings
    assumed = Assumptions(options.sequence_parallel, options.mixed_precision, not options.no_async_grad_reduce, length)
    # Our runtime's gather buffers are in the profile.
    return load(
        shape,
        options.num_nodes,
        options.nproc,
        assumed,
        folder=options.profiles,
        time_profile_mode="static",
        options=CostOptions(global_memory_buffer=False, task=Task(options.adapter_rank), padded=True),
        note=note,
    )
