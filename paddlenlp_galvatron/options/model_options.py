"""The model by Galvatron's options: a preset or config.json, explicit sizes, several layer types."""

from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from ..base.errors import UserError
from ..base.limits import MOST_LAYERS, CountOrNone, Layers, Size
from ..model import ModelShape, config_of, load_model, shape_from_config
from ..model.config import EXAMPLES
from ..plan.strategy import Plan
from .aliases import SHAPE_FIELDS
from .group import Options, Sizes

SEQ = 4096  # sequence length by default, for all commands, or all positions of a model that has fewer
LISTS = ("hidden_size_list", "layernum_list", "seqlen_list")  # an entry a layer type
NUMBERS = ("hidden_size", "num_layers", "num_attention_heads", "intermediate_size", "vocab_size")


@dataclass(frozen=True, slots=True)
class Model:
    """The model that the options describe."""

    shapes: tuple[ModelShape, ...]  # one a layer type, in the order of the layers
    seq_length: int  # sequence length
    ignored: tuple[str, ...] = ()  # options that a set_*_manually 0 disables

    @property
    def name(self) -> str:
        return self.shapes[0].name


class ModelOptions(Options):
    """The model. A `set_*_manually` of 1 requires the sizes given as options, 0 ignores them; unset uses those that are
    given."""

    panel = "Model"

    model_size: str | None = None
    set_model_config_manually: bool | None = None
    set_layernum_manually: bool | None = None
    set_seqlen_manually: bool | None = None
    model_type: str | None = None
    hidden_size: Size | None = None
    num_layers: Layers | None = None
    num_nextn_predict_layers: CountOrNone | None = None
    num_attention_heads: Size | None = None
    num_key_value_heads: Size | None = None
    intermediate_size: Size | None = None
    vocab_size: Size | None = None
    max_position_embeddings: Size | None = None
    tie_word_embeddings: bool | None = None
    make_vocab_size_divisible_by: Size | None = None
    seq_length: Size | None = None
    num_layertype: Layers | None = None
    hidden_size_list: Sizes | None = None
    layernum_list: Sizes | None = None
    seqlen_list: Sizes | None = None

    def resolve_usual(self, seq_length: int) -> Model:
        """The model; by default, with this sequence length, or all its positions where they are fewer."""
        model = self.resolve(seq_length)
        return self.resolve(min(seq_length, model.shapes[0].max_position_embeddings))

    def resolve(self, default_seq_length: int | None = None) -> Model:
        """The model; `default_seq_length` holds by default. Raises UserError: no such preset, a number
        is missing or contradicts another."""
        fields = {name: value for name in SHAPE_FIELDS if (value := self._effective(name)) is not None}
        listed = self._sizes_of_lists.get("num_layers")
        if listed and fields.get("num_layers", listed) != listed:
            raise UserError(f"layernum_list: {listed} layers, but num_layers is {self.num_layers}; make them agree")
        shape = self._shape(fields)
        lists = {name: value for name in LISTS if (value := getattr(self, name)) is not None}
        types = self.num_layertype or max(map(len, lists.values()), default=1)
        for name, entries in lists.items():
            if len(entries) != types:
                raise UserError(f"{name}: has {len(entries)} entries for {types} types of layers; give one a type")
        shapes = self._several(shape, types) if types > 1 else (self._one(shape),)
        if (multiple := self.make_vocab_size_divisible_by) and shape.vocab_size % multiple:
            raise UserError(
                f"make_vocab_size_divisible_by: {multiple} does not divide the vocabulary of {shape.vocab_size}, "
                "which is padded to a multiple of its degree alone; leave it out, or give vocab_size"
            )
        if (layers := sum(kind.layers for kind in shapes)) > MOST_LAYERS:
            raise UserError(f"num_layers: {layers} are more than {MOST_LAYERS}; is it a slip of the pen?")
        seq_length = self._seq_length(shapes[0], default_seq_length)
        if self.set_seqlen_manually:
            shapes = tuple(_long_enough(kind, max(seq_length, *(self.seqlen_list or (0,)))) for kind in shapes)
        lengths = (None if length == seq_length else length for length in self.seqlen_list or [seq_length] * types)
        return Model(
            tuple(replace(kind, seq_length=length) for kind, length in zip(shapes, lengths, strict=True)),
            seq_length,
            self.ignored,
        )

    @property
    def ignored(self) -> tuple[str, ...]:
        """Options that a set_*_manually 0 disables."""
        return tuple(name for name in (*SHAPE_FIELDS, "seq_length") if getattr(self, name) != self._effective(name))

    def _effective(self, name: str) -> Any:
        """The value of an option that is not ignored, or None. set_model_config_manually covers every number."""
        switches = {"num_layers": self.set_layernum_manually, "seq_length": self.set_seqlen_manually}
        holds = switches.get(name, self.set_model_config_manually) is not False or self.set_model_config_manually
        return getattr(self, name) if holds else None

    @property
    def _sizes_of_lists(self) -> dict[str, int]:
        """Sizes from the lists where no option gives them: the hidden size of type 0, the layers of all types."""
        width, layers = (self.hidden_size_list or (0,))[0], sum(self.layernum_list or ())
        return {name: size for name, size in (("hidden_size", width), ("num_layers", layers)) if size}

    def _shape(self, fields: dict[str, Any]) -> ModelShape:
        """The model as if all its layers were identical."""
        if self.set_model_config_manually and not (fields or self.hidden_size_list):
            raise UserError("set_model_config_manually: is 1, but no number is given; give --hidden_size and others")
        if self.set_layernum_manually and not (self.num_layers or self.layernum_list):
            raise UserError("set_layernum_manually: is 1, but num_layers is missing; give --num_layers")
        if self.model_size is None:
            fields = self._sizes_of_lists | fields
            if missing := [name for name in NUMBERS if name not in fields]:
                raise UserError(
                    f"model_size: missing; name a preset such as {' or '.join(EXAMPLES)} (all: galvatron fit --list), "
                    f"a config.json, or give {', '.join(missing)}"
                )
            positions = max(2048, self.seq_length or 0, *(self.seqlen_list or ()))
            config = {"model_type": "llama", "num_key_value_heads": None, "max_position_embeddings": positions}
            return _named(shape_from_config(config | _config(fields), "", source="the model's options"))
        base = load_model(self.model_size)
        config = config_of(base) | _config(fields)
        if base.kv_heads == base.heads and "num_key_value_heads" not in fields:
            config["num_key_value_heads"] = None
        if base.own_head_dim is None and "head_dim" not in base.traits.defaults:
            config.pop("head_dim", None)
        shape = shape_from_config(config, base.name, source="the model's options")
        if fields.get("num_nextn_predict_layers", shape.mtp_layers) != shape.mtp_layers:
            raise UserError(f"num_nextn_predict_layers: MTP of {base.name} is not planned; leave it out")
        if base.having(shape.main_layers, shape.mtp_layers) == shape:
            name = base.name + f"_layer{shape.main_layers}" * (shape.main_layers != base.main_layers)
            return replace(shape, name=name + f"_mtp{shape.mtp_layers}" * (shape.mtp_layers != base.mtp_layers))
        return _named(shape)

    def _one(self, shape: ModelShape) -> ModelShape:
        """All layers of one type: the lists only repeat the model's sizes or give its layers."""
        (width,), (layers,) = self.hidden_size_list or (shape.hidden_size,), self.layernum_list or (shape.main_layers,)
        if width != shape.hidden_size:
            raise UserError(
                f"hidden_size_list: {width}, but {shape.name} has hidden size {shape.hidden_size}; make them "
                f"agree: name another model_size, or give {', '.join(NUMBERS)}"
            )
        if layers == shape.main_layers:
            return shape
        return replace(shape.having(layers, shape.mtp_layers), name=f"{shape.name}_layer{layers}")

    def _several(self, shape: ModelShape, types: int) -> tuple[ModelShape, ...]:
        """One shape per type, `shape` scaled by the ratio of the hidden sizes."""
        if self.layernum_list is None:
            raise UserError(f"layernum_list: missing; say how many layers each of the {types} types has")
        widths = self.hidden_size_list or (shape.hidden_size,) * types
        name = "_".join([shape.name, "layer" + "-".join(map(str, self.layernum_list))])
        result = []
        for width, layers in zip(widths, self.layernum_list, strict=True):
            sizes = {key: getattr(shape, key) * width for key in ("heads", "kv_heads", "intermediate_size")}
            for key, size in sizes.items():
                if size % shape.hidden_size:
                    raise UserError(
                        f"hidden_size_list: {width} is {width / shape.hidden_size:g} times the hidden size of "
                        f"{shape.name}, but its {getattr(shape, key)} {key} cannot be multiplied by that; "
                        f"choose a multiple of {shape.hidden_size // gcd(shape.kv_heads, shape.intermediate_size)}"
                    )
            scaled = {key: size // shape.hidden_size for key, size in sizes.items()}
            result.append(replace(shape, name=name, layers=layers, hidden_size=width, **scaled))
        return tuple(result)

    def _seq_length(self, shape: ModelShape, default: int | None) -> int:
        if self.set_seqlen_manually and not (self.seq_length or self.seqlen_list):
            raise UserError("set_seqlen_manually: is 1, but seq_length is missing; give --seq_length")
        held = self._effective("seq_length")
        length = self.seqlen_list[0] if self.seqlen_list else held
        if held and length != held:
            raise UserError(f"seqlen_list: starts with {length}, but seq_length is {held}; make them agree")
        if length:
            return int(length)
        if self.set_seqlen_manually is False:
            return shape.max_position_embeddings
        if default is not None:
            return default
        raise UserError(
            "seq_length: missing; say how many tokens a sample has, or give --set_seqlen_manually 0 for the "
            f"{shape.max_position_embeddings} that {shape.name} has positions for"
        )


def model_of_plan(plan: Plan, model_size: str | None = None) -> Model:
    """The model that a plan's file names, or that the user names, with the file's number of MTP layers. Raises
    UserError, also where nobody names one."""
    searched, seq_length = plan.metadata.get("searched_from") or {}, plan.assumed.seq_length
    asked = searched.get("model_options") or {}
    if not isinstance(asked, dict):
        raise UserError("galvatron.searched_from.model_options: is no object; leave it out")
    if model_size or not asked:
        if not (named := model_size or searched.get("model")):
            raise UserError("model_size: missing, and the plan's file names no model; give --model_size")
        mtp = {name: value for name, value in asked.items() if name == "num_nextn_predict_layers" and value}
        asked = mtp | {"model_size": str(named), "seq_length": seq_length}
    options = ModelOptions.from_mapping(asked)
    return options.resolve(seq_length) if seq_length else options.resolve_usual(SEQ)


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    """Options as fields of config.json."""
    return {SHAPE_FIELDS[name]: value for name, value in fields.items()}


def _long_enough(shape: ModelShape, seq_length: int) -> ModelShape:
    """The shape with positions for samples of this length."""
    if seq_length <= shape.max_position_embeddings:
        return shape
    return replace(shape, name=f"{shape.name}_seq{seq_length}", max_position_embeddings=seq_length)


def _named(shape: ModelShape) -> ModelShape:
    """A shape from explicit sizes, named by them."""
    return replace(shape, name=f"hidden{shape.hidden_size}_head{shape.heads}_layer{shape.main_layers}")
