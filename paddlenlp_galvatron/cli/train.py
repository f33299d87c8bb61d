"""`galvatron train`: train a model by a plan on this host's processes."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from json import dumps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from paddlenlp_galvatron.base import MIB, Note, UserError, count, gib, no_note
from paddlenlp_galvatron.base.printing import Console, say, table
from paddlenlp_galvatron.launch import gpus
from paddlenlp_galvatron.launch.nodes import FIELDS, Nodes
from paddlenlp_galvatron.model.lora import Adapters
from paddlenlp_galvatron.plan import ModelShape, Plan
from paddlenlp_galvatron.plan.check import task_note, with_defaults
from paddlenlp_galvatron.plan.communicators import most_communicators, stage_groups
from paddlenlp_galvatron.report.plan import MOST_ROWS, Searched
from paddlenlp_galvatron.training.prepare import GROUPS, SHARED, LaunchOptions, Prepared, prepare

from .command import JSON, App, FromFile
from .training_run import TrainingRun

if TYPE_CHECKING:
    from paddlenlp_galvatron.training.data.source import BatchSource

app = App()

STATE_BYTES = 18  # per weight on a rank, at most: gradient, fp32 master and two moments
COUNTED = 200_000  # ranks x strategies for which counting groups takes a second
KERNELS = ("flash_attention", "fused_rope", "fused_rms_norm", "fused_cross_entropy")  # Paddle's kernels on GPUs
WORKER = "paddlenlp_galvatron.training.train_worker"


@app.command(
    FromFile,
    *reversed(GROUPS),
    positional={"galvatron_config_path": "PLAN"},
    switches=("dry_run", *JSON),
    shared=SHARED,
)
def train(values: dict[str, Any], dry_run: bool, program: Sequence[str] = (), json: bool = False) -> int:
    """Train a model by a plan, with one process per rank, and write train_log.jsonl and checkpoints."""
    launch = LaunchOptions.from_values(values)
    nodes = Nodes.from_environment(**launch.model_dump(include=set(FIELDS)))
    world_size = world_size_of(launch, nodes, values)
    timeout_s = launch.timeout or math.inf
    console = Console(soft_wrap=True, stderr=json)
    note = partial(console.print, "note:")
    with ExitStack() as stack:
        with TemporaryDirectory(prefix="galvatron-") as folder:  # written here until all checks have passed
            run = prepare(values, world_size, Path(folder))
            settings, shape, adapters = run.settings, run.shape, run.settings.adapters("")
            ranks_each = nodes.ranks_each(settings.world_size)
            if nodes.num_nodes > 1:
                note(f"{nodes.num_nodes} nodes of {count(ranks_each, 'rank')}; this is node {nodes.node_rank}")
            for text in run.notes:
                note(text)
            if dry_run:
                show_run(console, rehearsed(run, note), shape, adapters)
                return 0
            if nodes.node_rank == 0:
                settings.require_free()
            data = check_inputs(run, note, continuable(run))
            from paddlenlp_galvatron.launch.processes import devices_of
            from paddlenlp_galvatron.launch.watch import await_first

            devices_of(ranks_each)
            plan = check_run(run)
            first = ranks_each * nodes.node_rank
            if away := require_host_memory(plan, shape, adapters, range(first, first + ranks_each)):
                note(f"offloaded optimizer states and activations take {gib(away)} GiB of this node's memory")
            steps, _ = settings.steps_over(data.samples, plan.global_batch)
            for text in filter(None, (plan.note, task_note(plan, adapters.rank if adapters else None))):
                note(f"{settings.plan}: {text}")
            kernels = [name for name in KERNELS if getattr(plan.assumed, name)]
            if kernels and not gpus.gpu_count():
                note(f"{', '.join(kernels)}: Paddle has this on GPUs only; plain kernels run here")
            if nodes.node_rank == 0:
                stack.enter_context(settings.folder_locked())
            else:  # nothing that another run may need is written before
                await_first(nodes, timeout_s)
            settings = settings.keep_files_of(Path(folder))
        path = settings.output_dir / f"settings.{nodes.node_rank}.json"
        settings.save(path)
        training = TrainingRun(console, settings, plan, shape, steps, launch.on_event)
        training.start(program or [WORKER, str(path)], timeout_s, nodes, 60 * launch.distributed_timeout_minutes)
        if nodes.node_rank == 0:  # node 0 writes the log
            training.show_end()
            if json:
                say(dumps(training.summary()))
        return training.exit_code


def world_size_of(launch: LaunchOptions, nodes: Nodes, values: dict[str, Any]) -> int | None:
    """Number of ranks to start: from the options, else one per GPU; None: from the plan file."""
    if processes := launch.nproc or launch.num_gpus_per_node:
        return processes * nodes.num_nodes
    if values.get("galvatron_config_path") and not values.get("spare"):
        return None
    return gpus.gpu_count() * nodes.num_nodes or None


def continuable(run: Prepared) -> Callable[[dict[str, Any]], None]:
    """A check, given the identity of the data, that the run can resume from its newest checkpoint. Raises UserError if
    that is another model's."""
    from paddlenlp_galvatron.training.inputs import base_of, newest, require_continuable

    checkpoint = newest(run.settings, run.shape)
    base = base_of(run.settings, run.shape) if checkpoint else ""

    def require(identity: dict[str, Any]) -> None:
        if checkpoint:
            require_continuable(checkpoint, run.settings, base, identity, run.plan.global_batch)

    return require


