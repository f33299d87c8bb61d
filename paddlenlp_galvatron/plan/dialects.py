"""Strategy files of other versions: older and newer Galvatron, and its port to PaddleNLP.

Each is converted to the fields of Galvatron 2.4, which `plan.file` reads. A missing field gets the default of the
program that wrote the file; a note names it.
"""

import re
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..base.errors import UserError
from ..base.limits import Rank, Ranks, Samples
from .fields import Degrees, Flag, Flags, ListOf, parse, shown

Fields = dict[str, Any]

# Defaults of Galvatron's reader for missing fields: those of the arguments of the same names.
LACKING: Fields = {"pipeline_type": "gpipe", "default_dp_type": "ddp", "vtp": 1, "vsp": 0, "embed_sdp": 0}
LACKING_PER_LAYER = {"tp_consecutive_flags": 1, "use_sp": 0, "checkpoint": 0}
MARKS = ("pp_deg", "tp_sizes_enc", "dp_types_enc", "pp_division")  # fields that no other file has

# Other files found next to plans, by their fields or prefixes of fields.
OTHERS = {
    "a profile of the network": ("allreduce_size_", "pp_size_", "all2all_size_", "overlap_coe"),
    "a profile of a model": ("layertype_", "layernum["),
    "a model's config.json": ("hidden_size", "num_attention_heads", "model_type", "dim"),
    "arguments of a training": ("output_dir", "model_name_or_path", "learning_rate"),
}


class PortFile(BaseModel):
    """fine_grained_config.json of Galvatron's port to PaddleNLP. Ranks of a tensor-parallel group are neighbours."""

    model_config = ConfigDict(extra="forbid", strict=True)

    pp_size: Ranks = Field(description="number of pipeline stages")
    pp_stage_idx_list: Annotated[ListOf[Rank], Field(description="per layer: its stage")]
    tp_size_list: Degrees = Field(description="per layer: tensor-parallel (or Ulysses) degree")
    dp_size_list: Degrees = Field(description="per layer: data-parallel degree")
    usp_flag_list: Flags = Field(description="per layer: 1 = the degree is Ulysses")
    sharding_stage_list: Annotated[
        ListOf[Annotated[int, Field(ge=0, le=3)]], Field(description="per layer: PaddleNLP's sharding stage")
    ]
    recompute_list: Flags = Field(description="per layer: 1 = recompute activations in backward")
    vtp: Ranks = Field(description="degree of embedding and LM head")
    vsp_flag: Flag = Field(description="1 = vtp is Ulysses")
    embed_sdp: Flag = Field(description="embedding and LM head: 1 = sharding stage 3, 0 = stage 2")
    global_batch_size: Samples = Field(description="samples per optimizer step, over all ranks")
    gradient_accumulation_steps: Samples = Field(description="micro-batches per step")

    def current(self) -> Fields:
        layers = len(self.tp_size_list)
        stages = [(stage, len(list(run))) for stage, run in groupby(self.pp_stage_idx_list)]
        if [stage for stage, _ in stages] != list(range(self.pp_size)):
            raise UserError(
                f"pp_stage_idx_list: the stages of the layers are not 0 to {self.pp_size - 1} in order; correct it"
            )
        kept = sorted({stage for stage in self.sharding_stage_list if stage < 3}) or [2]
        if len(kept) > 1:
            raise UserError(
                f"sharding_stage_list: has stages {', '.join(map(str, kept))} together; "
                "all layers that are not of stage 3 share one here: choose it"
            )
        return {
            "pp_deg": self.pp_size,
            "pp_division": _listed(length for _, length in stages),
            "tp_sizes_enc": _listed(self.tp_size_list),
            "tp_consecutive_flags": _listed([1] * layers),
            "use_sp": _listed(self.usp_flag_list),
            "dp_types_enc": _listed(int(stage == 3) for stage in self.sharding_stage_list),
            "default_dp_type": "ddp" if kept == [0] else "zero2",
            "checkpoint": _listed(self.recompute_list),
            "vtp": self.vtp,
            "vsp": self.vsp_flag,
            "embed_sdp": self.embed_sdp,
            "global_bsz": self.global_batch_size,
            "chunks": self.gradient_accumulation_steps,
            "pipeline_type": "pipedream_flush",  # the port's script has 1F1B
            "world_size": _world_size(self.pp_size, self.dp_size_list, self.tp_size_list),
        }


