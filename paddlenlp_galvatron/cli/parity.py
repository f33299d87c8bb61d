"""`galvatron parity`: check that a plan trains the same as one process."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, get_args

import typer

from paddlenlp_galvatron.base.limits import Positive, Ranks, Samples, Seed, Size
from paddlenlp_galvatron.base.printing import say
from paddlenlp_galvatron.model import FAMILIES
from paddlenlp_galvatron.model.preference import Loss
from paddlenlp_galvatron.plan import GalvatronError, Precision, read_plan, with_assumptions

from .conventions import App, within

app = App(help="Check that a plan trains the same as one process.")


Family = StrEnum("Family", [(name.upper(), name) for name in FAMILIES])  # type: ignore[misc]


PairLoss = StrEnum("PairLoss", [(name.upper(), name) for name in get_args(Loss)])  # type: ignore[misc]


class Optimizer(StrEnum):
    SGD = "sgd"
    ADAMW = "adamw"


class Device(StrEnum):
    CPU = "cpu"
    GPU = "gpu"


@app.command()
def parity(
    plan: Annotated[Path, typer.Argument(help="the plan file", metavar="PLAN")],
    model: Annotated[Family, typer.Option(help="family of the small random model")] = Family("llama"),
    nproc: Annotated[
        int | None, typer.Option(parser=within(Ranks), help="number of processes; unset: the plan's world_size, else 4")
    ] = None,
    optimizer: Annotated[
        Optimizer, typer.Option(help="optimizer, sgd or adamw; only SGD shows a wrong scale of gradients")
    ] = Optimizer.SGD,
    steps: Annotated[int, typer.Option(parser=within(Samples), help="number of optimizer steps")] = 4,
    sequence_parallel: Annotated[bool | None, typer.Option(help="use Megatron-SP, if the plan leaves it open")] = None,
    mixed_precision: Annotated[
        Precision | None, typer.Option(help="number type of weights and messages, if the plan leaves it open")
    ] = None,
    device: Annotated[
        Device, typer.Option(help="cpu or gpu: what the processes compute on; TF32 is off on GPUs")
    ] = Device.CPU,
    seed: Annotated[int, typer.Option(parser=within(Seed), help="seed of weights and data")] = 0,
    packed: Annotated[bool, typer.Option(help="rows of several documents, as fine-tuning packs them")] = False,
    lora_rank: Annotated[
        int | None, typer.Option(parser=within(Size), help="rank of LoRA's adapters, which alone learn; unset: none")
    ] = None,
    loss: Annotated[
        PairLoss | None, typer.Option(help="loss of pairs of answers, as DPO has it; unset: that of tokens")
    ] = None,
    timeout: Annotated[
        float, typer.Option(parser=within(Positive), help="seconds after which the run is stopped")
    ] = 300,
    as_json: Annotated[bool, typer.Option("--json", help="one line of JSON on stdout")] = False,
) -> None:
    """Train a small random model by the plan and in one process, and compare losses and gradients.

    Exit code 1 if they differ by more than rounding explains.
    """
    from paddlenlp_galvatron.check.parity.parity import check_parity, small_case

    start = time.monotonic()
    read = read_plan(plan, nproc, default=4)
    read = with_assumptions(read, sequence_parallel=sequence_parallel, mixed_precision=mixed_precision)
    rows = {"packed": packed, "lora_rank": lora_rank or 0, "loss": loss.value if loss else ""}
    case = small_case(read, model.value, optimizer.value, steps, seed, **rows)  # type: ignore[arg-type]
    if not as_json:
        say(f"{plan}: {steps} {optimizer.value} steps of {case.shape.name} on {read.world_size} processes")
    result = check_parity([case], timeout, device.value)[0]
    line = asdict(result) | {"groups": max(result.groups), "seconds": round(time.monotonic() - start, 2)}
    say(json.dumps(line) if as_json else str(result))
    if not result.agrees:
        raise GalvatronError(
            f"the plan does not train what one process trains: losses differ by up to {result.max_loss_diff:.1e}, "
            f"gradients by {result.max_grad_rel_diff:.1e} ({result.worst_gradient})"
        )