def require_host_memory(plan: Plan, shape: ModelShape, adapters: Adapters | None, ranks: range) -> float:
    """MiB of this node's memory for its ranks' offloaded optimizer states and activations. Raises UserError if they do
    not fit, or if all states of CPU ranks do not fit: the machine would swap for hours or kill processes."""
    from paddlenlp_galvatron.launch.processes import free_mib

    free, on_gpus = free_mib(), gpus.gpu_count() > 0
    small = len(ranks) * shape.parameters * STATE_BYTES < free * MIB
    offloads = plan.assumed.offload_optimizer or any(layer.offload for layer in plan.layers)
    if not offloads and (on_gpus or small):
        return 0.0
    from paddlenlp_galvatron.cost_model.weights import held_mib, offloaded_mib  # imported here: few runs need it

    stages = Counter(rank // plan.stage_size for rank in ranks)
    away = sum(number * offloaded_mib(plan, shape, stage, adapters) for stage, number in stages.items())
    held = away
    if not on_gpus:
        held += sum(number * held_mib(plan, shape, stage, adapters)[1] for stage, number in stages.items())
    if held > free:
        states = "offloaded states and activations" if on_gpus else "weights and optimizer states"
        raise UserError(
            f"nproc: {len(ranks)} ranks here keep {gib(held)} GiB of {states} in this node's memory, but "
            f"{'' if on_gpus else 'it has no GPU, and '}{gib(free)} GiB are free; look at the run with --dry_run"
        )
    return away


def check_inputs(
    run: Prepared,
    say: Note = no_note,
    known: Callable[[dict[str, Any]], object] = lambda identity: None,
    keep: bool = True,
) -> BatchSource:
    """Check and return the data before PaddleNLP is imported, which takes seconds. `say` receives notes on the data,
    `known` its identity before rows are made; without `keep`, nothing is written next to the data. Raises UserError."""
    from paddlenlp_galvatron.training.inputs import open_data
    from paddlenlp_galvatron.training.settings import require_reporters

    require_reporters(run.settings.report_to or ())
    data = open_data(run.settings, run.plan, run.shape, on_identity=known, keep=keep)
    if run.settings.evaluates != "no":
        open_data(run.settings, run.plan, run.shape, "valid", keep=keep)
    for note in data.notes:
        say(note)
    return data


def check_run(run: Prepared) -> Plan:
    """Run the remaining checks before processes start; returns the plan as it trains on this machine. Raises
    UserError."""
    from paddlenlp_galvatron.runtime.precision import on_device

    settings, plan = run.settings, with_defaults(run.plan, gpus.gpu_count() > 0)
    if settings.use_flash_attention and not gpus.gpu_count():
        raise UserError("use_flash_attention: Paddle has it on GPUs only, and finds none here; leave it out")
    device = "gpu" if gpus.gpu_count() else "cpu"
    if settings.device not in (None, device):
        why = "Paddle finds no GPU here" if device == "cpu" else "ranks take the GPUs; hide them: CUDA_VISIBLE_DEVICES="
        raise UserError(f"device: {settings.device} is not the device that ranks would run on: {why}")
    on_device(plan.assumed.number_types, settings.compute_precision)
    if settings.initial_weights:
        from paddlenlp_galvatron.training.checkpoint.loading import open_weights

        if note := getattr(open_weights(settings.initial_weights, run.shape), "note", ""):
            sys.stderr.write(f"note: {note}\n")
    if (adapters := settings.adapters("")) and settings.lora_path:
        from paddlenlp_galvatron.training.checkpoint.adapters import open_adapters

        opened = open_adapters(settings.lora_path, run.shape, adapters)
        if settings.initial_weights and (note := opened.base_note(settings.initial_weights)):
            sys.stderr.write(f"note: {note}\n")
    return plan


def rehearsed(run: Prepared, say: Note) -> Plan:
    """The plan of a dry run, as on the GPUs that it requests. Raises UserError."""
    plan = run.plan
    for_gpus = run.settings.device == "gpu" or any(getattr(plan.assumed, name) for name in KERNELS)
    if plan.note:
        say(f"{run.settings.plan}: {plan.note}")
    on_gpus = gpus.gpu_count() > 0
    if for_gpus and not on_gpus:
        say("shown as on GPUs, of which this machine has none")
    try:
        check_inputs(run, keep=False)
    except UserError as error:
        for fault in error.faults:
            say(f"not here, so not checked: {fault}")
    return with_defaults(plan, for_gpus or on_gpus)


def show_run(console: Console, plan: Plan, shape: ModelShape, adapters: Adapters | None = None) -> None:
    """Shapes, groups and predicted memory of a dry run."""
    from paddlenlp_galvatron.cost_model.weights import held_mib, offloaded_mib  # here: training needs no prices

    seq_length = plan.assumed.seq_length or 0
    columns = ("stage", "ranks", "layers", "edge tokens", "weights", "states", "memory")
    shown = table(*columns, title="per rank of each stage, GiB; memory as the search predicted it, with the reserve")
    predicted = Searched.of(plan.metadata.get("predicted"))
    stages = predicted.stages if predicted else []
    for stage in range(min(plan.pipeline, MOST_ROWS)):
        first = stage * plan.stage_size
        weights, states = held_mib(plan, shape, stage, adapters)
        shown.add_row(
            str(stage),
            f"{first}-{first + plan.stage_size - 1}",
            plan.layer_spans(stage),
            f"{plan.micro_batch * seq_length // plan.stage_size} x {shape.hidden_size}",
            gib(weights),
            gib(states),
            gib(stages[stage].memory_mib) if stage < len(stages) else "not in the plan",
        )
    console.print(shown)
    if plan.pipeline > MOST_ROWS:
        console.print(f"and {plan.pipeline - MOST_ROWS} stages more")
    if away := max(offloaded_mib(plan, shape, stage, adapters) for stage in range(plan.pipeline)):
        console.print(f"offloaded to the hosts' memory: at most {gib(away)} GiB a rank")
    console.print(f"{_groups(plan, shape, seq_length, adapters is not None)}; no step was run")


def _groups(plan: Plan, shape: ModelShape, seq_length: int, adapts: bool) -> str:
    """The numbers of communicators as text."""
    if plan.world_size * len({plan.vocab.as_layer(), *plan.layers}) > COUNTED:
        return "groups not counted, as there are too many"
    groups = stage_groups(plan, shape, seq_length, adapts)
    uses = Counter(use or "collectives" for _, use in groups)
    return (
        f"{count(len(groups), 'group')} ({', '.join(f'{number} for {use}' for use, number in sorted(uses.items()))}), "
        f"at most {most_communicators(groups)} on a rank"
    )
