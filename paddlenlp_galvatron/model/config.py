"""A model's shape from a Hugging Face or PaddleNLP `config.json`, and the way back."""

from __future__ import annotations

import re
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..base.errors import UserError
from ..base.limits import MOST_LAYERS
from ..base.reading import LARGEST_OPTIONS, read_json
from ..base.text import shortened
from .families import FAMILIES
from .fields import Fields, as_json
from .shape import ModelShape
from .unsupported import require_supported

LONGEST_NAME = 100  # longest name that is compared with those of presets
EXAMPLES = ("qwen2.5-7b", "llama3-8b")
HUB_NAME = re.compile(r"[\w-]+/[\w.-]+")  # of Hugging Face's hub and PaddleNLP
COEFFICIENT, ORIGINAL_LENGTH = "router_aux_loss_coef", "original_max_position_embeddings"
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
    """Shape from the fields of a Hugging Face or PaddleNLP config, as transformers 5 reads them: fields that are left
    out have the family's values. Raises UserError: also for a size that is left out, for a number that is said twice
    and differs, and for what the layers here do not compute."""
    if not isinstance(config, dict):
        raise UserError(f"{source}: a model config holds one JSON object; this one does not")
    name_of_family = config.get("model_type")
    if not isinstance(name_of_family, str) or name_of_family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UserError(f"{source}: model_type is {shortened(repr(name_of_family))}; supported: {known}")
    family = FAMILIES[name_of_family]
    fields = Fields(config, family, source)
    heads, layers = fields.number("num_attention_heads"), fields.number("num_hidden_layers", most=MOST_LAYERS)
    require_supported(config, family, layers, source)
    dropout = 0.0 if config.get("attention_dropout") is None else config["attention_dropout"]
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
        raise fields.error("attention_dropout", "a number from 0 to below 1")
    theta, scaling = _rope(fields)
    of_family: dict[str, Any] = {field: fields.flag(field) for field in family.biases} | _experts(fields, layers)
    shape = ModelShape(
        name=name,
        family=family.name,
        layers=layers,
        hidden_size=fields.number("hidden_size"),
        intermediate_size=fields.number("intermediate_size"),
        heads=heads,
        kv_heads=heads if fields.get("num_key_value_heads") is None else fields.number("num_key_value_heads"),
        vocab_size=fields.number("vocab_size"),
        max_position_embeddings=fields.number("max_position_embeddings"),
        tied_embeddings=fields.flag("tie_word_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps", float, 1),
        rope_theta=theta,
        initializer_range=fields.number("initializer_range", float, 1e3),
        attention_dropout=dropout,
        own_head_dim=_head_dim(fields),
        rope_scaling=scaling,
        **of_family,
    )
    if shape.own_head_dim is None and shape.hidden_size % shape.heads:
        raise UserError(
            f"{source}: hidden_size {shape.hidden_size} does not split into {shape.heads} heads; correct one of them"
        )
    if shape.head_dim % 2:
        raise UserError(
            f"{source}: head_dim {shape.head_dim} is odd, but rotary positions turn pairs of numbers; give an even one"
        )
    if shape.heads % shape.kv_heads:
        usual = "" if "num_key_value_heads" in config else f", {family.name}'s number if num_key_value_heads is missing"
        raise UserError(
            f"{source}: num_attention_heads {shape.heads} is no multiple of {shape.kv_heads} kv heads{usual}; correct "
            "one of them"
        )
    # A head_dim that says no more than the other numbers is no own one.
    return replace(shape, own_head_dim=None) if shape.q_width == shape.hidden_size else shape


def _head_dim(fields: Fields) -> int | None:
    """None: hidden_size over heads. Raises UserError for null where the family has another number."""
    if fields.get("head_dim") is None and "head_dim" not in fields.family.defaults:
        return None
    head_dim: int = fields.number("head_dim")
    return head_dim


