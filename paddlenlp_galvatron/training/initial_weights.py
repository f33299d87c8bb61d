"""The initial weights of a run, their trained part and its rates, and DPO's reference model, which equals them."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..base.errors import UserError
from ..model.lora import FACTORS, Adapters
from ..plan import ModelShape
from ..runtime.engine import Engine
from ..runtime.lora import NewFactors, Tuned
from ..runtime.weights import SeededWeights, WeightSource
from .checkpoint.adapters import open_adapters
from .checkpoint.loading import from_first, print_rank_0, weights_from
from .data.dataset import NUMBER, read_cache, write_cache
from .data.tuning import TuningData
from .inputs import base_of
from .settings import TrainSettings

FOLDER = "reference"


class InitialWeights(NamedTuple):
    """The weights at the first step."""

    source: WeightSource | None  # None: drawn from the seed
    adapters: Adapters | None  # the only trained weights; None: all weights train
    base: str  # identity of the base weights of adapters, or of DPO's reference; "": neither


def initial_weights(settings: TrainSettings, shape: ModelShape) -> InitialWeights:
    """Raises UserError."""
    folder = settings.initial_weights
    weights = weights_from(folder, shape) if folder else None
    base = base_of(settings, shape)
    adapters = settings.adapters(base)
    if adapters is None:
        return InitialWeights(weights, None, base)
    frozen = weights or SeededWeights(settings.seed, shape.initializer_range)
    path = settings.lora_path
    factors = NewFactors(settings.seed) if path is None else open_adapters(path, shape, adapters)
    return InitialWeights(Tuned(frozen, factors), adapters, base)


def set_rates(engine: Engine, scale: float) -> None:
    """LoRA+: scale the learning rate of the second factors."""
    for trainable in engine.trainables:
        if trainable.pieces[0].weight.name.endswith(FACTORS[1]):
            trainable.tensor.optimize_attr["learning_rate"] = scale


class Reference:
    """DPO's reference: log-probabilities of all answers by the initial model.

    The model does not change, so one pass over the data before the first update gives two numbers per pair. They are
    stored in the run's folder, where a resumed run finds them under any plan. Adapters can be disabled at any time; if
    all weights are trained, the reference model exists only before the first update.
    """

    def __init__(self, engine: Engine, run: Path, base: str):
        """`base`: identity of its weights, which checkpoints record in the data's identity."""
        self._engine, self._folder, self._base = engine, run / FOLDER, base
        self.is_gone = False  # all weights have been trained

    def attach(self, data: TuningData) -> None:
        """Give a data set its answers' log-probabilities. Every rank calls this. Raises UserError."""
        if data.identity.get("reference"):
            return
        engine, made_from = self._engine, data.identity | {"reference": self._base}
        name = sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:32]
        arrays = read_cache(self._folder / name, made_from) if engine.rank == 0 else None
        answers = from_first(engine, arrays and np.asarray(arrays[0][0 : len(arrays[0])]))
        if answers is None:
            if self.is_gone:
                raise UserError("evaluation: its pairs have no reference any more; evaluate before, or say --do_eval")
            answers = self._compute(data)
            if engine.rank == 0:
                self._folder.mkdir(exist_ok=True)
                write_cache(self._folder / name, made_from, answers)
        data.reference = answers.view(np.float64)[:, 0].astype(np.float32)
        data.identity["reference"] = self._base

    def _compute(self, data: TuningData) -> Any:
        """[answers, 1], fp64 viewed as int64."""
        engine, batch = self._engine, data.global_batch
        print_rank_0(engine, f"writing {self._folder}: log-probabilities of the answers in {data.samples} rows")
        log_probabilities = np.zeros((len(data.reference), 1))
        for step in range(-(-data.samples // batch)):
            answers = engine.answers(engine.share(data.pass_rows(step, engine.rows)))
            for row in range(min(batch, data.samples - step * batch)):
                positions = data.place_in_reference(data.index(step * batch + row))
                log_probabilities[positions, 0] = answers[row].reshape(-1)[: positions.stop - positions.start]
        return log_probabilities.view(NUMBER)
