"""The fields of strategy files, their types, and how their faults are worded."""

import difflib
import re
from itertools import permutations
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, InstanceOf, PlainSerializer, Strict, ValidationError
from pydantic.json_schema import WithJsonSchema

from ..base import UserError, plain_fault, shortened
from ..base.limits import MOST_LAYERS, Layers, Number, Ranks, Samples, Size
from ..model import Recompute
from ..model.layer import MODULES, PARTLY, PARTS
from .precision import Products
from .schedule import Schedule

LONGEST_LIST = 16 * MOST_LAYERS  # characters
T = TypeVar("T")
File = TypeVar("File", bound=BaseModel)


def _pattern(number: str) -> str:
    """Pattern of a list in a strategy file, which is a string such as "1,2,2,1"."""
    return f"^{number}( *, *{number})*$"


def _split(value: object) -> list[int]:
    if isinstance(value, str) and len(value) > LONGEST_LIST:
        raise ValueError(f"has {len(value):,} characters; a model has at most {MOST_LAYERS} layers")
    if not isinstance(value, str) or not re.fullmatch(_pattern("(0|[1-9][0-9]{0,8})"), value):
        raise ValueError(f'must be a string of numbers separated by commas, such as "1,2,2,1"; it is {shown(value)}')
    return [int(number) for number in value.split(",")]


def _words(value: object) -> list[str]:
    if not isinstance(value, str):
        raise ValueError(f'must be a string of words, such as "none,norms+mlp,full"; it is {shown(value)}')
    if len(value) > 2 * LONGEST_LIST:
        raise ValueError(f"has {len(value):,} characters; a model has at most {MOST_LAYERS} layers")
    return [word.strip() for word in value.split(",")]


def _recompute(word: object) -> Recompute:
    try:
        return Recompute.of(str(word))
    except ValueError as error:
        raise ValueError(f"{error}; it is {shown(word)}") from None


def shown(value: object) -> str:
    return shortened(repr(value), 40)


Flag = Annotated[int, Field(ge=0, le=1)]
ListOf = Annotated[
    list[T], BeforeValidator(_split), PlainSerializer(lambda numbers: ",".join(map(str, numbers)), return_type=str)
]
COUNTS = WithJsonSchema({"type": "string", "pattern": _pattern("[1-9][0-9]{0,8}")})
Degrees = Annotated[ListOf[Ranks], COUNTS]
Division = Annotated[ListOf[Layers], COUNTS]
Percents = Annotated[
    ListOf[Annotated[int, Field(ge=0, le=100)]],
    WithJsonSchema({"type": "string", "pattern": _pattern("(100|[1-9]?[0-9])")}),
]
Flags = Annotated[ListOf[Flag], WithJsonSchema({"type": "string", "pattern": _pattern("[01]")})]
_PARTLY = "|".join("[+]".join(order) for each in (*PARTLY, *MODULES) for order in permutations(each.words.split("+")))
Recomputes = Annotated[
    list[Annotated[InstanceOf[Recompute], BeforeValidator(_recompute)]],
    BeforeValidator(_words),
    PlainSerializer(lambda layers: ",".join(each.words for each in layers), return_type=str),
    WithJsonSchema({"type": "string", "pattern": _pattern(f"(none|full|{_PARTLY})")}),
]


