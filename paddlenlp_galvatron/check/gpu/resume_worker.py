"""One rank: trains straight to the end, and half the way and on from the checkpoint, in folders of their own."""

from __future__ import annotations

import sys

from ...runtime.groups import run_as_rank
from ...training.settings import read_settings
from ...training.trainer import GalvatronTrainer
from .faults import HALVES, STRAIGHT


def main() -> None:
    settings = read_settings(sys.argv[1])
    whole = settings.max_steps
    for name, steps in ((STRAIGHT, whole), (HALVES, whole // 2), (HALVES, whole)):
        changed = {"output_dir": settings.output_dir / name, "max_steps": steps}
        GalvatronTrainer(settings.model_copy(update=changed)).train()


if __name__ == "__main__":
    run_as_rank(main)
