"""What `run_pretrain_galvatron.py` does: PaddleNLP's conventions in front of `galvatron train`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddlenlp_galvatron.plan.options import is_boolean

from .config_file import read_options
from .conventions import canonical_words
from .main import exit_code_of
from .train import train

if TYPE_CHECKING:
    from paddlenlp.trainer import TrainerCallback


def pretrain(script: str, words: Sequence[str], callbacks: Sequence[TrainerCallback] = ()) -> int:
    """Train by flags, or one JSON file and flags that win over it, and return the exit code.

    Started by hand, the script starts itself once a rank. Started as a rank, also by Paddle's own launcher, it trains.
    """
    if "PADDLE_TRAINER_ID" not in os.environ:
        return exit_code_of(lambda: _launch(script, words))
    from paddlenlp_galvatron.runtime.groups import run_as_rank

    return run_as_rank(lambda: _train_as_rank(words, callbacks))


def _launch(script: str, words: Sequence[str]) -> int:
    train(read_words(words), dry_run=False, program=[str(Path(script).absolute()), *words])
    return 0


def _train_as_rank(words: Sequence[str], callbacks: Sequence[TrainerCallback]) -> None:
    from paddlenlp_galvatron.runtime.groups import start_world
    from paddlenlp_galvatron.training.prepare import prepare
    from paddlenlp_galvatron.training.trainer import GalvatronTrainer

    _, world_size = start_world()  # before PaddleNLP's arguments would, its way
    GalvatronTrainer(prepare(read_words(words), world_size).settings, callbacks=callbacks).train()


def read_words(words: Sequence[str]) -> dict[str, Any]:
    """Options by canonical name. Raises UserError."""
    from paddlenlp_galvatron.training.arguments import OPTIONS, parse_options

    file, flags = (Path(words[0]), words[1:]) if words and words[0].endswith(".json") else (None, words)
    from_file = [f"--{name}={_word(value)}" for name, value in read_options(file).items()] if file else []
    return parse_options(
        canonical_words([*from_file, *flags], {name: is_boolean(info) for name, info in OPTIONS.items()})
    )


def _word(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