def _experts(fields: Fields, layers: int) -> dict[str, Any]:
    """The fields of a shape that tell its experts. Raises UserError."""
    mixture = fields.family.mixture
    if mixture is None:
        return {}
    names = [name for name in mixture.counts if fields.get(name) is not None] or mixture.counts[:1]
    experts, *others = (fields.number(name) for name in names)
    if others not in ([], [experts]):
        raise UserError(f"{fields.source}: {' and '.join(names)} are two names of one number but differ; keep one")
    if (chosen := fields.number("num_experts_per_tok")) > experts:
        raise UserError(
            f"{fields.source}: num_experts_per_tok {chosen} is more than the {experts} experts; correct one of them"
        )
    balances = fields.flag("output_router_logits") and fields.get(COEFFICIENT) != 0  # as in transformers
    return {
        "experts": experts,
        "experts_per_token": chosen,
        "expert_size": fields.number(mixture.size),
        "shared_size": fields.number("shared_expert_intermediate_size") if mixture.shared else 0,
        "norm_topk": fields.flag("norm_topk_prob") if mixture.normed is None else mixture.normed,
        COEFFICIENT: fields.number(COEFFICIENT, float, 1e3) if balances else 0.0,
        "dense_layers": _dense_layers(fields, layers) if mixture.steps else (),
    }


def _dense_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    """Layers without experts: every one that mlp_only_layers lists, and all but each decoder_sparse_step-th. As in
    transformers numbers beyond the layers mean nothing. Raises UserError."""
    listed = fields.config.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(type(one) is int and one >= 0 for one in listed):
        raise fields.error("mlp_only_layers", "a list of numbers of layers, the first of which is 0")
    step = 1 if fields.config.get("decoder_sparse_step") is None else fields.number("decoder_sparse_step")
    dense = tuple(index for index in range(layers) if index in listed or (index + 1) % step)
    if len(dense) == layers:
        raise UserError(
            f"{fields.source}: mlp_only_layers and decoder_sparse_step leave none of the {layers} layers with "
            "experts; correct them, or give a model without experts"
        )
    return dense


def _rope(fields: Fields) -> tuple[float, tuple[tuple[str, int | float | str], ...]]:
    """Base of rotary positions, and how the family scales them. transformers 5 has both in rope_parameters, 4 in
    rope_scaling and beside it. Raises UserError: two places differ, or the family has no such positions."""
    config, family, source = fields.config, fields.family, fields.source
    said = [(name, config[name]) for name in ("rope_scaling", "rope_parameters") if config.get(name)]
    where, rope = said[0] if said else ("", {})
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else None
    needed = {"default": (), **family.rope_types}.get(kind) if isinstance(kind, str) else None
    if needed is None:
        supported = " and ".join(["plain rotary embeddings", *family.rope_types])
        raise UserError(f"{source}: {where} is {as_json(rope)}; {supported} alone are supported")
    if said[1:] and said[1][1] != rope:
        raise UserError(f"{source}: rope_scaling and rope_parameters are two names of one thing but differ; keep one")
    for name, value in rope.items():
        plain = kind if name in ("rope_type", "type") else 1
        if name not in ("rope_theta", *needed) and value not in (None, plain):
            raise UserError(
                f"{source}: {where}: {name} {as_json(value)} does not go with rope_type {kind}; correct one"
            )
    for name in ("rope_theta", ORIGINAL_LENGTH):
        if name in rope and config.get(name) not in (None, rope[name]):
            top, inner = as_json(config[name]), as_json(rope[name])
            raise UserError(f"{source}: {name} is {top}, but {inner} in {where}; keep one")
    length = fields.get(ORIGINAL_LENGTH) or fields.get("max_position_embeddings")
    inside = Fields({ORIGINAL_LENGTH: length, **rope}, family, f"{source}: {where}")
    theta: float = (inside if "rope_theta" in rope else fields).number("rope_theta", float, 1e15)
    for name in needed:
        inside.number(name, float)
    return theta, (("rope_type", kind), *((name, inside.config[name]) for name in needed)) if needed else ()


def config_of(shape: ModelShape) -> dict[str, Any]:
    """The fields of config.json that make this shape."""
    return {
        "model_type": shape.family,
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
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
        mixture.counts[0]: shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        mixture.size: shape.expert_size,
        **({"norm_topk_prob": shape.norm_topk} if mixture.normed is None else {}),
        **({"shared_expert_intermediate_size": shape.shared_size} if mixture.shared else {}),
        **({COEFFICIENT: coefficient, "output_router_logits": True} if coefficient else {}),
        **({"mlp_only_layers": list(shape.dense_layers)} if shape.dense_layers else {}),
    }
