"""`galvatron search`: find the best plan from profile files. Its options are the fields of the groups below."""

import os
import resource
import time
from dataclasses import asdict, replace
from json import dumps
from pathlib import Path
from typing import Any

from galvatron_dp_core import Cancel

from paddlenlp_galvatron.base import GIB_MIB, gib
from paddlenlp_galvatron.base.printing import Console, say
from paddlenlp_galvatron.base.process import INTERRUPTED, stop_signals
from paddlenlp_galvatron.base.writing import write_text
from paddlenlp_galvatron.options.group import Options
from paddlenlp_galvatron.options.model_options import SEQ, Model, ModelOptions
from paddlenlp_galvatron.options.prices import JobOptions, LengthOptions
from paddlenlp_galvatron.plan import load_summary, write_plan
from paddlenlp_galvatron.planner import SearchOptions, SearchResult
from paddlenlp_galvatron.planner.hints import free_plan, hints
from paddlenlp_galvatron.planner.question import Question
from paddlenlp_galvatron.planner.result import predicted
from paddlenlp_galvatron.report.plan import assumed, assumed_summary
from paddlenlp_galvatron.report.search import beside_free, explain, hint_line, summary

from .command import App, FromFile
from .planning import watched, with_lengths
from .start import how_to_start

app = App()

END = "========================= Galvatron Search Engine End Searching ========================="
WIDE = 200  # columns of a table in the log
LONG = (
    "note: still searching, as the space is wide; fewer batches (settle_bsz, bsz_scale), settle_chunk, search_space "
    "and lower max_pp_deg, max_tp_deg, max_cp_deg and max_virtual_pp_deg narrow it; Ctrl-C ends it with the best plan "
    "so far"
)


class AnswerOptions(Options):
    """Options of the output."""

    output_config_path: Path | None = None
    log_dir: Path = Path("logs")
    save_runners_up: bool = False


BATCHES = {"settle_bsz", "min_bsz", "max_bsz"}  # options of the global batch size
GROUPS: tuple[type[Options], ...] = (ModelOptions, SearchOptions, LengthOptions, JobOptions, AnswerOptions)


@app.command(FromFile, *GROUPS, positional={"model_size": "MODEL"})
def search(values: dict[str, Any], json: bool) -> int:
    """Find the plan of least predicted time, with its lower bound, and write it. Exit code 3 if none fits. Ctrl-C and
    SIGTERM end the search with the best plan so far, exit code 130."""
    run = AnswerOptions.from_values(values)
    noted: list[str] = []
    if LengthOptions.from_values(values).dataset_name_or_path is not None:
        model = ModelOptions.from_values(values).resolve_usual(SEQ)
        values = with_lengths(values, model.seq_length, model.shapes[0].vocab_size, noted.append)
    question = Question.of(values, noted.append)
    model, cost = question.model, question.cost
    notes = [*dict.fromkeys(noted), *cost.options.task.notes(cost.has_experts)]
    title = _title(model, question.settled, default_batch=BATCHES.isdisjoint(values))
    log = [f"Search {line}" for line in title]
    cancel = Cancel()
    with watched(LONG) as watch, stop_signals(cancel.cancel) as signals:
        result = question.search(log.append, watch, cancel=cancel)
    if cancel.cancelled:
        notes.append(result.so_far(bool(signals)))
    notes += result.left_out
    log += [f"{family}: {result.outcome(family)}" for family in result.outcomes]
    job = question.job(JobOptions.from_values(values), result.best)
    lines, hinted = ([], {"hints": []}) if cancel.cancelled else _hints(question, result, values)
    shown: list[Any] = [
        *title,
        assumed(question.assumptions),
        *(f"note: {note}" for note in notes),
        *explain(result, model.shapes[0] if len(model.shapes) == 1 else None, question.cost),
        *lines,
        *([str(job)] if job else []),
    ]
    path = _output_path(run.output_config_path, model, question.settled) if result.best else None
    if result.best and path:
        shown += [f"written: {written}" for written in _write(result, path, run.save_runners_up)]
        shown += how_to_start(result.best.plan, path)
    log_file = _write_log(run.log_dir, model, [*log, *_printed(shown)])
    if not json:
        Console(soft_wrap=True).print(*shown, f"log: {log_file}", sep="\n")
    say(END, err=json)
    if json:
        files = {"plan": str(path) if path else None, "log": str(log_file), "notes": notes}
        say(dumps(_summary(question, result, files) | {"job": asdict(job) if job else None} | hinted))
    result.require()
    return INTERRUPTED if signals else 0


