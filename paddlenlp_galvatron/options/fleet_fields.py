"""Fields of PaddleFleet's recipes, the YAML files of its trainers: fields that a plan follows, and the treatment of
others.

Three trainers have three sets of names: PT, SFT and DPO those of its model and training, `ernie_pretrain` has objects
of its own for the model and 8-bit products, `dsv3_pretrain` another schedule, by which it is refused.
"""

import difflib
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from ..base import UserError, read_json
from ..base.limits import Layers, LayersOrNone, RateOrNone, Samples, Size
from ..plan import Precision
from ..plan.fleet_layers import MTP
from .aliases import canonical_name
from .foreign import Fate, Fates, idle_note, outcome_of
from .group import Options
from .uniform import Degree

Stage = Literal["PT", "SFT", "DPO", "ernie_pretrain", "dsv3_pretrain"]
SECTIONS = ("model_args", "model_config", "trainer_args", "ernie_model_config", "fp8_mem_configs")
RENAMED = {
    "_attn_implementation": "attn_implementation",
    "max_seq_length": "max_seq_len",
    "sharding_degree": "sharding_parallel_size",
}
# Fields that no plan follows: refused at values other than these, or without effect.
FATES: Fates = {
    field: Fate(group["why"], group["values"])
    for group in read_json(Path(__file__).with_suffix(".json"))
    for field in group["fields"]
}
PLAN_FIRST = "write a plan, and give that: galvatron plan from-paddlefleet"


class FleetFields(Options):
    """The fields of a recipe that a plan follows, with PaddleFleet's defaults."""

    stage: Stage = "SFT"
    fine_tuning: str = "lora"
    lora: bool | None = None
    lora_rank: Size = 8
    model_name_or_path: str = ""
    device: str = "gpu"
    max_seq_len: Size = 4096
    per_device_train_batch_size: Samples = 8
    gradient_accumulation_steps: Samples = 1
    global_batch_size: Samples | None = None
    tensor_model_parallel_size: Degree = 1
    pipeline_model_parallel_size: Degree = 1
    virtual_pipeline_model_parallel_size: Degree = 1
    context_parallel_size: Degree = 1
    expert_model_parallel_size: Degree = 1
    sequence_parallel: bool = False
    sharding: Literal["", "stage1", "stage2", "stage3"] = "stage1"
    sharding_parallel_size: Degree = -1
    hybrid_parallel_topo_order: Literal["pp_first", "sharding_first"] = "sharding_first"
    num_hidden_layers: Layers | None = None
    num_nextn_predict_layers: LayersOrNone | None = None
    mtp_loss_scaling_factor: RateOrNone = 0.1
    enable_mtp_magic_send: bool = False
    separate_mtp_headloss: bool = False
    num_empty_layers_add_in_head: LayersOrNone = 0
    num_empty_layers_add_in_tail: LayersOrNone = 0
    recompute_granularity: Literal["full", "selective"] | None = None
    recompute_method: Literal["uniform", "first_n", "block"] | None = None
    recompute_num_layers: int | None = None
    recompute_modules: Any = None
    recompute_fwd_gate_up: Any = False
    loss_subbatch_sequence_length: Size | None = None
    attn_implementation: str = "flashmask"
    bf16: bool = False
    fp16: bool = False
    fp16_opt_level: Literal["O1", "O2"] = "O1"
    amp_master_grad: bool = True
    tensorwise_offload_optimizer: bool = False
    decoderlayer_act_offload_settings: dict[str, Any] | None = None

    @property
    def precision(self) -> Precision:
        return Precision.BF16 if self.bf16 else Precision.FP16 if self.fp16 else Precision.FP32

    @property
    def asked(self) -> dict[str, Any]:
        """Search options for the same training."""
        lora = self.fine_tuning.lower() == "lora" if self.lora is None else self.lora
        tunes = self.stage in ("PT", "SFT", "DPO") and (lora or self.stage != "PT")
        task = "pretrain" if not tunes else "dpo" if self.stage == "DPO" else "lora" if lora else "sft"
        asked = {"task": task} | ({"lora_rank": self.lora_rank} if tunes and lora else {})
        return asked | ({"offload_optimizer": True} if self.tensorwise_offload_optimizer else {})


class RecipeFields(NamedTuple):
    """The fields of a recipe."""

    read: FleetFields
    rest: dict[str, Any]  # fields that no plan has
    notes: list[str]
    faults: list[str]


def is_recipe(content: object) -> bool:
    """Whether a file's content is one of PaddleFleet's recipes."""
    stage = str(content.get("stage")) if isinstance(content, dict) else ""
    return stage in get_args(Stage) or stage.startswith("VL-")