class AssumedFields(BaseModel):
    """Assumptions of the plan's prices. Training applies them; a contradicting flag is an error."""

    model_config = ConfigDict(extra="forbid", strict=True)

    sequence_parallel: bool = Field(False, description="Megatron-SP in every layer with tp > 1")
    mixed_precision: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="type of weights and activations")
    async_grad_reduce: bool = Field(True, description="reduce gradients once, after the last micro-batch")
    seq_length: Size | None = Field(None, description="tokens of one sample")
    fp32_gradients: bool | None = Field(
        None, description="16-bit training sums and reduces gradients in fp32; absent: on GPUs it does"
    )
    flash_attention: bool | None = Field(
        None, description="Paddle's flash attention; absent: for 16-bit training on GPUs"
    )
    fused_rope: bool | None = Field(None, description="Paddle's fused rotary positions; absent: on GPUs")
    fused_rms_norm: bool | None = Field(None, description="Paddle's fused RMSNorm; absent: on GPUs")
    fused_cross_entropy: bool | None = Field(
        None, description="Paddle's fused loss over a vocabulary split by tp; absent: not used"
    )
    offload_optimizer: bool | None = Field(
        None, description="the optimizer's states are in the hosts' memory between updates; absent: on the devices"
    )
    products: Products | None = Field(None, description="of layers' matrix products, planned only; absent: no other")


class OpenObject(BaseModel):
    """An object of which these fields are read; others are kept as they are."""

    model_config = ConfigDict(extra="allow", strict=True)


class StageMemoryFields(OpenObject):
    context_mib: Number = Field(0.0, description="reserve of a device, MiB")
    estimate_mib: Number | None = Field(None, description="most that tensors are expected to hold, MiB")


class StageFields(OpenObject):
    memory_mib: Number = Field(0.0, description="most that a rank holds, with the reserve, MiB")
    memory: StageMemoryFields = Field(default_factory=lambda: StageMemoryFields(), description="its parts")


class PredictedFields(OpenObject):
    """Predictions of the cost model."""

    time_s: Number | None = Field(None, description="a step, s")
    stages: list[StageFields] = Field(default_factory=list, description="one entry a stage")


class SearchedFields(OpenObject):
    """Inputs of the search."""

    model_fingerprint: str | None = Field(None, description="of the model's shape")
    memory_constraint_gb: Number | None = Field(None, description="memory of a device, GiB")


class GalvatronObject(BaseModel):
    """Fields of this project besides Galvatron's; Galvatron ignores them."""

    model_config = ConfigDict(extra="allow", strict=True)

    format_version: Literal[1] = Field(1, description="version of this object")
    assumed: AssumedFields = Field(default_factory=lambda: AssumedFields(), description="assumptions of its prices")
    predicted: PredictedFields | None = Field(None, description="step time, and per stage time and memory")
    searched_from: SearchedFields | None = Field(None, description="fingerprints of model, cluster and profiles")


