"""What the ranks of a model profile are told: its options, and what follows from them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from ...plan import ModelShape
from ...profiles import Shape
from ..options import PointOptions


class ModelRun(BaseModel):
    """Goes to the ranks as JSON."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    options: PointOptions
    shapes: tuple[ModelShape, ...]  # one a layer type
    points: tuple[Shape, ...]
    degrees: tuple[int, ...]  # of tensor parallelism
    computation: bool = True
    memory: bool = True
