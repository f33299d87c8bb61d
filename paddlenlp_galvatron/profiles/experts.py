"""Compute time of a layer's experts on one rank: a fixed part of each pass, a part for each expert of the rank, and a
part for each row, a token that is sent to one of its experts.

A grouped kernel reads the weights of every expert once and multiplies each row with those of one. Experts that run one
by one add the products of each, and calls of the host, for which a GPU waits where its own work is shorter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..model import ModelShape
from ..plan.strategy import Precision
from .data_sheet import DataSheet

GRADIENT_BYTES = 10  # a weight's gradient in 16 bits is read, and added to a sum in fp32
PRODUCTS = 3  # of an expert: gate, up and down
# Calls of forward after the host has read the row counts: it cannot launch them ahead.
CALLS_BEHIND_READ = 10
COPIES = 3  # of each row: into the order of ranks, into that of experts, and back


class ExpertKernels(NamedTuple):
    """How a layer's experts are computed. Calls into Paddle are those of one pass: backward has twice the kernels, but
    no Python."""

    routing: int = 40  # calls for scores, their order and the exchanges: runtime/experts.py
    expert: int = 0  # calls for each of the rank's experts, where it runs by itself
    once: bool = False  # a token crosses once to each rank, or node, that has some of its experts, as by DeepEP
    copies: int = 0  # of each row, that are kept for backward beside ours


GROUPED = ExpertKernels()
ONE_BY_ONE = ExpertKernels(expert=6)  # for each of three products: its rows, and the product


class ExpertPass(NamedTuple):
    """Times of one pass, in ms."""

    call_ms: float = 0.0
    expert_ms: float = 0.0
    row_ms: float = 0.0

    def of(self, experts: int, rows: float) -> float:
        """With so many experts and rows on a rank."""
        return self.call_ms + experts * self.expert_ms + rows * self.row_ms


@dataclass(frozen=True, slots=True)
class ExpertTimes:
    """Times of experts at one degree of tensor parallelism inside experts."""

    forward: ExpertPass
    backward: ExpertPass
    launch: ExpertPass  # of the host, in each pass


def analytic_experts(
    model: ModelShape,
    sheet: DataSheet,
    precision: Precision,
    degrees: tuple[int, ...],
    kernels: ExpertKernels = GROUPED,
) -> Mapping[int, ExpertTimes]:
    """Times by degree of tensor parallelism inside experts, by a data sheet."""
    if not model.experts:
        return {}
    peak = sheet.matmul_fp32 if precision is Precision.FP32 else sheet.matmul_16bit
    flops_per_ms = peak.value * sheet.matmul_efficiency.value * 1e9
    bytes_per_ms = sheet.memory_bandwidth.value * sheet.memory_efficiency.value * 1e6
    launch_ms, start_ms = sheet.launch.value / 1e3, sheet.product_start.value / 1e3
    weights, [experts] = model.routed.parameters // model.experts, model.routed.sublayers
    alone_ms = PRODUCTS * start_ms if kernels.expert else 0.0
    host = ExpertPass(kernels.routing * launch_ms, kernels.expert * launch_ms)

    def at(degree: int) -> ExpertTimes:
        own = weights / degree
        copied = (COPIES - kernels.once) * model.hidden_size
        numbers = 2 * (experts.kept.gathered + experts.kept.split / degree + copied)
        row_ms = 2 * own / flops_per_ms + numbers * precision.bytes / bytes_per_ms
        read_ms = own * precision.bytes / bytes_per_ms
        start = CALLS_BEHIND_READ * launch_ms + PRODUCTS * start_ms
        summed_ms = own * GRADIENT_BYTES / bytes_per_ms
        return ExpertTimes(
            ExpertPass(start, read_ms + alone_ms, row_ms),
            ExpertPass(2 * PRODUCTS * start_ms, 2 * read_ms + summed_ms + 2 * alone_ms, 2 * row_ms),
            host,
        )

    return {degree: at(degree) for degree in degrees if model.expert_size % degree == 0}
