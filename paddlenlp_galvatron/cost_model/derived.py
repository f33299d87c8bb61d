"""A cost model by arithmetic from the data sheet of a node: nothing is measured, no file is read or written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..base.errors import UserError
from ..model import ModelShape
from ..plan.strategy import Assumptions
from ..profiles.analytic import analytic_computation, analytic_hardware, analytic_memory
from ..profiles.compute_time import ComputeTimes
from ..profiles.data_sheet import DataSheet
from ..profiles.memory_use import MemoryUse
from ..profiles.network import Network
from .costs import CostOptions
from .model import CostModel


def derive(
    model: ModelShape,
    sheet: DataSheet,
    num_nodes: int,
    gpus_per_node: int,
    assumed: Assumptions,
    options: CostOptions = CostOptions(),
    kept_bytes: Callable[[int, int], float] | None = None,
) -> CostModel:
    """The same prices as of the files that `galvatron profile all --analytic` writes; with Paddle's fused kernels,
    unless `assumed` says otherwise. `kept_bytes`: see `analytic_computation`. Raises UserError where no length of
    samples is assumed."""
    seq = assumed.seq_length
    if seq is None:
        raise UserError("seq_length: missing; say how many tokens a sample has")
    assumed = replace(assumed, flash_attention=assumed.flash_attention is not False)
    precision, lengths, fused = assumed.mixed_precision, [seq], assumed.fused
    memory = analytic_memory(model, precision, lengths, fused)
    if sheet.allocator:
        memory = replace(memory, meta=memory.meta.with_extra({}, reserved=1 + sheet.allocator.value))
    return CostModel(
        model,
        network=Network(analytic_hardware(sheet, num_nodes, gpus_per_node)),
        times=ComputeTimes(analytic_computation(model, sheet, precision, lengths, fused, kept_bytes, options.kernels)),
        memory=MemoryUse(memory),
        num_nodes=num_nodes,
        gpus_per_node=gpus_per_node,
        assumed=assumed,
        options=options,
        host_link=sheet.host_link.value,
    )
