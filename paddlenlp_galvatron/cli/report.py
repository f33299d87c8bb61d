"""`galvatron report`: a plan as one HTML file that needs no network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from paddlenlp_galvatron.base.limits import Positive, Ranks, Size
from paddlenlp_galvatron.base.reading import open_file
from paddlenlp_galvatron.base.writing import write_text
from paddlenlp_galvatron.plan import UserError
from paddlenlp_galvatron.report.explain import explain
from paddlenlp_galvatron.report.measured import of_plan
from paddlenlp_galvatron.report.origin import OriginOptions, read_origin
from paddlenlp_galvatron.report.page import frontier, render
from paddlenlp_galvatron.training.step_log import StepRecord, read_log

from .conventions import App, Json, answer, say_note, within
from .watched import each_watched

app = App(help="A plan as one HTML file.")

LARGEST_LOG_BYTES = 2**30
LEAST_S, MOST = 1e-9, 1e15  # of a step's time; of a step, its seconds, MiB: any run's, and what a page can draw


@app.command()
def report(
    plan: Annotated[Path, typer.Argument(help="the plan file", metavar="PLAN")],
    output: Annotated[Path, typer.Option("--output", "-o", help="the file to write")] = Path("report.html"),
    profiles: Annotated[
        Path | None, typer.Option(help="folder of the profile files; unset: the one that the plan names")
    ] = None,
    model: Annotated[str | None, typer.Option(help="a preset's name, a config.json, or its folder")] = None,
    memory_constraint: Annotated[
        float | None,
        typer.Option(help="memory of a GPU, GiB; unset: as in the plan", parser=within(Positive)),
    ] = None,
    num_gpus_per_node: Annotated[
        int | None, typer.Option(help="GPUs per node; unset: as in the plan, or 8", parser=within(Ranks))
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(help="what is trained: pretrain, sft, lora or dpo; unset: what the plan was searched for"),
    ] = None,
    lora_rank: Annotated[
        int | None, typer.Option(help="rank of the adapters; unset: as the plan names it", parser=within(Size))
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(help="train_log.jsonl of a run of this plan, to show measured values beside the predicted ones"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a page with a plan's layers, memory, time line, limits and what-ifs, and with what a run measured."""
    records = _records(log) if log else []
    values = {
        "plan": plan,
        "profiles": profiles,
        "model_size": model,
        "memory_constraint": memory_constraint,
        "num_gpus_per_node": num_gpus_per_node,
        "task": task,
        "lora_rank": lora_rank,
    }
    read, problem = read_origin(OriginOptions.from_values(values), say_note)
    own = of_plan(read, records)
    if records and not own:
        raise UserError(f"{log}: holds no step of this plan; name the log of a run under it")
    if log and any(len(record["peak_memory_mib"]) != read.world_size for record in own):
        raise _no_log(log)
    with each_watched() as watch:
        problem = replace(problem, watch=watch)
        explanation = explain(read, problem)
        page = render(explanation, frontier(explanation), own)
    write_text(output, page)
    size = output.stat().st_size
    answer(f"{output}: {size / 1e6:.2f} MB; open it in a browser", as_json, report=output, bytes=size)


def _records(log: Path) -> list[StepRecord]:
    """Raises UserError for a file that is no log, and for a step that nothing can be drawn of."""
    open_file(log).close()
    if log.stat().st_size > LARGEST_LOG_BYTES:
        raise UserError(f"{log}: has more than {LARGEST_LOG_BYTES:,} bytes; is it the right file?")
    try:
        records = read_log(log)
    except OSError as error:
        raise UserError(f"{log}: cannot be read: {error.strerror}") from None
    if not all(map(_is_drawn, records)) or not records:
        raise _no_log(log)
    return records


def _no_log(log: Path) -> UserError:
    return UserError(f"{log}: is no train_log.jsonl; name the log of a run under this plan")


def _is_drawn(record: StepRecord) -> bool:
    peaks: Any = record.get("peak_memory_mib")
    if not isinstance(peaks, list) or any(type(mib) not in (int, float) for mib in peaks):
        return False
    step_s = record["step_time_s"]
    return 0 <= record["step"] < MOST and LEAST_S < step_s < MOST and all(0 <= mib < MOST for mib in peaks)
