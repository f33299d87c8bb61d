"""The reference of DPO: log-probabilities of all answers by the model that the run begins with.

The model does not change, so one pass over the data before the first update is enough, and two numbers a pair; they
are kept in the run's folder, where a run that goes on, under whatever plan, finds them.
"""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from ..plan import UserError
from ..runtime.engine import Engine
from .checkpoint.loading import from_first
from .data.sample_index import NUMBER, keep, kept
from .data.tuning import TuningData
from .resume import say

FOLDER = "reference"


class Reference:
    """The model that a run begins with, while its weights are there: adapters can be left out at any time."""

    def __init__(self, engine: Engine, run: Path, base: str):
        """`base`: what tells its weights from others'. A checkpoint knows them by the data's identity."""
        self._engine, self._folder, self._base = engine, run / FOLDER, base
        self.is_gone = False  # all weights have been trained

    def tell(self, data: TuningData) -> None:
        """Let a data set have its answers' log-probabilities. Every rank calls this. Raises UserError."""
        if data.identity.get("reference"):
            return
        engine, made_from = self._engine, data.identity | {"reference": self._base}
        name = sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:32]
        arrays = kept(self._folder / name, made_from) if engine.rank == 0 else None
        known = from_first(engine, arrays and np.asarray(arrays[0][0 : len(arrays[0])]))
        if known is None:
            if self.is_gone:
                raise UserError("evaluation: its pairs have no reference any more; evaluate before, or say --do_eval")
            known = self._compute(data)
            if engine.rank == 0:
                self._folder.mkdir(exist_ok=True)
                keep(self._folder / name, made_from, known)
        data.reference = known.view(np.float64)[:, 0].astype(np.float32)
        data.identity["reference"] = self._base

    def _compute(self, data: TuningData) -> Any:
        """[answers, 1], fp64 as whole numbers of the same bytes."""
        engine, batch = self._engine, data.global_batch
        say(engine, f"writing {self._folder}: log-probabilities of the answers in {data.samples} rows")
        found = np.zeros((len(data.reference), 1))
        for step in range(-(-data.samples // batch)):
            answers = engine.answers(engine.share(data.last_rows(step, engine.rows)))
            for row in range(min(batch, data.samples - step * batch)):
                place = data.place_in_reference(data.index(step * batch + row))
                found[place, 0] = answers[row].reshape(-1)[: place.stop - place.start]
        return found.view(NUMBER)
