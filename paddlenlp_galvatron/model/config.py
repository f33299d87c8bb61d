"""A model's shape from a Hugging Face or PaddleNLP `config.json`, and the way back."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..base.errors import UserError
from ..base.limits import MOST_LAYERS, MOST_SIZE
from ..base.reading import LARGEST_OPTIONS, read_json
from ..base.text import shortened
from .families import FAMILIES, Family
from .shape import ModelShape

LONGEST_NAME = 100  # longest name that is compared with those of presets
EXAMPLES = ("qwen2.5-7b", "llama3-8b")
HUB_NAME = re.compile(r"[\w-]+/[\w.-]+")  # of Hugging Face's hub and PaddleNLP
COEFFICIENT = "router_aux_loss_coef"
PRESET_FOLDERS = (Path(__file__).parents[2] / "configs" / "models", Path(__file__).parents[1] / "presets")


def preset_names() -> list[str]:
    """Names accepted as `model_size`."""
    return sorted({path.stem for folder in PRESET_FOLDERS for path in folder.glob("*.json")})


def load_model(name_or_path: str | Path) -> ModelShape:
    """Shape of a preset, in any case, of a `config.json`, or of a folder that holds one. Raises UserError."""
    path = Path(name_or_path)
    if path.is_dir():
        path = path / "config.json"
    if not path.exists() and path.suffix != ".json":
        for folder in PRESET_FOLDERS:
            if (folder / f"{str(name_or_path).lower()}.json").exists():
                return load_model(folder / f"{str(name_or_path).lower()}.json")
        names, plain = preset_names(), plain_name(path.name.lower()[:LONGEST_NAME])
        if plain in names and HUB_NAME.fullmatch(str(name_or_path)) and not path.parent.exists():
            return load_model(plain)
        near = get_close_matches(plain, names, n=1)
        meant = f"did you mean {near[0]}?" if near else f"give one such as {' or '.join(EXAMPLES)};"
        raise UserError(
            f"model {shortened(str(name_or_path))}: neither a preset nor a config.json; {meant} "
            "all presets: galvatron fit --list"
        )
    name = path.parent.name if path.name == "config.json" else path.stem
    return shape_from_config(read_json(path, LARGEST_OPTIONS), name, source=str(path))


def plain_name(name: str) -> str:
    """The preset of the same layers as a model of a hub: `meta-llama-3-8b-instruct` is `llama3-8b`.

    Qwen2's sizes are those of Qwen2.5.
    """
    name = re.sub(r"-(instruct|base|chat|hf)(?=-|$)", "", name.removeprefix("meta-"))
    name = re.sub(r"^(llama|qwen)-(\d(?:\.\d)?)-", r"\1\2-", name)
    name = re.sub(r"^(mixtral-.*)-v\d\.\d$", r"\1", name)
    return re.sub(r"^qwen2-(?!57b)", "qwen2.5-", name)


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

    def flag(field: str) -> bool:
        value = config.get(field, False)
        if not isinstance(value, bool):
            raise UserError(f"{source}: {field} is {shortened(repr(value))}; give true or false")
        return value

    dropout = config.get("attention_dropout", 0.0)
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
        raise UserError(f"{source}: attention_dropout is {shortened(repr(dropout))}; give a number from 0 to below 1")
    name_of_family = config.get("model_type")
    if not isinstance(name_of_family, str) or name_of_family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UserError(f"{source}: model_type is {shortened(repr(name_of_family))}; supported: {known}")
    family = FAMILIES[name_of_family]
    if config.get(family.window):
        raise UserError(
            f"{source}: {family.window} asks for attention to a window alone; give a model with full attention"
        )
    heads = number("num_attention_heads")
    shape = ModelShape(
        name=name,
        family=family.name,
        layers=number("num_hidden_layers", most=MOST_LAYERS),
        hidden_size=number("hidden_size"),
        intermediate_size=number("intermediate_size"),
        heads=heads,
        kv_heads=number("num_key_value_heads", heads),
        vocab_size=number("vocab_size"),
        max_position_embeddings=number("max_position_embeddings", 2048),
        tied_embeddings=flag("tie_word_embeddings"),
        rms_norm_eps=number("rms_norm_eps", 1e-6, float, 1),
        rope_theta=number("rope_theta", 10000.0, float, 1e15),
        initializer_range=number("initializer_range", 0.02, float, 1e3),
        attention_dropout=dropout,
        own_head_dim=None if config.get("head_dim") is None else number("head_dim"),
        **{field: flag(field) for field in family.biases},
        rope_scaling=_rope_scaling(config, family, source),
        **_experts(config, family, source, number, flag),
    )
    if shape.own_head_dim is None and shape.hidden_size % shape.heads:
        raise UserError(
            f"{source}: hidden_size {shape.hidden_size} does not split into {shape.heads} heads; correct one of them"
        )
    if shape.own_head_dim and shape.own_head_dim % 2:
        raise UserError(
            f"{source}: head_dim {shape.own_head_dim} is odd, but rotary positions turn pairs of numbers; give an "
            "even one"
        )
    if shape.heads % shape.kv_heads:
        raise UserError(
            f"{source}: num_attention_heads {shape.heads} is no multiple of {shape.kv_heads} kv heads; correct one "
            "of them"
        )
    # A head_dim that says no more than the other numbers is no own one.
    return replace(shape, own_head_dim=None) if shape.q_width == shape.hidden_size else shape


def _experts(
    config: dict[str, Any], family: Family, source: str, number: Callable[..., Any], flag: Callable[[str], bool]
) -> dict[str, Any]:
    """The fields of a shape that tell its experts. Raises UserError for what neither plans nor training have."""
    mixture = family.mixture
    if mixture is None:
        return {}
    # transformers 5 calls Qwen3's experts local ones, too.
    counts = {name: number(name) for name in ("num_experts", "num_local_experts") if config.get(name) is not None}
    if len(set(counts.values())) > 1:
        raise UserError(f"{source}: num_experts and num_local_experts are two names of one number but differ; keep one")
    experts = next(iter(counts.values())) if counts else number(mixture.count)
    if (chosen := number("num_experts_per_tok")) > experts:
        raise UserError(
            f"{source}: num_experts_per_tok {chosen} is more than the {experts} experts; correct one of them"
        )
    for name, plain, what in (
        ("decoder_sparse_step", 1, "dense layers among those with experts"),
        ("mlp_only_layers", [], "dense layers among those with experts"),
        ("router_jitter_noise", 0, "noise on what the router reads"),
        ("qkv_bias", family.qkv_bias, f"other biases than {family.title} has"),
    ):
        if config.get(name) not in (None, plain):
            raise UserError(f"{source}: {name} {shortened(repr(config[name]))}: {what} are not supported; give {plain}")
    balances = flag("output_router_logits") and config.get(COEFFICIENT) != 0  # as in transformers
    return {
        "experts": experts,
        "experts_per_token": chosen,
        "expert_size": number(mixture.size),
        "shared_size": number("shared_expert_intermediate_size") if mixture.shared else 0,
        "norm_topk": flag("norm_topk_prob") if mixture.normed is None else mixture.normed,
        COEFFICIENT: number(COEFFICIENT, 0.001, float, 1e3) if balances else 0.0,
    }


def _rope_scaling(config: dict[str, Any], family: Family, source: str) -> tuple[tuple[str, int | float | str], ...]:
    """How rotary positions are scaled, as the family supports it. Raises UserError."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
    if kind == "default":
        return ()
    needed = family.rope_types.get(kind) if isinstance(kind, str) else None
    if needed is None:
        supported = " and ".join(["plain rotary embeddings", *family.rope_types])
        raise UserError(f"{source}: rope_scaling is {shortened(str(rope))}; {supported} alone are supported")
    values: dict[str, Any] = {name: rope.get(name) for name in needed}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MOST_SIZE:
            wrong = "is missing" if value is None else f"is {shortened(repr(value))}"
            raise UserError(f"{source}: rope_scaling: {name} {wrong}; give a positive number")
    return (("rope_type", str(kind)), *values.items())


def config_of(shape: ModelShape) -> dict[str, Any]:
    """The fields of config.json that make this shape."""
    return {
        "model_type": shape.family,
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        **({"head_dim": shape.own_head_dim} if shape.own_head_dim else {}),
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "tie_word_embeddings": shape.tied_embeddings,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        **({"rope_scaling": dict(shape.rope_scaling)} if shape.rope_scaling else {}),
        "initializer_range": shape.initializer_range,
        "attention_dropout": shape.attention_dropout,
        **{field: True for field in ("attention_bias", "mlp_bias") if getattr(shape, field)},
        **_of_experts(shape),
    }


def _of_experts(shape: ModelShape) -> dict[str, Any]:
    """The fields of config.json that tell a shape's experts."""
    if not shape.experts:
        return {}
    mixture, coefficient = shape.traits.mixture, shape.router_aux_loss_coef
    if mixture is None:
        return {}
    return {
        mixture.count: shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        mixture.size: shape.expert_size,
        **({"norm_topk_prob": shape.norm_topk} if mixture.normed is None else {}),
        **({"shared_expert_intermediate_size": shape.shared_size} if mixture.shared else {}),
        **({COEFFICIENT: coefficient, "output_router_logits": True} if coefficient else {}),
    }
