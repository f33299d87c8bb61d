"""`galvatron search`: find the best plan from profile files. Its options are those of `search.SearchOptions`."""

from __future__ import annotations

import inspect
import json
import resource
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from paddlenlp_galvatron.cost_model import load
from paddlenlp_galvatron.plan import ModelShape, load_model, write_plan
from paddlenlp_galvatron.plan.files import write_text
from paddlenlp_galvatron.search import SearchOptions, SearchResult
from paddlenlp_galvatron.search import search as find_plan

from .conventions import App

app = App(help="Find the best plan from profile files.")

END = "========================= Galvatron Search Engine End Searching ========================="
PROFILES = (
    "time_profiling_path",
    "memory_profiling_path",
    "allreduce_bandwidth_config_path",
    "p2p_bandwidth_config_path",
    "overlap_coe_path",
    "sp_time_path",
)


def search(
    model_size: Annotated[str, typer.Option("--model_size", help="a config.json, its folder, or a preset's name")],
    profiles: Annotated[Path, typer.Option(help="folder of the profile files that are not named one by one")],
    output_config_path: Annotated[Path | None, typer.Option(help="the plan; absent: configs/galvatron_config_…")],
    log_dir: Annotated[Path | None, typer.Option(help="folder of the search's log, Search_….log")],
    as_json: Annotated[bool, typer.Option("--json", help="end with one line of JSON")],
    allow_foreign_profiles: Annotated[bool, typer.Option(help="take profiles of another model or device")],
    **given: Any,
) -> None:
    """Find the plan of least predicted time, with its lower bound, and write it. Exit code 3 where none fits."""
    options = SearchOptions.from_mapping({name: value for name, value in given.items() if value is not None})
    shape = load_model(model_size)
    lines = ["Search"]
    cost = load(
        shape,
        options.num_nodes,
        options.num_gpus_per_node,
        options.assumptions,
        folder=profiles,
        time_profile_mode=options.time_profile_mode,
        memory_profile_mode=options.memory_profile_mode,
        allow_foreign_profiles=allow_foreign_profiles,
        options=options.cost_options,
        **{name: getattr(options, name) for name in PROFILES},
    )
    result = find_plan(shape, cost, options, lines.append)
    say = lines.append if as_json else typer.echo
    if result.best:
        path = output_config_path or _documented_path(shape, options)
        write_plan(result.plan, path)
        say(
            f"{path}: {result.time_s:.4g} s a step, {result.best.samples_per_s:.4g} samples/s, gap {result.gap:.2g}, "
            f"searched in {result.search_time_s:.3g} s"
        )
    if log_dir:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        write_text(log_dir / f"Search_{shape.name}_{stamp}.log", "\n".join([*lines, END]) + "\n")
    typer.echo(END, err=as_json)
    if as_json:
        typer.echo(json.dumps(_summary(result)))
    result.require()


def _documented_path(shape: ModelShape, options: SearchOptions) -> Path:
    memory = f"{options.memory_constraint:g}GB_{options.mixed_precision}"
    cluster = f"{options.num_nodes}nodes_{options.num_gpus_per_node}gpus_per_node"
    return Path("configs") / f"galvatron_config_{shape.name}_{cluster}_{memory}.json"


def _summary(result: SearchResult) -> dict[str, Any]:
    common = {
        "feasible": result.best is not None,
        "search_time_s": result.search_time_s,
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,  # Linux counts in KiB
        "counts": _counts(result),
    }
    if result.best is None:
        return common | {"least_memory_mib": result.need.memory_mib if result.need else None}
    prediction = result.best.prediction
    return common | {
        "throughput": result.best.samples_per_s,
        "time_s": result.time_s,
        "lower_bound_s": result.lower_bound_s,
        "gap": result.gap,
        "stages": [asdict(stage) | {"memory_mib": stage.memory.total_mib} for stage in prediction.stages],
    }


def _counts(result: SearchResult) -> dict[str, int]:
    outcomes = list(result.outcomes.values())
    return {outcome.name.lower(): outcomes.count(outcome) for outcome in sorted(set(outcomes))}


def _command() -> Callable[..., None]:
    """`search` with one option for each field of SearchOptions, unset by default: the fields have the defaults."""

    def parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)

    annotations = inspect.get_annotations(search, eval_str=True)
    fixed: dict[str, Any] = {"model_size": ..., "profiles": Path("configs"), "as_json": False}
    parameters = [
        parameter(name, annotations[name], inspect.Parameter.empty if fixed.get(name) is ... else fixed.get(name))
        for name in ("model_size", "profiles", "output_config_path", "log_dir", "as_json")
    ]
    parameters.append(parameter("allow_foreign_profiles", annotations["allow_foreign_profiles"], False))
    for name, field in SearchOptions.model_fields.items():
        kind = bool if field.annotation in (bool, bool | None) else str
        shown = "" if field.default in (None, ...) else f" [default: {field.get_default(call_default_factory=True)}]"
        option = typer.Option(f"--{name}", help=f"{field.description}{shown}")
        parameters.append(parameter(name, Annotated[kind | None, option], None))

    def command(**values: Any) -> None:
        search(**values)

    command.__doc__ = search.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


app.command()(_command())