class SizesFile(BaseModel):
    """galvatron_config_….json of Galvatron's rewritten search, which gives every axis of a layer its own size."""

    model_config = ConfigDict(extra="forbid", strict=True)

    pp_size: Ranks = Field(description="number of pipeline stages")
    tp_size_enc: Degrees = Field(description="per layer: tensor-parallel degree")
    sp_size_enc: Degrees = Field(description="per layer: Ulysses degree")
    cp_size_enc: Degrees = Field(description="per layer: context-parallel degree")
    dp_size_enc: Degrees = Field(description="per layer: data-parallel degree")
    dp_type_enc: Flags = Field(description="per layer: 0 = default_dp_type, 1 = zero3")
    checkpoint_enc: Flags = Field(description="per layer: 1 = recompute activations in backward")
    default_dp_type: Literal["ddp", "zero2", "zero3"] = Field(description="meaning of 0 in dp_type_enc")
    embedding_lmhead_tp_size: Ranks = Field(description="tensor-parallel degree of embedding and LM head")
    embedding_lmhead_sp_size: Ranks = Field(description="their Ulysses degree")
    embedding_lmhead_cp_size: Ranks = Field(description="their context-parallel degree")
    embedding_lmhead_dp_size: Ranks = Field(description="their data-parallel degree")
    embedding_lmhead_dp_type: Literal["ddp", "zero2", "zero3"] = Field(description="where their states are")
    global_bsz: Samples = Field(description="samples per optimizer step, over all ranks")
    chunks: Samples = Field(description="micro-batches per step")
    throughput: float | None = Field(None, description="samples a second that the search expected")
    time: float | None = Field(None, description="seconds a step that the search expected")

    def current(self) -> Fields:
        layers = len(self.tp_size_enc)
        both = [f"layer {layer}" for layer, (tp, sp) in enumerate(self._degrees()) if min(tp, sp) > 1]
        if min(self.embedding_lmhead_tp_size, self.embedding_lmhead_sp_size) > 1:
            both.append("embedding and LM head")
        if both:
            raise UserError(
                f"sp_size_enc: {both[0]} is both tensor parallel and Ulysses; choose one of them for a layer"
            )
        vocab = self.embedding_lmhead_dp_type
        if vocab not in ("zero3", self.default_dp_type):
            raise UserError(
                f"embedding_lmhead_dp_type: is {vocab} with default_dp_type {self.default_dp_type}; "
                "give it the default or zero3"
            )
        degrees = [max(sizes) for sizes in self._degrees()]
        ranks = [degree * context for degree, context in zip(degrees, self.cp_size_enc, strict=False)]
        return {
            "pp_deg": self.pp_size,
            "tp_sizes_enc": _listed(degrees),
            "tp_consecutive_flags": _listed([1] * layers),
            "use_sp": _listed(int(sp > 1) for _, sp in self._degrees()),
            "dp_types_enc": _listed(self.dp_type_enc),
            "default_dp_type": self.default_dp_type,
            "checkpoint": _listed(self.checkpoint_enc),
            "vtp": max(self.embedding_lmhead_tp_size, self.embedding_lmhead_sp_size),
            "vsp": int(self.embedding_lmhead_sp_size > 1),
            "cp_sizes_enc": _listed(self.cp_size_enc),
            "vcp": self.embedding_lmhead_cp_size,
            "embed_sdp": int(vocab == "zero3"),
            "global_bsz": self.global_bsz,
            "chunks": self.chunks,
            "world_size": _world_size(self.pp_size, self.dp_size_enc, ranks),
        }

    def _degrees(self) -> list[tuple[int, int]]:
        return list(zip(self.tp_size_enc, self.sp_size_enc, strict=False))


