"""One rank of a training run: `python -m paddlenlp_galvatron.training.train_worker SETTINGS.json`."""

import sys

from ..runtime.groups import run_as_rank
from .loop import train
from .settings import read_settings

if __name__ == "__main__":
    run_as_rank(lambda: train(read_settings(sys.argv[1])))
