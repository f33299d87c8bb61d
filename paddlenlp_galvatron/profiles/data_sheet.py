"""Data sheets of nodes: what a device and its links can do, each figure with its source."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ..base.errors import UserError
from ..base.limits import Ranks
from ..base.reading import LARGEST_OPTIONS, read_json

LEAST, MOST = 1e-3, 1e9  # of a figure in its unit: far beyond any device, and no price of them is 0 or without end
FOLDERS = (Path(__file__).parents[2] / "configs" / "nodes", Path(__file__).parents[1] / "nodes")


class Figure(BaseModel):
    """One number, where it is from, and what else says so."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    value: float = Field(ge=LEAST, le=MOST, allow_inf_nan=False)
    unit: str
    source: str = Field(min_length=1)
    checked: str = Field(min_length=1, description="a second source that agrees, or that there is none")


class Stack(StrEnum):
    """Software that trains."""

    PADDLE = "paddle"  # ours
    PYTORCH = "pytorch"  # PyTorch without compilation; Megatron-LM before Transformer Engine
    TRANSFORMER_ENGINE = "transformer-engine"  # NVIDIA's layers on PyTorch, as NeMo and Megatron-Bridge have them


LAUNCH = {
    Stack.PADDLE: Figure(
        value=32,
        unit="µs a call",
        source="PaddleFleet's Qwen3-8B on 8 H800 at tp 8, the only rows in which hosts are slower than devices: 6.0 ms "
        "a layer with recompute, 3.6 without",
        checked="10 to 20 µs for this project's layers on CPUs (benchmarks/python_per_layer.py)",
    ),
    Stack.PYTORCH: Figure(value=8, unit="µs a call", source="assumed: Python and CUDA's launch together", checked="no"),
    Stack.TRANSFORMER_ENGINE: Figure(value=8, unit="µs a call", source="as PyTorch", checked="no"),
}
HOST = Figure(
    value=20,
    unit="GB/s a direction and GPU",
    source="assumed: PCIe 4.0 x16, at two thirds of its 32 GB/s, as published runs reach on PCIe 5.0",
    checked="no: give the figure of your nodes",
)
# Where a sheet leaves them out.
ATTENTION = Figure(
    value=0.32,
    unit="ratio",
    source="FlashAttention-2 on H100, causal, heads of 128, 4,096 tokens (arXiv:2407.08608): 319 of 989 TFLOP/s",
    checked="no: give the figure of your device",
)
START = Figure(
    value=10, unit="µs", source="PaddleFleet's profile of H800", checked="no: give the figure of your device"
)


