"""`galvatron parity`: check that a plan trains the same as one process."""

import time
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Any, Literal

from paddlenlp_galvatron.base.errors import GalvatronError
from paddlenlp_galvatron.base.limits import Positive, Ranks, Samples, Seed, Size
from paddlenlp_galvatron.base.printing import say
from paddlenlp_galvatron.model import TRAINED, load_model
from paddlenlp_galvatron.model.preference import Loss
from paddlenlp_galvatron.options.group import Options
from paddlenlp_galvatron.plan import Precision, read_plan, require_trainable, with_assumptions

from .command import App

app = App()


class ParityOptions(Options):
    """The plan and the small model to train under it."""

    plan: Path
    model_size: str = "llama"
    nproc: Ranks | None = None
    optim: Literal["sgd", "adamw"] = "sgd"
    steps: Samples = 4
    sequence_parallel: bool | None = None
    mixed_precision: Precision | None = None
    device: Literal["cpu", "gpu"] = "cpu"
    seed: Seed = 0
    packed: bool = False
    lora_rank: Size | None = None
    loss: Loss | None = None
    timeout: Positive = 300


@app.command(ParityOptions, positional={"plan": "PLAN"})
def parity(values: dict[str, Any], json: bool) -> None:
    """Train a small random model by the plan and in one process, and compare losses and gradients.

    Exit code 1 if they differ by more than rounding explains.
    """
    from paddlenlp_galvatron.check.parity.parity import check_parity, small_case

    args = ParityOptions.from_values(values)
    start = time.monotonic()
    plan = read_plan(args.plan, args.nproc, default=4)
    require_trainable(plan)
    plan = with_assumptions(plan, sequence_parallel=args.sequence_parallel, mixed_precision=args.mixed_precision)
    model = None if args.model_size in TRAINED else load_model(args.model_size).trained()
    equal = model if model and model.layers == len(plan.layers) else None
    case = small_case(
        plan,
        model.family if model else args.model_size,
        args.optim,
        args.steps,
        args.seed,
        packed=args.packed,
        lora_rank=args.lora_rank or 0,
        loss=args.loss or "",
        dense_layers=equal.dense_layers if equal else (),
        mtp_layers=equal.mtp_layers if equal else 0,
    )
    if not json:
        say(f"{args.plan}: {args.steps} {args.optim} steps of {case.shape.name} on {plan.world_size} processes")
    result = check_parity([case], args.timeout, args.device)[0]
    line = asdict(result) | {"groups": max(result.groups), "seconds": round(time.monotonic() - start, 2)}
    say(dumps(line) if json else str(result))
    if not result.agrees:
        raise GalvatronError(
            f"the plan does not train as one process does: losses differ by up to {result.max_loss_diff:.1e}, "
            f"gradients by {result.max_grad_rel_diff:.1e} ({result.worst_gradient})"
        )
