"""The programs `run_pretrain_galvatron.py`, `run_finetune_galvatron.py` and `run_dpo_galvatron.py`: PaddleNLP's
conventions for `galvatron train`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from .command import say_note
from .main import exit_code_of
from .train import check_inputs, check_run, train

if TYPE_CHECKING:
    from paddlenlp.trainer import TrainerCallback


def pretrain(
    script: str, words: Sequence[str], callbacks: Sequence[TrainerCallback] = (), task: str | None = None
) -> int:
    """Train by flags, or by a JSON file and flags that override it; returns the exit code.

    `task`: the script's default task. Started by hand, the script starts itself once per rank. Started as a rank, also
    by Paddle's launcher, it trains.
    """
    if "PADDLE_TRAINER_ID" not in os.environ:
        return exit_code_of(lambda: _launch(script, words, task))
    from paddlenlp_galvatron.runtime.groups import run_as_rank

    return run_as_rank(lambda: _train_as_rank(words, callbacks, task))


def _launch(script: str, words: Sequence[str], task: str | None) -> int:
    from paddlenlp_galvatron.training.paddlenlp.arguments import read_words

    with _without_lines_of_paddlenlp():
        values = read_words(words, say_note, task)
    code = train(values, dry_run=_dry_run(values), program=[str(Path(script).absolute()), *words])
    return code or 0


@contextmanager
def _without_lines_of_paddlenlp() -> Iterator[None]:
    """Discard the notes: each rank reads the same arguments again and logs them."""
    from paddlenlp.utils.log import logger

    logger.disable()
    try:
        yield
    finally:
        logger.enable()


def _dry_run(values: dict[str, Any]) -> bool:
    from paddlenlp_galvatron.training.paddlenlp.arguments import DRY_RUN

    return str(values.pop(DRY_RUN, "0")).lower() in ("1", "true")


def _train_as_rank(words: Sequence[str], callbacks: Sequence[TrainerCallback], task: str | None) -> int:
    from paddlenlp_galvatron.runtime.groups import start_world
    from paddlenlp_galvatron.training.paddlenlp.arguments import read_words
    from paddlenlp_galvatron.training.paddlenlp.trainer import GalvatronTrainer
    from paddlenlp_galvatron.training.prepare import prepare

    rank, world_size = start_world()  # PaddleNLP's arguments would start it otherwise
    values = read_words(words, task=task)
    if not _dry_run(values):
        with TemporaryDirectory(prefix="galvatron-") as folder:  # written after all checks, as in `train`
            run = prepare(values, world_size, Path(folder))
            check_inputs(run)
            check_run(run)
            settings = run.settings.keep_files_of(Path(folder))
        trainer = GalvatronTrainer(settings, callbacks=callbacks)
        trainer.train()
        return trainer.loop.exit_code
    return train(values | {"nproc": world_size, "num_nodes": 1}, dry_run=True) or 0 if rank == 0 else 0