class Spread(BaseModel):
    """Speed of published runs over that predicted from the sheet, whatever their software: 8 of 10 are between."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    low: float = Field(gt=0, allow_inf_nan=False)
    high: float = Field(gt=0, allow_inf_nan=False)
    runs: int = Field(ge=1)


RECEIVE = Figure(
    value=1.03,
    unit="ratio",
    source="by arithmetic: a posted receive holds one of an H100's 132 multiprocessors for each of 4 channels",
    checked="no: gpu-check's part beside tells it",
)

TENSOR = Figure(
    value=1,
    unit="ratio",
    source="assumed: a pipeline does not slow them down",
    checked="published runs of Qwen3-8B on H800 with tp 2 ask for 1.6 with two stages and 1.3 with four, of tp 4 for 1",
)
HALF_RANKS = Figure(
    value=256,
    unit="ranks",
    source="one number for InternEvo's ZeRO-1 on 8 to 1,024 A100 (RoCE) and llm-foundry's FSDP on 128 to 512 H100",
    checked="no: NVIDIA's own clusters lose less (nemotron-15b on 2,048 H100: 4 %, by this 20 %)",
)


class DataSheet(BaseModel):
    """One kind of node."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    device: str
    gpus_per_node: Ranks
    stack: Stack = Field(Stack.PADDLE, description="software whose speed the figures are")
    stacks: dict[Stack, dict[str, Figure]] = Field(
        {}, description="figures that other software reaches, by their names"
    )
    memory: Figure = Field(description="GiB of a device")
    matmul_16bit: Figure = Field(description="peak of bf16 and fp16 matrix products, TFLOP/s")
    matmul_fp32: Figure = Field(description="peak of fp32 matrix products, TFLOP/s")
    memory_bandwidth: Figure = Field(description="GB/s of a device's memory")
    link: Figure = Field(description="GB/s a direction from one device to the others of its node")
    network: Figure = Field(description="GB/s a direction from one node to the others")
    matmul_efficiency: Figure = Field(description="share of the peak that matrix products reach")
    attention_efficiency: Figure = Field(ATTENTION, description="share of the peak that flash attention reaches")
    product_start: Figure = Field(START, description="µs in which a matrix product begins and ends, whatever its size")
    memory_efficiency: Figure = Field(description="share of the memory bandwidth that elementwise work reaches")
    link_efficiency: Figure = Field(description="share of `link` that collectives reach")
    network_efficiency: Figure = Field(description="share of `network` that collectives reach")
    half_ranks: Figure = Field(
        HALF_RANKS, description="ranks of a ring across nodes with which it reaches half of `network`'s share"
    )
    allocator: Figure | None = Field(None, description="share of tensors that the allocator holds beside them")
    host_link: Figure = Field(HOST, description="GB/s a direction between a device and its host's memory")
    overlap_coe: Figure = Field(description="how much slower compute and communication run side by side")
    receive_coe: Figure = Field(RECEIVE, description="how much slower a pipeline's passes run beside a posted receive")
    tensor_in_pipeline: Figure = Field(
        TENSOR, description="how many times as long collectives of tensor parallelism take in a pipeline"
    )
    published: Spread | None = Field(None, description="how fast published runs are; unset: none is known")
    launch: Figure = Field(description="µs of the host for one call that starts a kernel; unset: as the stack takes")

    @model_validator(mode="before")
    @classmethod
    def _of_its_stack(cls, given: object) -> object:
        if not isinstance(given, dict):
            return given
        stack = given.get("stack")
        return {"launch": LAUNCH[Stack(stack) if stack in list(Stack) else Stack.PADDLE], **given}

    @field_validator("stacks")
    @classmethod
    def _known(cls, stacks: dict[Stack, dict[str, Figure]]) -> dict[Stack, dict[str, Figure]]:
        figures = {name for name, field in cls.model_fields.items() if field.annotation in (Figure, Figure | None)}
        if unknown := {name for reached in stacks.values() for name in reached} - figures:
            raise ValueError(f"{', '.join(sorted(unknown))}: no figure of a data sheet")
        return stacks

    def with_stack(self, stack: Stack | None) -> DataSheet:
        """The same node under other software; None: the sheet's own."""
        if stack in (None, self.stack):
            return self
        return self.model_copy(update={"stack": stack, "launch": LAUNCH[stack], **self.stacks.get(stack, {})})


def data_sheets() -> dict[str, Path]:
    """Data sheets that ship: name -> file."""
    return {path.stem: path for folder in FOLDERS for path in sorted(folder.glob("*.json"))}


def load_data_sheet(name_or_path: str | Path) -> DataSheet:
    """A data sheet that ships, by name or its beginning (h100), or any by path. Raises UserError."""
    known = data_sheets()
    named = [path for name, path in known.items() if name == name_or_path or name.startswith(f"{name_or_path}-")]
    path = named[0] if len(named) == 1 else Path(name_or_path)
    if not path.is_file():
        raise UserError(f"data sheet {name_or_path}: neither a file nor a known node; known: {', '.join(known)}")
    try:
        return DataSheet.model_validate(read_json(path, LARGEST_OPTIONS))
    except ValidationError as error:
        raise UserError(
            f"{path}: {'.'.join(map(str, item['loc']))}: {item['msg']}; correct the data sheet"
            for item in error.errors()
        ) from None


def data_sheet_of(device: str) -> DataSheet | None:
    """The data sheet that ships for a device by the name that its driver gives, such as NVIDIA H100 80GB HBM3."""
    chips = {path.stem.partition("-")[0].upper(): path for path in data_sheets().values()}
    named = [path for chip, path in chips.items() if chip in device.upper().replace("-", " ").split()]
    return load_data_sheet(named[0]) if named else None
