"""`galvatron profile`: measure this machine and a model, and write the profile files that the search reads."""

import os
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field

from paddlenlp_galvatron.base import UserError, near
from paddlenlp_galvatron.base.limits import Ranks
from paddlenlp_galvatron.launch import gpus
from paddlenlp_galvatron.measure.nodes import with_nodes
from paddlenlp_galvatron.measure.options import (
    HardwareOptions,
    ModelRun,
    PointOptions,
    ProfileRunOptions,
    measured_model,
    runnable_degrees,
)
from paddlenlp_galvatron.options.foreign import Fate
from paddlenlp_galvatron.options.group import Options, Paths
from paddlenlp_galvatron.options.model_options import ModelOptions
from paddlenlp_galvatron.plan import Assumptions
from paddlenlp_galvatron.profiles.analytic import analytic_computation, analytic_memory
from paddlenlp_galvatron.profiles.data_sheet import load_data_sheet
from paddlenlp_galvatron.profiles.network import analytic_hardware
from paddlenlp_galvatron.training.prepare import GROUPS

from .command import App, FromFile, answer, say_note

app = App("Measure this machine and a model; writes the profile files that the search reads.")


Profiled = TypeVar("Profiled", bound=ProfileRunOptions)


def _for_device(options: Profiled) -> Profiled:
    """Options with training's types by default; on GPUs a note says so."""
    if options.analytic:
        return options
    settled = options.for_device(gpus.gpu_count() > 0)
    if settled is not options:
        say_note("mixed_precision: bf16, as plans for GPUs have it; or: --mixed_precision fp32")
    return settled


def profile_hardware(options: HardwareOptions) -> str:
    """Write the hardware files. Returns lines for people that name them."""
    options = _for_device(options)
    if options.analytic:
        sheet = load_data_sheet(options.analytic)
        per_node = options.nproc or options.num_gpus_per_node
        written = analytic_hardware(sheet, options.num_nodes, per_node).save(options.output)
        return _lines(f"derived from {sheet.name}", written)
    from paddlenlp_galvatron.measure.launcher import run_ranks

    os.environ.update({name: value for name, _, value in (pair.partition("=") for pair in options.envs)})
    run_ranks("hardware", options.model_dump_json(), options, "hardware")
    return f"hardware profile of {options.num_nodes} x {options.ranks_per_node} ranks: {near(options.output)}"


def profile_model(options: PointOptions, model: ModelOptions, computation: bool = True, memory: bool = True) -> str:
    """Write the files of a model. Returns lines for people that name them."""
    measured_model(options, model)  # reports faults before Paddle is imported
    options = _for_device(options)
    shapes, points = measured_model(options, model)
    if model.ignored:
        say_note(f"{', '.join(model.ignored)} ignored, as set_*_manually is 0")
    lengths = sorted({point.seq for point in points})
    if options.analytic:
        sheet = load_data_sheet(options.analytic)
        fused = Assumptions(flash_attention=options.use_flash_attention).fused
        if options.use_flash_attention is None:
            say_note("derived with flash attention; --use_flash_attention 0 derives without")
        files = [analytic_computation(shapes, sheet, options.precision, lengths, fused)] if computation else []
        files += [analytic_memory(shapes, options.precision, lengths, fused)] if memory else []  # type: ignore[list-item]
        return _lines(f"derived from {sheet.name}", [file.save(options.output) for file in files])
    from paddlenlp_galvatron.measure.launcher import run_ranks

    if options.use_flash_attention and not gpus.gpu_count():
        raise UserError("use_flash_attention: Paddle has it on GPUs only, and finds none here; leave it out")
    of_each = [runnable_degrees(shape, options.world_size, options.max_tp_deg, lengths) for shape in shapes]
    degrees = set(of_each[0]).intersection(*of_each)
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
    measured_model(points, model)  # reports faults before anything is measured
    lines = profile_hardware(hardware), profile_model(points, model)
    _answer("\n".join(lines), json, points.output)


OF_MODEL = (PointOptions, ModelOptions)
MODEL = {"model_size": "MODEL"}
OWN = {name for group in OF_MODEL for name in group.model_fields}
TRAINING = {name for group in GROUPS for name in group.model_fields}  # scripts pass these to all commands
SHARED = dict.fromkeys(TRAINING - OWN, Fate("it is of training"))
for _name, _work in {"computation": _computation, "memory": _memory, "model": _model}.items():
    app.command(FromFile, *reversed(OF_MODEL), name=_name, shared=SHARED, positional=MODEL)(_work)
app.command(FromFile, HardwareOptions, name="hardware")(_hardware)
app.command(FromFile, ModelOptions, HardwareOptions, PointOptions, name="all", positional=MODEL)(_all)


class ImportOptions(Options):
    """Outputs of nccl-tests and their cluster."""

    logs: Paths = Field(min_length=1)
    num_nodes: Ranks = 1
    num_gpus_per_node: Ranks = 8
    output: Path = ProfileRunOptions.model_fields["output"].default


@app.command(ImportOptions, positional={"logs": "LOG..."})
def import_nccl_tests(values: dict[str, Any], json: bool) -> None:
    """Turn outputs of nccl-tests into the hardware files."""
    from paddlenlp_galvatron.profiles.nccl_tests import import_nccl_tests

    args = ImportOptions.from_values(values)
    written = import_nccl_tests(args.logs, args.num_nodes, args.num_gpus_per_node).save(args.output)
    answer(_lines("imported", written), json, output=args.output, files=written)
