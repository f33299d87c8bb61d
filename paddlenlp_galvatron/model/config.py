"""A model's shape from a Hugging Face or PaddleNLP `config.json`."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path
from typing import Any

from ..base import LARGEST_OPTIONS, UserError, read_json, shortened
from ..base.limits import MOST_LAYERS
from .attention import DeltaNet, Latents
from .families import FAMILIES, Local, Mixture
from .fields import Fields, as_json
from .shape import ModelShape
from .to_config import COEFFICIENT, FULL, config_of
from .unsupported import MTP_COUNTS, faults_of, has_meaning, require_supported

DIFFERENCES = 4  # differences from the nearest family that an error lists
LONGEST_NAME = 100  # longest name that is compared with those of presets
EXAMPLES = ("qwen2.5-7b", "llama3-8b")
HUB_NAME = re.compile(r"[\w-]+/[\w.-]+")  # names of Hugging Face's hub and PaddleNLP
ORIGINAL_LENGTH = "original_max_position_embeddings"
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
    """Shape from the fields of a Hugging Face or PaddleNLP config, read like transformers 5: absent fields have the
    family's values. Raises UserError also for an absent size, for two names of a number that differ, and for settings
    that our layers do not compute."""
    if not isinstance(config, dict):
        raise UserError(f"{source}: a model config holds one JSON object; this one does not")
    name_of_family = config.get("model_type")
    if not isinstance(name_of_family, str) or name_of_family not in FAMILIES:
        lines = f"model_type is {shortened(repr(name_of_family))}; supported: {', '.join(FAMILIES)}", *_nearest(config)
        raise UserError(f"{source}: {line}" for line in lines)
    family = FAMILIES[name_of_family]
    fields = Fields(config, family, source)
    heads, layers = fields.number("num_attention_heads"), fields.number("num_hidden_layers", most=MOST_LAYERS)
    require_supported(config, family, layers, source)
    counts = {int(config[name]) for name in MTP_COUNTS if config.get(name) is not None} or {0}
    if len(counts) > 1:
        raise UserError(f"{source}: {' and '.join(MTP_COUNTS)} are two names of one number but differ; keep one")
    [mtp_layers] = counts if family.mixture and family.mixture.sigmoid else [0]  # ERNIE's MTP is ignored
    if family.rotary_share != 1 and config.get("partial_rotary_factor", family.rotary_share) is None:
        raise fields.error("partial_rotary_factor", str(family.rotary_share))
    dropout = 0.0 if config.get("attention_dropout") is None else config["attention_dropout"]
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
        raise fields.error("attention_dropout", "a number from 0 to below 1")
    theta, scaling = _rope(fields)
    of_family: dict[str, Any] = {name: fields.flag(field) for name, field in family.switches.items()}
    of_family |= _experts(fields, layers)
    if family.local:
        of_family |= _local_layers(fields, layers, family.local)
    shape = ModelShape(
        name=name,
        family=family.name,
        layers=layers + mtp_layers,
        mtp_layers=mtp_layers,
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
        own_head_dim=None if family.latent else _head_dim(fields),
        rope_scaling=scaling,
        latents=_latents(fields) if family.latent else None,
        **of_family,
    )
    _require_heads(shape, config, source)
    # A head_dim equal to hidden_size / heads is redundant.
    return replace(shape, own_head_dim=None) if shape.q_width == shape.hidden_size else shape


def _require_heads(shape: ModelShape, config: dict[str, Any], source: str) -> None:
    """Raises UserError if sizes of heads contradict each other."""
    if shape.latents and shape.kv_heads != shape.heads:
        raise UserError(
            f"{source}: num_key_value_heads is {shape.kv_heads}, but latent attention has as many as "
            f"num_attention_heads, {shape.heads}; correct one of them"
        )
    if not shape.latents and shape.own_head_dim is None and shape.hidden_size % shape.heads:
        raise UserError(
            f"{source}: hidden_size {shape.hidden_size} does not split into {shape.heads} heads; correct one of them"
        )
    if shape.rotary_dim % 2:
        name = "qk_rope_head_dim" if shape.latents else "head_dim"
        raise UserError(
            f"{source}: {name} {shape.rotary_dim} is odd, but rotary positions turn pairs of numbers; give an even one"
        )
    if shape.heads % shape.kv_heads:
        why = "" if "num_key_value_heads" in config else f", {shape.family}'s number if num_key_value_heads is missing"
        raise UserError(
            f"{source}: num_attention_heads {shape.heads} is no multiple of {shape.kv_heads} kv heads{why}; correct "
            "one of them"
        )


def _nearest(config: dict[str, Any]) -> Iterator[str]:
    """The known family that an unknown model's config contradicts in the fewest fields, and these fields; None for a
    config without layers."""
    text = config.get("text_config")
    config = config | (text if isinstance(text, dict) else {})
    # Families other than Qwen use windows whenever their size is set.
    config = {"use_sliding_window": config.get("sliding_window") is not None, "max_window_layers": 0} | config
    layers, name = config.get("num_hidden_layers"), str(config.get("model_type"))
    if type(layers) is not int or not 0 < layers <= MOST_LAYERS:
        return
    ranked, mixed = [], any("expert" in field for field in config)
    for family in (each for each in FAMILIES.values() if bool(each.mixture) == mixed):
        refused = faults_of(config, family, layers)
        rest = {field: value for field, value in config.items() if field not in refused}
        faults = list(refused.values())
        try:
            shape_from_config(rest | {"model_type": family.name}, "").trained()
        except UserError as error:
            faults += [fault.removeprefix("config: ").removeprefix("model : ") for fault in error.faults]
        mixture = family.mixture
        missing = len({mixture.size, mixture.shared_count or mixture.size} - config.keys()) if mixture else 0
        likeness = SequenceMatcher(None, family.name, name).ratio()
        ranked.append((len(faults) + missing + bool(family.untrained), -likeness, family.name, faults))
    *_, near, faults = min(ranked)
    ours = {field for preset in preset_names() for field in config_of(load_model(preset))}
    if unread := ", ".join(sorted(field for field in config.keys() - ours if has_meaning(field, FAMILIES[near]))):
        faults.append(f"{shortened(unread)}: no family here reads this")
    yield f"the nearest is {near}" + (", but:" if faults else "; if its layers are the same, write this as model_type")
    yield from faults[:DIFFERENCES]


def _latents(fields: Fields) -> Latents:
    """The sizes of latent attention. Raises UserError."""
    without = {"q_lora_rank": 0} if fields.get("q_lora_rank") is None else {}  # queries come from the hidden state
    sizes = Latents(
        **{each.name: fields.number(each.name) for each in dataclass_fields(Latents) if each.name not in without},
        **without,
    )
    if fields.config.get("head_dim") not in (None, sizes.qk_rope_head_dim):
        raise fields.error("head_dim", f"qk_rope_head_dim, {sizes.qk_rope_head_dim}, or leave it out")
    return sizes


def _head_dim(fields: Fields) -> int | None:
    """Width of a head; None: hidden_size / heads. Raises UserError for null if the family has another default."""
    if fields.get("head_dim") is None and "head_dim" not in fields.family.defaults.keys() - {*fields.family.null_off}:
        return None
    return int(fields.number("head_dim"))


def _experts(fields: Fields, layers: int) -> dict[str, Any]:
    """The fields of a shape that describe its experts. Raises UserError."""
    mixture = fields.family.mixture
    if mixture is None:
        return {}
    experts, chosen = _number_of(fields, mixture.counts), _number_of(fields, mixture.chosen)
    if chosen > experts:
        raise UserError(
            f"{fields.source}: {mixture.chosen[0]} {chosen} is more than the {experts} experts; correct one of them"
        )
    loss = not mixture.interval and fields.flag("output_router_logits")  # ERNIE's is refused
    balances = loss and fields.get(COEFFICIENT) != 0  # transformers' rule
    size, shared = fields.number(mixture.size), 0
    if mixture.shared_count:
        shared = size * fields.number(mixture.shared_count, least=0)
    elif mixture.shared:
        shared = fields.number("shared_expert_intermediate_size")
    return {
        "experts": experts,
        "experts_per_token": chosen,
        "expert_size": size,
        "shared_size": shared,
        "norm_topk": fields.flag("norm_topk_prob") if mixture.normed is None else mixture.normed,
        COEFFICIENT: fields.number(COEFFICIENT, float, 1e3) if balances else 0.0,
        "dense_layers": _dense_layers(fields, layers, mixture),
        **(_groups(fields, mixture, experts, chosen) if mixture.grouped else {}),
    }


def _number_of(fields: Fields, names: Sequence[str]) -> int:
    """A number that has several names. Raises UserError."""
    stated = [name for name in names if fields.get(name) is not None] or names[:1]
    number, *others = (fields.number(name) for name in stated)
    if others not in ([], [number]):
        raise UserError(f"{fields.source}: {' and '.join(stated)} are two names of one number but differ; keep one")
    return int(number)


def _groups(fields: Fields, mixture: Mixture, experts: int, chosen: int) -> dict[str, Any]:
    """How a token's experts are chosen, and their scores scaled. Raises UserError."""
    scaling = {"routed_scaling_factor": fields.number("routed_scaling_factor", float, 1e6)}
    *_, within = mixture.methods
    method = fields.config.get("topk_method") or mixture.methods[0]
    if method not in mixture.methods:
        raise fields.error("topk_method", " or ".join(mixture.methods))
    if method != within:
        return scaling
    groups, kept = (1 if fields.get(name) is None else fields.number(name) for name in ("n_group", "topk_group"))
    if experts % groups or kept > groups or kept * (experts // groups) < chosen:
        raise UserError(
            f"{fields.source}: n_group {groups}, topk_group {kept}: {experts} experts do not split into such groups, "
            f"or these have fewer than the {chosen} of a token; correct one of them"
        )
    return {"expert_groups": groups, "groups_per_token": kept, **scaling}


def _dense_layers(fields: Fields, layers: int, mixture: Mixture) -> tuple[int, ...]:
    """Layers without experts. As in transformers numbers beyond the layers mean nothing. Raises UserError."""
    dense: Sequence[int] = ()
    causes = ""
    if mixture.steps:
        causes, dense = "mlp_only_layers and decoder_sparse_step leave", _between_steps(fields, layers)
    elif mixture.interval:
        causes, dense = "moe_layer_start_index, _end_index and _interval leave", _between_intervals(fields, layers)
    elif mixture.grouped:
        causes, dense = "first_k_dense_replace leaves", range(fields.number("first_k_dense_replace", least=0))
    if len(dense) >= layers:
        raise UserError(
            f"{fields.source}: {causes} none of {layers} layers with experts; correct it, or give a dense model"
        )
    return tuple(dense)


def _between_steps(fields: Fields, layers: int) -> list[int]:
    """The layers in mlp_only_layers, and all but every decoder_sparse_step-th. Raises UserError."""
    listed = fields.config.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(type(layer) is int and layer >= 0 for layer in listed):
        raise fields.error("mlp_only_layers", "a list of numbers of layers, the first of which is 0")
    step = 1 if fields.config.get("decoder_sparse_step") is None else fields.number("decoder_sparse_step")
    return [index for index in range(layers) if index in listed or (index + 1) % step]


def _between_intervals(fields: Fields, layers: int) -> list[int]:
    """All layers but every moe_layer_interval-th from moe_layer_start_index to moe_layer_end_index (-1: the last
    layer). Raises UserError."""
    first, step = fields.number("moe_layer_start_index", least=0), fields.number("moe_layer_interval")
    last = layers - 1 if fields.get("moe_layer_end_index") == -1 else fields.number("moe_layer_end_index", least=0)
    return [index for index in range(layers) if not first <= index <= last or (index + 1) % step]


def _local_layers(fields: Fields, layers: int, local: Local) -> dict[str, Any]:
    """The layers with attention to all tokens, and how the others attend. Raises UserError."""
    config, windows = fields.config, local.kind != "linear_attention"
    on = not local.switch or (config.get(local.switch) is not None and fields.flag(local.switch))
    on = on and not (windows and fields.get("sliding_window") is None)
    types = config.get("layer_types") if local.listed else None
    if types is None:
        number = fields.number(local.field, least=int(not local.switch)) if on and local.field else 0
        types = [local.kind if on and local.at(layer, number) else FULL for layer in range(layers)]
    if not isinstance(types, list) or len(types) != layers or not all(each in (FULL, local.kind) for each in types):
        raise fields.error("layer_types", f"a list of {layers}, each {FULL} or {local.kind}")
    if local.kind not in types:
        return {}
    if not on:
        raise fields.error("layer_types", f"{FULL} for each, or {local.switch or 'sliding_window'}")
    full = tuple(layer for layer, kind in enumerate(types) if kind == FULL)
    if windows:
        return {"window": fields.number("sliding_window"), "full_layers": full}
    linear = DeltaNet(**{each.name: fields.number(f"linear_{each.name}") for each in dataclass_fields(DeltaNet)})
    if linear.num_value_heads % linear.num_key_heads:
        raise fields.error("linear_num_value_heads", f"a multiple of linear_num_key_heads, {linear.num_key_heads}")
    return {"linear": linear, "full_layers": full}


def _rope(fields: Fields) -> tuple[float, tuple[tuple[str, int | float | str], ...]]:
    """Base of rotary positions, and how the family scales them. transformers 5 has both in rope_parameters, 4 in
    rope_scaling and outside it. Raises UserError if two places differ or the family has no such positions."""
    config, family, source = fields.config, fields.family, fields.source
    settings = [(name, config[name]) for name in ("rope_scaling", "rope_parameters") if config.get(name)]
    where, rope = settings[0] if settings else ("", {})
    if family.local and isinstance(rope, dict) and FULL in rope:  # windowed layers have another base
        settings, rope = [], rope[FULL]
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else None
    needed = {"default": (), **family.rope_types}.get(kind) if isinstance(kind, str) else None
    if needed is None:
        supported = " and ".join(["plain rotary embeddings", *family.rope_types])
        raise UserError(f"{source}: {where} is {as_json(rope)}; {supported} alone are supported")
    if settings[1:] and settings[1][1] != rope:
        raise UserError(f"{source}: rope_scaling and rope_parameters are two names of one thing but differ; keep one")
    for name, value in rope.items():
        plain = {"rope_type": kind, "type": kind, "partial_rotary_factor": family.rotary_share}.get(name, 1)
        plain = False if name == "truncate" and family.name == "gpt_oss" else plain
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
    numbers = [(name, inside.get(name)) for name in needed if inside.number(name, float)]
    return theta, (("rope_type", kind), *numbers) if needed else ()