def as_current(data: object) -> tuple[Fields, str]:
    """The fields of the current format, and a sentence on assumed values, which may be empty.

    Raises UserError if the content is no known strategy, or cannot be expressed in the current fields.
    """
    if not isinstance(data, dict):
        raise UserError("a strategy file holds one JSON object; this one does not")
    if "tp_size_list" in data:
        return parse(PortFile, data).current(), ""
    if "tp_size_enc" in data:
        data = parse(SizesFile, data).current()
    elif not is_strategy(data):
        raise UserError(_summary(data) or f"{_kind(data)}: it has none of the fields {', '.join(MARKS)}")
    return _completed(data)


def is_strategy(data: Fields) -> bool:
    """Whether an object has fields that only strategy files have."""
    return any(mark in data for mark in (*MARKS, "tp_size_list", "tp_size_enc"))


def _summary(data: Fields) -> str:
    """The error for optimal_solution.json of Galvatron's port, which lacks the number of layers: gives the command that
    writes the plan."""
    match = re.fullmatch(r"pp(\d+)_tp(\d+)_dp(\d+)_stage([0-3])_recompute([01])", str(data.get("strategy"))[:80])
    if not match:
        return ""
    pp, tp, dp, stage, recompute = map(int, match.groups())
    return (
        "has one strategy for all layers, but not their number; for your MODEL write: galvatron plan uniform MODEL "
        f"--world_size {pp * tp * dp} --pp_deg {pp} --global_tp_deg {tp} --sharding_stage_level {stage} "
        f"--global_checkpoint {recompute} --global_train_batch_size {shown(data.get('bsz'))} "
        f"--chunks {shown(data.get('accumulation_steps'))}"
    )


def _kind(data: Fields) -> str:
    for kind, marks in OTHERS.items():
        if any(str(name).startswith(marks) for name in data):
            return f"is {kind}, not a strategy file"
    return "is not a strategy file"


def _completed(data: Fields) -> tuple[Fields, str]:
    """The data completed with the fields that older files lack."""
    lacking = {name: value for name, value in LACKING.items() if name not in data}
    if "vocab_sdp" in data:  # other name of embed_sdp
        lacking.pop("embed_sdp", None)
    shown = dict(lacking)
    layers = data["tp_sizes_enc"].count(",") + 1 if isinstance(data.get("tp_sizes_enc"), str) else 0
    if layers:
        per_layer = {name: value for name, value in LACKING_PER_LAYER.items() if name not in data}
        shown |= per_layer
        lacking |= {name: _listed([value] * layers) for name, value in per_layer.items()}
        stages = data.get("pp_deg")
        if "pp_division" not in data and type(stages) is int and 1 <= stages <= layers:
            each = layers // stages
            lacking["pp_division"] = _listed([each] * (stages - 1) + [layers - each * (stages - 1)])
            shown["pp_division"] = lacking["pp_division"] if stages <= 8 else "even"
    if not lacking:
        return data, ""
    words = ", ".join(f"{name} {value}" for name, value in shown.items())
    return data | lacking, f"the file lacks some fields; taken as Galvatron's reader takes them: {words}"


def _listed(numbers: Any) -> str:
    return ",".join(map(str, numbers))


def _world_size(stages: int, dp: list[int], degrees: list[int]) -> int:
    """Raises UserError unless the layers agree."""
    sizes = sorted({stages * data * degree for data, degree in zip(dp, degrees, strict=False)})
    if len(sizes) > 1:
        raise UserError(
            "tp_size_enc, sp_size_enc: the layers' degrees multiply to different numbers of ranks: "
            f"{', '.join(map(str, sizes))}"
        )
    return sizes[0]
