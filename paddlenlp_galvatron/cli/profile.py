"""`galvatron profile`: measure this machine and a model, and write the profile files that the search reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from paddlenlp_galvatron.base.limits import Ranks
from paddlenlp_galvatron.base.printing import say
from paddlenlp_galvatron.base.text import near
from paddlenlp_galvatron.options.model_options import ModelOptions
from paddlenlp_galvatron.plan import Assumptions, UserError
from paddlenlp_galvatron.profiler.nodes import with_nodes
from paddlenlp_galvatron.profiler.options import (
    HardwareOptions,
    ModelRun,
    PointOptions,
    ProfileRunOptions,
    measured_model,
    runnable_degrees,
)
from paddlenlp_galvatron.profiles.analytic import analytic_computation, analytic_hardware, analytic_memory
from paddlenlp_galvatron.profiles.data_sheet import load_data_sheet
from paddlenlp_galvatron.training.prepare import GROUPS

from .conventions import JSON_SWITCH, App, Json, answer, within
from .grouped import add_command

app = App(help="Measure this machine and a model; writes the profile files that the search reads.")


Profiled = TypeVar("Profiled", bound=ProfileRunOptions)


def _for_device(options: Profiled) -> Profiled:
    """With training's own types where nothing is said; tells so on GPUs."""
    if options.analytic:
        return options
    from paddlenlp_galvatron.launch import gpus

    settled = options.for_device(gpus.gpu_count() > 0)
    if settled is not options:
        say("note: mixed_precision: bf16, as plans for GPUs have it; or: --mixed_precision fp32", err=True)
    return settled


def profile_hardware(options: HardwareOptions) -> str:
    """Write the hardware files. Returns what was written, as lines for people."""
    options = _for_device(options)
    if options.analytic:
        sheet = load_data_sheet(options.analytic)
        per_node = options.nproc or options.num_gpus_per_node
        written = analytic_hardware(sheet, options.num_nodes, per_node).save(options.output)
        return _lines(f"derived from {sheet.name}", written)
    from paddlenlp_galvatron.profiler.launcher import run_ranks

    os.environ.update({name: value for name, _, value in (pair.partition("=") for pair in options.envs)})
    run_ranks("hardware", options.model_dump_json(), options, "hardware")
    return f"hardware profile of {options.num_nodes} x {options.ranks_per_node} ranks: {near(options.output)}"


def profile_model(options: PointOptions, model: ModelOptions, computation: bool = True, memory: bool = True) -> str:
    """Write the files of a model. Returns what was written, as lines for people."""
    measured_model(options, model)  # its faults are told before Paddle is imported
    options = _for_device(options)
    shapes, points = measured_model(options, model)
    if model.ignored:
        typer.echo(f"note: left out of account, as set_*_manually is 0: {', '.join(model.ignored)}", err=True)
    lengths = sorted({point.seq for point in points})
    if options.analytic:
        sheet = load_data_sheet(options.analytic)
        if len(shapes) > 1:
            raise UserError("analytic: only models with one type of layers can be derived; leave num_layertype at 1")
        fused = Assumptions(flash_attention=options.use_flash_attention).fused
        if options.use_flash_attention is None:
            say("note: derived with flash attention; --use_flash_attention 0 derives without", err=True)
        files = [analytic_computation(shapes[0], sheet, options.precision, lengths, fused)] if computation else []
        files += [analytic_memory(shapes[0], options.precision, lengths, fused)] if memory else []  # type: ignore[list-item]
        return _lines(f"derived from {sheet.name}", [file.save(options.output) for file in files])
    from paddlenlp_galvatron.launch import gpus
    from paddlenlp_galvatron.profiler.launcher import run_ranks

    if options.use_flash_attention and not gpus.gpu_count():
        raise UserError("use_flash_attention: Paddle has it on GPUs only, and finds none here; leave it out")
    degrees = set(runnable_degrees(shapes[0], options.world_size, options.max_tp_deg, lengths))
    for shape in shapes[1:]:
        degrees &= set(runnable_degrees(shape, options.world_size, options.max_tp_deg, lengths))
    run = ModelRun(
        options=options,
        shapes=shapes,
        points=tuple(points),
        degrees=tuple(sorted(degrees)),
        computation=computation,
        memory=memory,
    )
    run_ranks("model", run.model_dump_json(), options, shapes[0].name)
    ranks = f"{options.num_nodes} x {options.ranks_per_node} ranks"
    return f"model profile of {shapes[0].name} on {ranks}: {near(options.output)}"


