"""Reading fields of a config.json: checked, and with the family's values where they are left out."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..base import UserError, shortened
from ..base.limits import MOST_SIZE
from .families import Family

# Values in transformers of fields that are left out, unless the family has others.
USUAL: dict[str, float] = {
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "initializer_range": 0.02,
    "router_aux_loss_coef": 0.001,
}


@dataclass(frozen=True)
class Fields:
    """The fields of a model's config, or of an object in it."""

    config: Mapping[str, Any]
    family: Family
    source: str  # named in errors: the file, and the object in it

    def get(self, field: str) -> Any:
        """A field, or the family's default; None if neither exists."""
        return self.config.get(field, self.family.defaults.get(field, USUAL.get(field)))

    def number(self, field: str, kind: type = int, most: float = MOST_SIZE, least: int = 1) -> Any:
        """A positive number, or a whole number of at least `least`. Raises UserError if it is missing or invalid."""
        value = self.get(field)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not (value > 0 or value >= least) or value > most or kind(value) != value:
            wanted = f"a positive number up to {most:g}" if kind is float else f"a whole number from {least} to {most}"
            raise self.error(field, wanted)
        return kind(value)

    def flag(self, field: str) -> bool:
        """A switch; if absent, off unless the family has it on. Raises UserError."""
        value = self.config.get(field, self.family.defaults.get(field, False))
        if not isinstance(value, bool) and not (value is None and field in self.family.null_off):
            raise self.error(field, "true or false")
        return bool(value)

    def error(self, field: str, wanted: str) -> UserError:
        value = self.get(field)
        wrong = f"is {'null' if value is None else shortened(repr(value))}" if field in self.config else "is missing"
        return UserError(f"{self.source}: {field} {wrong}; give {wanted}")


def as_json(value: Any) -> str:
    """A value in an error: as in config.json, text without quotes."""
    return shortened(value if isinstance(value, str) else json.dumps(value))
