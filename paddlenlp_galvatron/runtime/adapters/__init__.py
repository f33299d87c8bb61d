"""How PaddleNLP runs a model: the fused kernels that it may use, and one small adapter per dense family."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Self

from ...model import FAMILIES
from ...plan import Assumptions, Plan, UserError
from .. import device

if TYPE_CHECKING:  # PaddleNLP's layers take seconds to import
    from .decoder import Adapter

DENSE = {"qwen2_moe": "qwen2", "qwen3_moe": "qwen3", "mixtral": "llama"}  # with experts in place of the MLP
ROWS_OF_OWN_QUERIES = (3, 2)  # the first Paddle whose flashmask takes as many rows as there are queries


@dataclass(frozen=True)
class Kernels:
    """Paddle's fused GPU kernels that replace plain operations."""

    flash_attention: bool = False
    fused_rope: bool = False
    fused_rms_norm: bool = False
    fused_cross_entropy: bool = False  # where the vocabulary is split

    @classmethod
    def of(cls, assumed: Assumptions) -> Self:
        """Kernels that a plan assumes and this device has."""
        return cls(*(device.on_gpu() and bool(getattr(assumed, name)) for name in cls.__match_args__))

    def require_version(self, plan: Plan, version: str) -> None:
        """Raise UserError where a kernel of this version of Paddle refuses what the plan asks of it."""
        parallel = any(layer.context > 1 for layer in plan.layers)
        if self.flash_attention and parallel and tuple(map(int, version.split(".")[:2])) < ROWS_OF_OWN_QUERIES:
            raise UserError(
                f"cp_sizes_enc: flash attention of Paddle {version} refuses fewer queries than keys; install Paddle "
                f"{'.'.join(map(str, ROWS_OF_OWN_QUERIES))} or newer, or search a plan with --max_cp_deg 1"
            )


PLAIN = Kernels()


def load_family(name: str) -> Adapter:
    """The adapter of a family. Raises UserError for a family that has none."""
    if name not in FAMILIES:
        raise UserError(f"model family {name!r} is not supported; known: {', '.join(FAMILIES)}")
    dense = DENSE.get(name, name)
    bases = [getattr(import_module(f".{dense}", __name__), FAMILIES[dense].title)]
    if dense != name:
        bases.insert(0, import_module(".mixture", __name__).WithExperts)
    family: Adapter = type(FAMILIES[name].title, tuple(bases), {})()
    return family