def fields_of(content: Mapping[str, Any]) -> RecipeFields:
    """The fields of a recipe, whose sections have no meaning. Raises UserError for values of a wrong type."""
    flat: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    idle: dict[str, str] = {}
    faults: list[str] = []
    for name, value in _flat(content):
        if flat.setdefault(name, value) != value:
            faults.append(f"{name}: is {flat[name]!r} and {value!r}; keep one")
    for name in [name for name in flat if name not in FleetFields.model_fields]:
        outcome = outcome_of(name, flat[name], FATES)
        if outcome is None:
            rest[name] = flat[name]
        elif outcome.fault:
            faults.append(f"{name}: {flat[name]} is not supported: {outcome.fault}")
        elif outcome.idle:
            idle[name] = outcome.idle
    try:
        read = FleetFields.from_values(flat)
    except UserError as error:
        raise UserError([*faults, *error.faults]) from None
    faults += _unplanned(read)
    return RecipeFields(read, rest, [idle_note(idle)] if idle else [], faults)


def _flat(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if name in SECTIONS and isinstance(value, dict):
            yield from _flat(value)
        elif value is not None:
            yield RENAMED.get(name, name), value


def _unplanned(read: FleetFields) -> Iterator[str]:
    """Faults of fields whose values a plan cannot express."""
    if read.fp16_opt_level == "O1" and read.precision.mixed:
        yield "fp16_opt_level: is O1, the default, with fp32 weights; plans have 16-bit weights, which is O2"
    if read.loss_subbatch_sequence_length and read.loss_subbatch_sequence_length < read.max_seq_len:
        yield "loss_subbatch_sequence_length: the loss in pieces is not read; leave it out"


def unread_notes(names: Sequence[str]) -> Iterator[str]:
    """Notes on fields without effect on a plan, which may be misspelt."""
    read_names = [*FleetFields.model_fields, *FATES]
    near = {name: difflib.get_close_matches(name, read_names, n=1, cutoff=0.9) for name in names}
    for name, match in near.items():
        if match:
            yield f"{name}: nobody reads it; did you mean {match[0]}?"
    if others := [name for name, match in near.items() if not match]:
        yield f"not part of a plan: {', '.join(others)}"


def options_of(content: Mapping[str, Any], names: Container[str]) -> tuple[dict[str, Any], list[str]]:
    """Options of a command for a recipe's job, and notes. Degrees are only for training; a search finds its own. Raises
    UserError if options cannot express the job."""
    read, rest, notes, faults = fields_of(content)
    size = {"model_size": read.model_name_or_path} if read.model_name_or_path else {}
    options = size | {"seq_length": read.max_seq_len, "mixed_precision": read.precision.value} | read.asked
    if read.num_nextn_predict_layers is not None:
        options[MTP] = read.num_nextn_predict_layers
    if read.num_nextn_predict_layers:
        options["mtp_loss_scaling_factor"] = read.mtp_loss_scaling_factor
    if read.global_batch_size:
        options |= {"settle_bsz": read.global_batch_size, "global_train_batch_size": read.global_batch_size}
    if "tensor_parallel_degree" in names:
        options |= _degrees(read)
        how = read.recompute_granularity, read.recompute_method
        empty = read.num_empty_layers_add_in_head or read.num_empty_layers_add_in_tail
        if empty or (how[0] and how != ("full", "uniform")):
            faults.append(f"recompute_granularity, num_empty_layers_add_in_tail: layers differ; {PLAN_FIRST}")
    else:
        options["trainer"] = "paddlefleet"
        notes.append("degrees and recompute of the recipe are left to the search")
    if faults:
        raise UserError(faults)
    options |= {canonical: value for name, value in rest.items() if (canonical := canonical_name(name, names)) in names}
    notes += unread_notes([name for name in rest if canonical_name(name, names) not in names])
    return {name: value for name, value in options.items() if name in names}, notes


def _degrees(read: FleetFields) -> dict[str, Any]:
    """PaddleNLP's options of one strategy."""
    return {
        "tensor_parallel_degree": read.tensor_model_parallel_size,
        "pipeline_parallel_degree": read.pipeline_model_parallel_size,
        "virtual_pp_deg": read.virtual_pipeline_model_parallel_size,
        "global_cp_deg": read.context_parallel_size,
        "expert_parallel_degree": read.expert_model_parallel_size,
        "sharding": read.sharding,
        "sharding_parallel_degree": read.sharding_parallel_size,
        "per_device_train_batch_size": read.per_device_train_batch_size,
        "gradient_accumulation_steps": read.gradient_accumulation_steps,
        "recompute": read.recompute_granularity == "full",
        "sequence_parallel": read.sequence_parallel,
    }
