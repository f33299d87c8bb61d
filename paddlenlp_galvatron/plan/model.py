"""The model's shape: the numbers that planning needs, read from a Hugging Face or PaddleNLP `config.json`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..base.errors import UserError
from ..base.limits import MOST_LAYERS, MOST_SIZE
from ..base.reading import LARGEST_OPTIONS, read_json
from ..base.text import shortened

FAMILIES = ("llama", "qwen2")
PRESET_FOLDERS = (Path(__file__).parents[2] / "configs" / "models", Path(__file__).parents[1] / "presets")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Shape of a decoder-only transformer whose layers are alike.

    A model of several layer types is a sequence of shapes, one a type, in the order of its layers; its embedding is the
    first one's, its LM head the last one's.
    """

    name: str
    family: str  # one of FAMILIES
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    vocab_size: int
    max_position_embeddings: int
    tied_embeddings: bool = False
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    initializer_range: float = 0.02  # standard deviation of the weights at the start
    attention_dropout: float = 0.0  # plans do not depend on it
    seq_length: int | None = None  # tokens of a sample that these layers see; None: the run's

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.heads

    @property
    def layer_parameters(self) -> int:
        """Weights of one decoder layer: attention (with Qwen2's q, k, v biases), gated MLP, two norms."""
        kv = self.kv_heads * self.head_dim
        attention = 2 * self.hidden_size * (self.hidden_size + kv)
        biases = self.hidden_size + 2 * kv if self.family == "qwen2" else 0
        return attention + biases + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size

    @property
    def parameters(self) -> int:
        """Weights of the whole model."""
        tables = 1 if self.tied_embeddings else 2
        return self.layers * self.layer_parameters + tables * self.vocab_size * self.hidden_size + self.hidden_size

    def padded_vocab_size(self, tp: int) -> int:
        """Rows of the vocabulary tables when `tp` ranks split them: the next multiple of tp."""
        return -(-self.vocab_size // tp) * tp

    @property
    def fingerprint(self) -> str:
        """Short hash of what planning depends on: equal exactly for shapes that are equal but for their names."""
        shape = {key: value for key, value in asdict(self).items() if key not in ("name", "attention_dropout")}
        if self.seq_length is None:  # as it was before shapes had the field
            del shape["seq_length"]
        return _short_hash(shape)


def joint_fingerprint(models: Sequence[ModelShape]) -> str:
    """Fingerprint of a model of one or several layer types; of one, its own."""
    return models[0].fingerprint if len(models) == 1 else _short_hash([model.fingerprint for model in models])


def measured_fingerprint(models: Sequence[ModelShape]) -> str:
    """Fingerprint of what measurements of layers and vocabulary depend on: not the number of layers, not the positions
    nor the length of samples, which measurements tell themselves."""
    names = ("family", "hidden_size", "intermediate_size", "heads", "kv_heads", "vocab_size", "tied_embeddings")
    return _short_hash([[getattr(model, name) for name in names] for model in models])


def _short_hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def preset_names() -> list[str]:
    """Names accepted as `model_size`."""
    return sorted({path.stem for folder in PRESET_FOLDERS for path in folder.glob("*.json")})


def load_model(name_or_path: str | Path) -> ModelShape:
    """Shape of a preset, of a `config.json`, or of a folder that holds one. Raises UserError."""
    path = Path(name_or_path)
    if path.is_dir():
        path = path / "config.json"
    if not path.exists() and path.suffix != ".json":
        for folder in PRESET_FOLDERS:
            if (folder / f"{name_or_path}.json").exists():
                return load_model(folder / f"{name_or_path}.json")
        known = ", ".join(preset_names())
        raise UserError(f"model {shortened(str(name_or_path))}: neither a config.json nor a known size; known: {known}")
    name = path.parent.name if path.name == "config.json" else path.stem
    return shape_from_config(read_json(path, LARGEST_OPTIONS), name, source=str(path))


def shape_from_config(config: Any, name: str, source: str = "config") -> ModelShape:
    """Shape from the fields of a Hugging Face or PaddleNLP config. Raises UserError."""
    if not isinstance(config, dict):
        raise UserError(f"{source}: a model config holds one JSON object; this one does not")
    rope = config.get("rope_parameters")  # where transformers 5 keeps rope_theta
    config = {**rope, **config} if isinstance(rope, dict) else config

    def number(field: str, default: float | None = None, kind: type = int, most: float = MOST_SIZE) -> Any:
        value: Any = config.get(field, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 < value <= most or kind(value) != value:
            wrong = "is missing" if value is None else f"is {shortened(repr(value))}"
            wanted = f"a positive number up to {most:g}" if kind is float else f"a whole number from 1 to {most}"
            raise UserError(f"{source}: {field} {wrong}; give {wanted}")
        return kind(value)

    tied = config.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise UserError(f"{source}: tie_word_embeddings is {shortened(repr(tied))}; give true or false")
    dropout = config.get("attention_dropout", 0.0)
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
        raise UserError(f"{source}: attention_dropout is {shortened(repr(dropout))}; give a number from 0 to below 1")
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise UserError(f"{source}: model_type is {shortened(repr(family))}; supported: {', '.join(FAMILIES)}")
    heads = number("num_attention_heads")
    shape = ModelShape(
        name=name,
        family=family,
        layers=number("num_hidden_layers", most=MOST_LAYERS),
        hidden_size=number("hidden_size"),
        intermediate_size=number("intermediate_size"),
        heads=heads,
        kv_heads=number("num_key_value_heads", heads),
        vocab_size=number("vocab_size"),
        max_position_embeddings=number("max_position_embeddings", 2048),
        tied_embeddings=tied,
        rms_norm_eps=number("rms_norm_eps", 1e-6, float, 1),
        rope_theta=number("rope_theta", 10000.0, float, 1e15),
        initializer_range=number("initializer_range", 0.02, float, 1e3),
        attention_dropout=dropout,
    )
    if shape.hidden_size % shape.heads:
        raise UserError(f"{source}: hidden_size {shape.hidden_size} does not split into {shape.heads} heads")
    if shape.heads % shape.kv_heads:
        raise UserError(f"{source}: num_attention_heads {shape.heads} is no multiple of {shape.kv_heads} kv heads")
    return shape