def _lines(how: str, paths: list[Path]) -> str:
    return "\n".join(f"{how}: {path}" for path in paths)


def _answer(text: str, json: bool, output: Path) -> None:
    answer(text, json, output=output, files=sorted(output.glob("*.json")))


def _hardware(values: dict[str, Any], json: bool) -> None:
    """Measure collectives by group and message size, sends between stages, and how computation and messages overlap."""
    options = HardwareOptions.from_values(with_nodes(values))
    _answer(profile_hardware(options), json, options.output)


def _computation(values: dict[str, Any], json: bool) -> None:
    """Measure how long a model's layers, embedding and LM head compute."""
    _of_model(values, json, memory=False)


def _memory(values: dict[str, Any], json: bool) -> None:
    """Measure how much memory a model's layers, embedding and LM head need."""
    _of_model(values, json, computation=False)


def _model(values: dict[str, Any], json: bool) -> None:
    """Measure computation and memory of a model."""
    _of_model(values, json)


def _of_model(values: dict[str, Any], json: bool, **parts: bool) -> None:
    options = PointOptions.from_values(with_nodes(values))
    _answer(profile_model(options, ModelOptions.from_values(values), **parts), json, options.output)


def _all(values: dict[str, Any], json: bool) -> None:
    """Measure this machine and a model."""
    values = with_nodes(values)
    hardware, points, model = (
        HardwareOptions.from_values(values),
        PointOptions.from_values(values),
        ModelOptions.from_values(values),
    )
    measured_model(points, model)  # its faults are reported before anything is measured
    lines = profile_hardware(hardware), profile_model(points, model)
    _answer("\n".join(lines), json, points.output)


OF_MODEL = (PointOptions, ModelOptions)
MODEL = ("model_size", "MODEL")
TRAINING = {name: "it is of training" for group in GROUPS for name in group.model_fields}  # a script gives it to all
for _name, _work in {"computation": _computation, "memory": _memory, "model": _model}.items():
    own = {name for group in OF_MODEL for name in group.model_fields}
    beside = {name: why for name, why in TRAINING.items() if name not in own}
    add_command(app, _name, _work, *OF_MODEL, switches=JSON_SWITCH, beside=beside, positional=MODEL)
add_command(app, "hardware", _hardware, HardwareOptions, switches=JSON_SWITCH)
add_command(app, "all", _all, PointOptions, HardwareOptions, ModelOptions, switches=JSON_SWITCH, positional=MODEL)


@app.command("import-nccl-tests")
def import_nccl_tests(
    logs: Annotated[
        list[Path],
        typer.Argument(help="files with the output of nccl-tests, each for one group of ranks", metavar="LOG..."),
    ],
    num_nodes: Annotated[int, typer.Option(parser=within(Ranks), help="number of nodes of the cluster")] = 1,
    num_gpus_per_node: Annotated[int, typer.Option(parser=within(Ranks), help="GPUs per node")] = 8,
    output: Annotated[Path, typer.Option(help="folder of the profile files")] = ProfileRunOptions.model_fields[
        "output"
    ].default,
    as_json: Json = False,
) -> None:
    """Turn outputs of nccl-tests into the hardware files."""
    from paddlenlp_galvatron.interop.nccl_tests import import_nccl_tests

    written = import_nccl_tests(logs, num_nodes, num_gpus_per_node).save(output)
    answer(_lines("imported", written), as_json, output=output, files=written)
