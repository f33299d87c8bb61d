"""One rank of a training run: `python -m paddlenlp_galvatron.training.train_worker SETTINGS.json`."""

from __future__ import annotations

import sys

from ..runtime.groups import run_as_rank
from .settings import read_settings
from .trainer import GalvatronTrainer


def main() -> None:
    GalvatronTrainer(read_settings(sys.argv[1])).train()


if __name__ == "__main__":
    run_as_rank(main)
