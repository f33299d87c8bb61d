"""`galvatron train`: train a model by a plan on this host's processes."""

from __future__ import annotations

import json
from collections import Counter
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from paddlenlp_galvatron.cost_model.states import StateBytes
from paddlenlp_galvatron.plan import ModelShape, Plan, Precision, UserError
from paddlenlp_galvatron.plan.files import read_json
from paddlenlp_galvatron.report.traffic import traffic_table
from paddlenlp_galvatron.runtime.nodes import ONE_NODE, Nodes

from .conventions import App

if TYPE_CHECKING:
    from paddlenlp_galvatron.training.settings import TrainSettings

app = App(help="Train a model by a plan.")

MIB = 2**20


class OnNonFinite(StrEnum):
    """What a run does about a step without a finite gradient."""

    STOP = "stop"
    SKIP = "skip"


@app.command()
def train(
    plan: Annotated[Path, typer.Argument(help="the plan file", metavar="PLAN")],
    model: Annotated[str, typer.Option(help="a config.json, its folder, or the name of a preset")],
    output_dir: Annotated[Path, typer.Option(help="folder of train_log.jsonl and of the ranks' logs")] = Path("output"),
    data: Annotated[
        str | None, typer.Option(help='data without .bin/.idx, a folder, or "0.7 a 0.3 b"; absent: random tokens')
    ] = None,
    split: Annotated[str, typer.Option(help="shares of the documents: training, validation, test")] = "949,50,1",
    max_steps: Annotated[int, typer.Option(min=1, help="optimizer steps")] = 100,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="processes of a node; by default all that the plan has")
    ] = None,
    num_nodes: Annotated[int | None, typer.Option(min=1, help="nodes; start the same command on each")] = None,
    node_rank: Annotated[int | None, typer.Option(min=0, help="which node this is")] = None,
    master_addr: Annotated[str | None, typer.Option(help="address of node 0")] = None,
    master_port: Annotated[int | None, typer.Option(min=1, help="free port of node 0")] = None,
    seq_length: Annotated[
        int | None, typer.Option(min=1, help="tokens a sample, where the plan leaves it open")
    ] = None,
    sequence_parallel: Annotated[bool | None, typer.Option(help="Megatron-SP, where the plan leaves it open")] = None,
    mixed_precision: Annotated[
        Precision | None, typer.Option(help="type of weights and messages, where the plan leaves it open")
    ] = None,
    amp_master_grad: Annotated[bool, typer.Option(help="16-bit training sums and reduces gradients in fp32")] = False,
    compute_precision: Annotated[
        Precision | None, typer.Option(help="what layers compute in; absent: mixed_precision on GPUs, fp32 on CPUs")
    ] = None,
    save_steps: Annotated[int, typer.Option(min=0, help="steps from one checkpoint to the next; 0: none")] = 0,
    save_total_limit: Annotated[int, typer.Option(min=1, help="how many checkpoints are kept")] = 2,
    resume_from_checkpoint: Annotated[
        str, typer.Option(help="auto: the newest whole checkpoint, if any; none; or a folder")
    ] = "auto",
    on_nonfinite: Annotated[
        OnNonFinite, typer.Option(help="what to do about a step whose loss or gradients are NaN or Inf")
    ] = OnNonFinite.STOP,
    learning_rate: Annotated[float, typer.Option(min=0, help="highest learning rate")] = 3e-4,
    warmup_steps: Annotated[int, typer.Option(min=0, help="steps of linear rise")] = 0,
    weight_decay: Annotated[float, typer.Option(min=0)] = 0.01,
    max_grad_norm: Annotated[float, typer.Option(min=0, help="global norm to which gradients are clipped")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="of weights and the data's order")] = 0,
    timeout: Annotated[float, typer.Option(help="seconds after which the processes are ended")] = 7 * 24 * 3600,
    dry_run: Annotated[bool, typer.Option(help="show shapes, groups and memory; train nothing")] = False,
) -> None:
    """Train a model by a plan, one process a rank, and write train_log.jsonl."""
    from paddlenlp_galvatron.training.recipe import Recipe
    from paddlenlp_galvatron.training.settings import TrainSettings

    nodes = Nodes.from_environment(
        num_nodes=num_nodes, node_rank=node_rank, master_addr=master_addr, master_port=master_port
    )
    world_size = nproc * nodes.num_nodes if nproc else _world_size(plan)
    settings = TrainSettings(
        plan=plan.absolute(),
        model=model,
        output=output_dir.absolute(),
        data=data,
        split=split,
        steps=max_steps,
        world_size=world_size,
        seq_length=seq_length,
        sequence_parallel=sequence_parallel,
        mixed_precision=mixed_precision,
        amp_master_grad=amp_master_grad,
        compute_precision=compute_precision,
        save_steps=save_steps,
        save_total_limit=save_total_limit,
        resume_from_checkpoint=resume_from_checkpoint,
        on_nonfinite=on_nonfinite.value,
        seed=seed,
        recipe=Recipe(
            learning_rate=learning_rate,
            min_learning_rate=learning_rate / 10,
            warmup_steps=warmup_steps,
            decay_steps=max_steps,
            weight_decay=weight_decay,
            max_grad_norm=max_grad_norm,
        ),
    )
    console = Console(highlight=False)
    read, shape = check_run(settings)
    if dry_run:
        show_run(console, read, shape, amp_master_grad)
        return
    records = run_training(console, settings, timeout, nodes)
    if nodes.node_rank:
        return  # node 0 has the log
    first, last = records[0], records[-1]
    console.print(
        f"{len(records)} steps: loss {first['loss']:.4f} -> {last['loss']:.4f}, "
        f"{last['tokens_per_s']:.0f} tokens/s, log in {settings.log}"
    )
    if read.world_size > 1:
        console.print(traffic_table(read, shape, read_json(settings.traffic), amp_master_grad))


