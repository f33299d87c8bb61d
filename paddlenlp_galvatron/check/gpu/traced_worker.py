"""One rank of a pipeline of which a later step is traced; it writes down the events.

Argument: a folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ...runtime.groups import run_as_rank
from ...runtime.trace import traced
from .faults import LATER, PASSES
from .starved_worker import Training


def main() -> None:
    training, events = Training(PASSES), list[dict[str, Any]]()
    for _ in range(LATER - 1):
        training.step()
    with traced(training.rank, events):
        training.step()
    (Path(sys.argv[1]) / f"events.{training.rank}.json").write_text(json.dumps(events))


if __name__ == "__main__":
    run_as_rank(main)