class StrategyFile(BaseModel):
    """A parallel strategy, layer by layer: Galvatron's strategy file."""

    model_config = ConfigDict(extra="forbid", strict=True, title="Galvatron strategy")

    pp_deg: Ranks = Field(description="number of pipeline stages")
    tp_sizes_enc: Degrees = Field(description="per layer: tensor-parallel (or Ulysses) degree")
    tp_consecutive_flags: Flags = Field(description="per layer: 1 = neighbouring ranks form a tp group, 0 = strided")
    dp_types_enc: Flags = Field(description="per layer: 0 = default_dp_type, 1 = zero3")
    use_sp: Flags = Field(description="per layer: 1 = the degree is Ulysses (sequence), 0 = tensor parallel")
    checkpoint: Flags = Field(description="per layer: 1 = recompute all activations in backward")
    global_bsz: Samples = Field(description="samples per optimizer step, over all ranks")
    chunks: Samples = Field(description="micro-batches per step")
    pp_division: Division = Field(
        description="layers of each stage; with virtual_pp_deg of each chunk: the first of every stage, then the second"
    )
    pipeline_type: Annotated[Schedule, Strict(False), PlainSerializer(str)] = Field(
        description="schedule; pipedream_flush is 1F1B"
    )
    default_dp_type: Literal["ddp", "zero2", "zero3"] = Field(description="meaning of 0 in dp_types_enc")
    vtp: Ranks = Field(description="tensor-parallel (or Ulysses) degree of embedding and LM head")
    vsp: Flag = Field(description="1 = vtp is Ulysses")
    embed_sdp: Flag = Field(description="embedding and LM head: 0 = default_dp_type, 1 = zero3")
    vocab_sdp: Flag | None = Field(None, description="other name of embed_sdp, written too")
    world_size: Ranks | None = Field(None, description="ranks; may be absent")
    virtual_pp_deg: Layers = Field(1, description="chunks of layers a stage has; more than 1: interleaved 1F1B")
    recompute_enc: Recomputes | None = Field(
        None,
        description=f"per layer: none, full, or {', '.join(member.words for member in PARTS)} joined by +, or "
        f"PaddleFleet's {' or '.join(member.words for member in MODULES)}; absent: as checkpoint says",
    )
    offload_enc: Percents | None = Field(
        None,
        description="per layer: percent of the activations kept for backward that are in the host's memory until then; "
        "absent: 0",
    )
    cp_sizes_enc: Degrees | None = Field(None, description="per layer: context-parallel degree; absent: 1")
    vcp: Ranks = Field(1, description="context-parallel degree of embedding and LM head")
    ep_sizes_enc: Degrees | None = Field(None, description="per layer: ranks that share experts out; absent: 1")
    tp_of_ep_sizes_enc: Degrees | None = Field(None, description="per layer: ranks that split each expert; absent: 1")
    dp_types_of_ep_enc: Flags | None = Field(None, description="per layer: dp type of experts; absent: dp_types_enc")
    sharding_sizes_enc: Degrees | None = Field(
        None, description="per layer: ranks over which ZeRO shards; absent: all that have the same weights"
    )
    sharding_sizes_of_ep_enc: Degrees | None = Field(
        None, description="per layer: the same of its experts; absent: all that have the same experts"
    )
    vsharding: Ranks | None = Field(None, description="sharding size of embedding and LM head; absent: all")
    loss_pieces: Samples = Field(
        1, description="pieces of a rank's tokens, one after the other, in LM head and loss; absent: 1, all at once"
    )
    galvatron: GalvatronObject | None = Field(None, description="fields of this project")


def parse(kind: type[File], data: dict[str, Any]) -> File:
    """The fields of a file of this kind. Raises UserError, a line per fault; identical faults of layers are merged."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        faults: dict[tuple[str, str], list[int]] = {}  # (field, fault) -> entries of the list
        for item in error.errors():
            name, entry, what = _fault(kind, item)
            faults.setdefault((name, what), []).extend(() if entry is None else (entry,))
        raise UserError(f"{name}: {_entries(name, at)}{what}" for (name, what), at in faults.items()) from None


def _fault(kind: type[BaseModel], error: Any) -> tuple[str, int | None, str]:
    """Field, entry of a list, and fault."""
    *parents, last = error["loc"]
    name = ".".join(str(key) for key in error["loc"])
    if error["type"] == "missing":
        return name, None, f"missing; add it ({kind.model_fields[name].description})"
    if error["type"] == "extra_forbidden":
        close = difflib.get_close_matches(str(last), _siblings(kind, parents), n=1)
        return name, None, f"unknown field; {f'did you mean {close[0]}?' if close else 'remove it'}"
    shown_input = "" if error["type"] == "value_error" else f"; it is {shown(error['input'])}"
    what = f"{plain_fault(error)}{shown_input}"
    return (".".join(map(str, parents)), last, what) if isinstance(last, int) else (name, None, what)


def _entries(name: str, at: list[int]) -> str:
    if not at:
        return ""
    unit = "stage" if name in ("pp_division", "galvatron.predicted.stages") else "layer"
    return f"{unit} {at[0]}: " if len(at) == 1 else f"{unit}s {at[0]} to {at[-1]}, {len(at)} of them: "


def _siblings(kind: type[BaseModel], parents: list[Any]) -> list[str]:
    """The fields of the object that contains a field."""
    for parent in parents:
        options = (kind.model_fields[parent].annotation, *get_args(kind.model_fields[parent].annotation))
        kind = next(choice for choice in options if isinstance(choice, type) and issubclass(choice, BaseModel))
    return list(kind.model_fields)
