"""This rank's model for PaddleNLP's callbacks and scripts: sub-layers with PaddleNLP's names of the weights."""

from __future__ import annotations

from typing import Any, NoReturn

from paddle.nn import Layer

from ..plan import UserError
from ..runtime.stage import Stage


class LocalModel(Layer):  # type: ignore[misc]
    """The weights of the layers that this rank holds, under the names that PaddleNLP's whole model gives them.

    A parameter is the slice that the rank holds of a weight; under zero3 the flat part of that slice which it keeps,
    which may be empty. Their values are the current ones whenever a callback runs.
    """

    def __init__(self, stage: Stage):
        super().__init__()
        self.config = stage.config
        held = [pair for unit in stage.units for pair in unit.held()]
        for weight, parameter in [*held, *((vector, vector.tensor) for vector in (*stage.vectors, *stage.frozen))]:
            self._adopt(weight.name, parameter)

    def _adopt(self, path: str, parameter: Any) -> None:
        *layers, name = path.split(".")
        owner: Layer = self
        for step in layers:
            if step not in owner._sub_layers:
                owner.add_sublayer(step, Layer())
            owner = owner._sub_layers[step]
        owner.add_parameter(name, parameter)

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        """Raises UserError: these are the parts of one rank."""
        raise UserError(
            "model: a rank holds parts of it, which the plan's engine runs; for a forward pass of your own save it "
            "(trainer.save_model) and load it whole with PaddleNLP"
        )
