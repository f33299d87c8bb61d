"""`galvatron profile`: measure this machine and a model, and write the profile files that the search reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paddlenlp_galvatron.plan import ModelShape, UserError, load_model
from paddlenlp_galvatron.profiler.points import MODEL_LENGTH, ProfileMode, Steps, points, runnable_degrees

from .conventions import App

app = App(help="Measure this machine and a model; writes the profile files that the search reads.")

Nproc = Annotated[int, typer.Option(min=1, help="processes, all measured at once, as they will train")]
Output = Annotated[Path, typer.Option(help="folder of the profile files")]
Model = Annotated[str, typer.Option(help="a config.json, its folder, or the name of a preset such as llama2-7b")]
Mode = Annotated[ProfileMode, typer.Option(help="what is varied: nothing, the batch size or the sequence length")]
BatchSize = Annotated[int, typer.Option(help="samples, in modes static and sequence")]
MinBatch = Annotated[int, typer.Option(help="smallest number of samples in mode batch")]
MaxBatch = Annotated[int, typer.Option(help="largest number of samples in mode batch")]
BatchStep = Annotated[int, typer.Option(help="step between numbers of samples in mode batch")]
LengthList = Annotated[str | None, typer.Option(help="sequence lengths in modes static and batch, as 512,1024")]
MinLength = Annotated[int, typer.Option(help="smallest sequence length in mode sequence")]
MaxLength = Annotated[int, typer.Option(help="largest sequence length in mode sequence")]
LengthStep = Annotated[int, typer.Option(help="step between sequence lengths in mode sequence")]
MaxTp = Annotated[int, typer.Option(min=1, help="largest tensor-parallel degree")]
SequenceParallel = Annotated[bool, typer.Option(help="time layers with Megatron-SP")]
HardwareBudget = Annotated[float, typer.Option(min=0, help="spend so long on each number (ms)")]
ModelBudget = Annotated[float, typer.Option(min=0, help="spend so long on each set of numbers (ms)")]


@app.command()
def hardware(
    output: Output,
    nproc: Nproc = 1,
    largest_message_mib: Annotated[float, typer.Option(min=1, help="measure messages up to this size")] = 1024,
    budget_ms: HardwareBudget = 150,
) -> None:
    """Measure collectives by group and message size, sends between stages, and how work and messages overlap."""
    from paddlenlp_galvatron.profiler.hardware import HardwareOptions
    from paddlenlp_galvatron.profiler.launcher import run_ranks

    options = HardwareOptions(str(output.absolute()), largest_message_mib, budget_ms)
    run_ranks("hardware", options, nproc, "hardware")
    typer.echo(f"hardware profile of {nproc} processes: {output}")


@app.command()
def model(
    model: Model,
    output: Output,
    nproc: Nproc = 1,
    profile_mode: Mode = ProfileMode.STATIC,
    profile_batch_size: BatchSize = 1,
    profile_min_batch_size: MinBatch = 1,
    profile_max_batch_size: MaxBatch = 4,
    profile_batch_size_step: BatchStep = 1,
    profile_seq_length_list: LengthList = None,
    profile_min_seq_length: MinLength = 512,
    profile_max_seq_length: MaxLength = 2048,
    profile_seq_length_step: LengthStep = 512,
    max_tp_size: MaxTp = 8,
    sequence_parallel: SequenceParallel = False,
    computation: Annotated[bool, typer.Option(help="measure computation")] = True,
    memory: Annotated[bool, typer.Option(help="measure memory")] = True,
    budget_ms: ModelBudget = 250,
) -> None:
    """Measure computation and memory of a model's layers and of its vocabulary layers."""
    from paddlenlp_galvatron.profiler.launcher import run_ranks
    from paddlenlp_galvatron.profiler.model import ModelOptions

    shape = load_model(model)
    measured = points(
        profile_mode,
        profile_batch_size,
        Steps(profile_min_batch_size, profile_max_batch_size, profile_batch_size_step),
        profile_seq_length_list or str(min(MODEL_LENGTH, shape.max_position_embeddings)),
        Steps(profile_min_seq_length, profile_max_seq_length, profile_seq_length_step),
    )
    lengths = [point.seq for point in measured]
    _require_positions(shape, max(lengths))
    options = ModelOptions(
        str(output.absolute()),
        shape,
        [(point.batch, point.seq) for point in measured],
        runnable_degrees(shape, nproc, max_tp_size, lengths),
        sequence_parallel,
        computation,
        memory,
        budget_ms,
    )
    run_ranks("model", options, nproc, shape.name)
    typer.echo(f"model profile of {shape.name} on {nproc} processes: {output}")


def _require_positions(shape: ModelShape, longest: int) -> None:
    if longest > shape.max_position_embeddings:
        raise UserError(
            f"profile_seq_length_list: {longest} tokens are beyond the {shape.max_position_embeddings} positions of "
            f"{shape.name}; measure shorter samples"
        )