def _hints(question: Question, result: SearchResult, values: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Options that would pay, and the cost of another program's search space: lines for people, and values for
    programs."""
    if result.undecided:
        return [], {"hints": []}
    levers, trainer = hints(question, result.best, values), question.settled.trainer
    lines, hinted = [hint_line(hint) for hint in levers], {"hints": [hint.summary() for hint in levers]}
    if not result.best or trainer == "galvatron":
        return lines, hinted
    free = free_plan(question)
    lost = beside_free(result.best, free, trainer, question.shape)
    return [*lost, *lines], hinted | {"free_time_s": free.time_s if free else None}


def _summary(question: Question, result: SearchResult, files: dict[str, Any]) -> dict[str, Any]:
    """The answer for programs."""
    options, cost = question.settled, question.cost
    parts = question.reserve.parts_on(options.memory_gib * GIB_MIB)
    return {
        **summary(result, options.budget_mib, cost.options.context_mib),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,  # Linux counts in KiB
        "reserve_parts": [amount._asdict() for amount in parts],
        "model": question.model.name,
        **files,
        **assumed_summary(question.assumptions),
        "load": load_summary(cost.load),
    }


def _title(model: Model, options: SearchOptions, default_batch: bool) -> list[str]:
    layers = " + ".join(str(shape.layers) for shape in model.shapes)
    batches = f"{options.batches[0]}" + (f" to {options.batches[-1]}" if len(options.batches) > 1 else "")
    lines = [
        f"{model.name}: {layers} layers, sequence length {model.seq_length}, global batch size {batches}"
        f"{' (the default)' * default_batch}, on {options.num_nodes} x {options.num_gpus_per_node} devices of "
        f"{options.memory_gib:.4g} GiB (reserve {gib(options.reserve_mib)})"
    ]
    if model.ignored:
        lines.append(f"{', '.join(model.ignored)} ignored, as set_*_manually is 0")
    return lines


def _output_path(output: Path | None, model: Model, options: SearchOptions) -> Path:
    if output is not None and output.suffix == ".json" and not output.is_dir():
        return output
    memory = f"{options.memory_gib:.4g}GB_{options.mixed_precision}"
    cluster = f"{options.num_nodes}nodes_{options.num_gpus_per_node}gpus_per_node"
    task = f"_{options.task}" if options.task in ("lora", "dpo") else ""
    task += "_offload" if options.offload_optimizer else ""
    return (output or Path("configs")) / f"galvatron_config_{model.name}_{cluster}_{memory}{task}.json"


def _write(result: SearchResult, path: Path, runners_up: bool) -> list[Path]:
    """The files, the best plan's first. It is written last: training takes the newest plan of a folder."""
    best = result.require()
    written = [path]
    for number, other in enumerate(result.runners_up if runners_up else (), 2):
        bound_s = result.lower_bound_s / best.plan.global_batch * other.plan.global_batch
        metadata = best.plan.metadata | {"predicted": predicted(other.prediction, bound_s)}
        written.append(path.with_stem(f"{path.stem}_{number}"))
        write_plan(replace(other.plan, metadata=metadata), written[-1])
    write_plan(best.plan, path)
    return written


def _printed(items: list[Any]) -> list[str]:
    console = Console(width=WIDE)
    with console.capture() as capture:
        for item in items:
            console.print(item, soft_wrap=isinstance(item, str))
    return [line.rstrip() for line in capture.get().splitlines()]


def _write_log(folder: Path, model: Model, lines: list[str]) -> Path:
    path = folder / f"Search_{model.name}_{time.strftime('%Y%m%d-%H%M%S')}_{os.getpid()}.log"
    write_text(path, "\n".join([*lines, END]) + "\n")
    return path
