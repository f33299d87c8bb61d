"""What a rank of PaddleNLP's Trainer would load: its share of each micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import paddle
from paddle.io import DataLoader, Dataset

from ..plan import Plan
from ..runtime.stage import Batch, inputs_and_labels
from .run_arguments import RunArguments

Inputs = dict[str, Any]  # input_ids and labels [samples of a device, S]


def inputs_of(batch: Batch, micro_batch: int, plan: Plan, args: RunArguments) -> Inputs:
    """This rank's share of a micro-batch of a global batch, on the CPU."""
    first = micro_batch * plan.micro_batch + args.dataset_rank * args.train_batch_size
    rows = slice(first, first + args.train_batch_size)
    ids, labels = inputs_and_labels(batch)
    parts = {"input_ids": ids, "labels": labels}
    return {name: paddle.to_tensor(part[rows], place=paddle.CPUPlace()) for name, part in parts.items()}


class MicroBatches(Dataset):  # type: ignore[misc]
    """A rank's share of the micro-batches of some steps, one after the other."""

    def __init__(self, batch: Callable[[int], Batch], steps: int, plan: Plan, args: RunArguments):
        """`batch` gives the global batch of a step."""
        self._steps, self._plan, self._args = steps, plan, args
        self._batch = lru_cache(maxsize=1)(batch)

    def __len__(self) -> int:
        return self._steps * self._plan.micro_batches

    def __getitem__(self, number: int) -> Inputs:
        step, micro_batch = divmod(number, self._plan.micro_batches)
        return inputs_of(self._batch(step), micro_batch, self._plan, self._args)


def loader(batch: Callable[[int], Batch], steps: int, plan: Plan, args: RunArguments) -> DataLoader:
    """Paddle's loader of them."""
    return DataLoader(MicroBatches(batch, steps, plan, args), batch_size=None, shuffle=False, return_list=True)
