"""Counts the cost of starting many ranks, and starts none: communicators, the place where they meet, first weights.

    python benchmarks/thousand_ranks.py [--ranks 64 1024]

Communicators: of a plan of four strategies in eight stages. Meeting: as many clients of one store as there are ranks,
from a soft limit of 1,024 open files. Weights: numbers that a rank draws, bytes in 16 bits that it reads of files
instead, messages, and numbers that these join on a rank; nothing is allocated. The rank counts that draws most of the
first, middle and last one. Seconds are of this machine; those of drawing, by the rate that is measured first.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from math import prod
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from paddlenlp_galvatron.base.printing import Console, table
from paddlenlp_galvatron.launch.store import StoreClient, StoreServer, open_files
from paddlenlp_galvatron.plan import (
    Assumptions,
    DataParallel,
    LayerStrategy,
    ModelShape,
    Plan,
    VocabStrategy,
    load_model,
)
from paddlenlp_galvatron.plan.communicators import in_rounds, most_communicators, stage_groups
from paddlenlp_galvatron.runtime import block
from paddlenlp_galvatron.runtime.block import Placement
from paddlenlp_galvatron.runtime.groups import RankGroups
from paddlenlp_galvatron.runtime.setup import ModelSetup
from paddlenlp_galvatron.runtime.weights import TILE, SeededWeights, ShardedParameter, Slice, within

MODELS = ("llama2-7b", "llama3-70b", "llama3-405b")
SEQ, FILE_BYTES, TOKEN = 8192, 2, "of this benchmark"


class Counted:
    """A source of weights that counts what is requested; it stands for the arrays that it would give, too."""

    def __init__(self) -> None:
        self.drawn = self.read_bytes = self.messages = self.joined = 0

    def __call__(self, name: str, shape: tuple[int, ...], part: Slice) -> Any:
        self.read_bytes += FILE_BYTES * prod(part.size(shape))
        if len(shape) > 1:
            tiles = 1
            for axis, (length, size) in enumerate(zip(shape, TILE, strict=True)):
                start, stop = part.interval(axis, length)
                tiles *= max(0, -(-min(stop, length) // size) - start // size)
            self.drawn += prod(TILE) * tiles
        return self

    def reshape(self, *_: int) -> Counted:
        return self

    def __getitem__(self, _: slice) -> Counted:
        return self

    def begin(self, weights: list[ShardedParameter], kind: DataParallel) -> None:
        """As a unit of a module's weights begins on this rank."""
        for weight in (each for each in weights if len(each.shape) == 1):
            self.messages += weight.sum_group is not None
            if weight.sum_group is None or weight.sum_group.rank == 0:
                weight.first_values(0, weight.shape[0])
        matrices = [weight for weight in weights if len(weight.shape) > 1]
        group = matrices[0].sum_group or SimpleNamespace(rank=0, nranks=1)
        size = -(-sum(prod(weight.slice.size(weight.shape)) for weight in matrices) // group.nranks)
        for weight, low, high, _ in within(matrices, group.rank * size, (group.rank + 1) * size):
            if low < high:
                weight.first_values(low, high)
        if group.nranks > 1 and kind is not DataParallel.ZERO3:
            self.messages += 1
            self.joined += size * group.nranks


class Groups:
    """Those of a rank, by arithmetic alone."""

    def __init__(self, rank: int):
        self._rank = rank

    def get(self, ranks: tuple[int, ...], use: str = "") -> Any:
        """Its group; None for one rank."""
        if len(ranks) == 1:
            return None
        return SimpleNamespace(ranks=[*ranks], nranks=len(ranks), rank=ranks.index(self._rank), id=len(ranks))


@patch.object(block, "zero_parameter", lambda *_: None)
def first_weights(plan: Plan, shape: ModelShape, rank: int) -> Counted:
    """Counts the first weights that a rank makes."""
    counted, stage = Counted(), rank // plan.stage_size
    setup = ModelSetup.of(plan, shape, SEQ, source=counted)

    def begin(strategy: LayerStrategy, weights: Any) -> None:
        place = Placement(setup, RankGroups(plan, rank, Groups(rank)), strategy)  # type: ignore[arg-type]
        counted.begin([place.parameter(weight, "") for weight in weights], strategy.dp_type)

    if stage == 0:
        begin(plan.vocab.as_layer(), shape.embedding.weights)
    for index in plan.stage_layers(stage):
        begin(plan.layers[index], shape.block.weights)
    if stage == plan.pipeline - 1:
        begin(plan.vocab.as_layer(), shape.head.weights)
    return counted


def sharded(shape: ModelShape, ranks: int) -> Plan:
    """Zero3 over all ranks."""
    kind = DataParallel.ZERO3
    layers = (LayerStrategy(dp_type=kind),) * shape.layers
    vocab, assumed = VocabStrategy(dp_type=kind), Assumptions(seq_length=SEQ)
    return Plan(ranks, ranks, 1, (shape.layers,), layers, vocab, default_dp_type=kind, assumed=assumed)


def split(shape: ModelShape, ranks: int) -> Plan:
    """Tensor parallel over 8 ranks in 8 stages, the rest data parallel."""
    stages = tuple(shape.layers * (k + 1) // 8 - shape.layers * k // 8 for k in range(8))
    assumed = Assumptions(True, seq_length=SEQ)
    return Plan(ranks, ranks, 16, stages, (LayerStrategy(8),) * shape.layers, VocabStrategy(8), assumed=assumed)


def rate() -> float:
    """Numbers that this machine draws in a second of its processor."""
    size, since = (1024, 4096), time.process_time()
    SeededWeights(0, 0.02)("weight", size)
    return prod(size) / (time.process_time() - since)


def show_weights(console: Console, ranks: int) -> None:
    per_s = rate()
    title = f"first weights of {ranks} ranks; {per_s / 1e6:.0f} million numbers/s drawn"
    shown = table("model", "plan", "numbers drawn", "s", "MiB read", "messages", "numbers joined", title=title)
    plans: dict[str, Callable[[ModelShape, int], Plan]] = {f"zero3 x {ranks}": sharded, "tp8 x pp8": split}
    for model in MODELS:
        shape = replace(load_model(model), seq_length=SEQ)
        for name, make in plans.items():
            plan = make(shape, ranks)
            some = (first_weights(plan, shape, rank) for rank in (0, ranks // 2, ranks - 1))
            most = max(some, key=lambda of: of.drawn)
            cells = f"{most.drawn / 1e6:,.0f} M", f"{most.drawn / per_s:.1f}", f"{most.read_bytes / 2**20:,.0f}"
            shown.add_row(model, name, *cells, f"{most.messages}", f"{most.joined / 1e6:,.0f} M")
    console.print(shown)


def show_start(console: Console, ranks: int) -> None:
    shown = table("what", "s", "of a rank", title=f"the start of {ranks} ranks")
    shape = replace(load_model("llama3-70b"), seq_length=SEQ)
    layers = tuple(LayerStrategy(degree, dp_type=DataParallel.ZERO3) for degree in (8, 4, 2, 1) for _ in range(20))
    assumed = Assumptions(True, seq_length=SEQ)
    plan = Plan(ranks, 2 * ranks, 16, (10,) * 8, layers, VocabStrategy(8), assumed=assumed)
    since = time.process_time()
    groups = stage_groups(plan, shape, SEQ)
    in_rounds(groups)
    spent = time.process_time() - since
    shown.add_row(f"{len(groups):,} communicators, in order", f"{spent:.2f}", f"{most_communicators(groups)} of them")
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    open_files(2 * ranks)  # both ends are in this process
    server, since = StoreServer("127.0.0.1", 0, TOKEN), time.process_time()
    clients = [StoreClient("127.0.0.1", server.port, TOKEN, 60) for _ in range(ranks)]
    for number, client in enumerate(clients):
        client.set(f"{number}", b"here")
    assert all(client.get(f"{number}") == b"here" for number, client in enumerate(clients))
    spent = time.process_time() - since
    shown.add_row("all meet at one store", f"{spent:.2f}", "3 requests, 1 file on the first node")
    shown.add_row("which rank saves what", "0.00", "0 bytes gathered: by its place in its groups")
    for client in clients:
        client.close()
    server.close()
    console.print(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 1024])
    for ranks in parser.parse_args().ranks:
        show_start(Console(), ranks)
        show_weights(Console(), ranks)


if __name__ == "__main__":
    main()
