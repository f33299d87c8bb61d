"""The DataLoader of a rank of PaddleNLP's Trainer: its share of each micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import paddle
from paddle.io import DataLoader, Dataset

from ..plan import Plan
from ..runtime.batch import Batch, samples_of
from .arguments import RunArguments

Inputs = dict[str, Any]  # input_ids and labels [samples of a device, S]


Rows = Callable[[int, Sequence[int]], Batch]  # some rows of a step's global batch


def inputs_of(rows: Rows, step: int, micro_batch: int, plan: Plan, args: RunArguments) -> Inputs:
    """This rank's share of a micro-batch of a step, on the CPU."""
    first = micro_batch * plan.micro_batch + args.dataset_rank * args.train_batch_size
    ids, labels, *_ = samples_of(rows(step, range(first, first + args.train_batch_size)))
    parts = {"input_ids": ids, "labels": labels}
    return {name: paddle.to_tensor(part, place=paddle.CPUPlace()) for name, part in parts.items()}


class MicroBatches(Dataset):  # type: ignore[misc]
    """A rank's share of the micro-batches of some steps, one after the other."""

    def __init__(self, rows: Rows, steps: int, plan: Plan, args: RunArguments):
        self._rows, self._steps, self._plan, self._args = rows, steps, plan, args

    def __len__(self) -> int:
        return self._steps * self._plan.micro_batches

    def __getitem__(self, number: int) -> Inputs:
        step, micro_batch = divmod(number, self._plan.micro_batches)
        return inputs_of(self._rows, step, micro_batch, self._plan, self._args)


def loader(rows: Rows, steps: int, plan: Plan, args: RunArguments) -> DataLoader:
    """Paddle's loader of them."""
    return DataLoader(MicroBatches(rows, steps, plan, args), batch_size=None, shuffle=False, return_list=True)