def check_run(settings: TrainSettings) -> tuple[Plan, ModelShape]:
    """Whatever can be found wrong before processes start. Raises UserError."""
    from paddlenlp_galvatron.runtime.precision import Numbers
    from paddlenlp_galvatron.training.data import open_data

    plan, shape = settings.load()
    Numbers.of(plan.assumed.mixed_precision, settings.amp_master_grad, settings.compute_precision)
    open_data(settings, plan, shape)
    return plan, shape


def run_training(
    console: Console, settings: TrainSettings, timeout_s: float, nodes: Nodes = ONE_NODE
) -> list[dict[str, Any]]:
    """Start the ranks of this node, show their progress, and return the log's records: node 0 has them."""
    from paddlenlp_galvatron.runtime.launch import Launch

    path = settings.output / f"settings.{nodes.node_rank}.json"
    settings.save(path)
    if nodes.node_rank == 0 and settings.resume_from_checkpoint == "none":
        settings.log.unlink(missing_ok=True)
    nproc, rest = divmod(settings.world_size, nodes.num_nodes)
    if rest:
        raise UserError(f"world_size: {settings.world_size} ranks do not split evenly over {nodes.num_nodes} nodes")
    logs = settings.output / "log"
    launch = Launch(
        "paddlenlp_galvatron.training.train_worker", [str(path)], nproc, logs, timeout_s, nodes, forward_term=True
    )
    with Progress(console=console, transient=True) as progress, launch:
        task = progress.add_task("training", total=settings.steps)
        for _ in launch.wait():
            records = read_log(settings.log)
            if records:
                progress.update(task, completed=len(records), description=f"training, loss {records[-1]['loss']:.4f}")
    return read_log(settings.log)


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a log so far; a line that is being written is left out."""
    if not path.exists():
        return []
    return [
        json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")
    ]


def show_run(console: Console, plan: Plan, shape: ModelShape, fp32_gradients: bool = False) -> None:
    """Shapes, groups and predicted memory of a run that is not started."""
    from paddlenlp_galvatron.runtime.stage import stage_groups

    seq_length = plan.assumed.seq_length or 0
    groups = stage_groups(plan, shape, seq_length)
    table = Table(box=None, pad_edge=False, title="per rank of each stage", title_justify="left")
    for column in ("stage", "ranks", "layers", "tokens at the edge", "weights MiB", "states MiB", "predicted MiB"):
        table.add_column(column, justify="right")
    predicted = predicted_memory_mib(plan)
    states = StateBytes.of(plan.assumed.mixed_precision, fp32_gradients)
    for stage in range(len(plan.stages)):
        first = stage * plan.stage_size
        layers = plan.stage_layers(stage)
        weights = _weights_per_rank(plan, shape, stage) * states.weight / MIB
        table.add_row(
            str(stage),
            f"{first}-{first + plan.stage_size - 1}",
            f"{layers[0]}-{layers[-1]}",
            f"{plan.micro_batch * seq_length // plan.stage_size} x {shape.hidden_size}",
            f"{weights:.1f}",
            f"{weights * (states.weight + states.gradient + states.optimizer) / states.weight:.1f}",
            f"{predicted[stage]:.1f}" if predicted else "not in the plan",
        )
    console.print(table)
    uses = Counter(use or "collectives" for _, use in groups)
    mine = Counter(rank for ranks, _ in groups for rank in ranks)
    console.print(
        f"{len(groups)} groups ({', '.join(f'{count} {use}' for use, count in sorted(uses.items()))}), "
        f"at most {max(mine.values(), default=0)} on a rank; no step was run"
    )


def predicted_memory_mib(plan: Plan) -> list[float]:
    """Peak memory of each stage that the search predicted, if the plan has it."""
    stages = (plan.metadata.get("predicted") or {}).get("stages") or []
    return [float(stage["memory_mib"]) for stage in stages]


def _weights_per_rank(plan: Plan, shape: ModelShape, stage: int) -> float:
    norms = 2 * shape.hidden_size
    layers = sum(norms + (shape.layer_parameters - norms) / plan.layers[index].tp for index in plan.stage_layers(stage))
    table = shape.padded_vocab_size(plan.vocab.tp) * shape.hidden_size / plan.vocab.tp
    ends = (stage == 0) * table + (stage == len(plan.stages) - 1) * (table + shape.hidden_size)
    return layers + ends


def _world_size(path: Path) -> int:
    data = read_json(path)
    world_size = data.get("world_size") if isinstance(data, dict) else None
    if not isinstance(world_size, int):
        raise UserError(f"{path}: world_size: missing; add it to the file or pass --nproc")
    return world_size
