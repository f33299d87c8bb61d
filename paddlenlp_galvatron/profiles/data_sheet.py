"""Data sheets of nodes, each figure with its source, and the device that a sheet or a profile describes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from ..base import LARGEST_OPTIONS, UserError, plain_fault, read_json
from ..base.limits import Positive, Ranks, gb_per_s
from ..model import ModelShape
from ..model.shape import flops_per_token
from ..plan import Assumptions, Plan, Precision

LEAST, MOST = 1e-3, 1e9  # range of a figure in its unit: far beyond any device, and prices stay positive and finite
FOLDERS = (Path(__file__).parents[2] / "configs" / "nodes", Path(__file__).parents[1] / "nodes")
CALIBRATED = "calibrated from"  # prefix of the source of a fitted figure
SHORT = {"a100": "a100-80gb", "h100": "h100-80gb"}  # short names of one of several sheets
GUIDE = "docs/en/fit.md"  # page on how to write a sheet
# Units of a figure, with the factor to the internal unit and optional following words.
GB_PER_S = {"GB/s": 1.0, "TB/s": 1e3, "Gb/s": 1 / 8, "Gbit/s": 1 / 8}
TFLOPS = {"TFLOP/s": 1.0, "TFLOPS": 1.0, "PFLOP/s": 1e3, "PFLOPS": 1e3}
MICROSECONDS = {"µs": 1.0, "us": 1.0, "ms": 1e3}
RATIO = {"ratio": 1.0, "%": 0.01}
GIB = {"GiB": 1.0, "MiB": 1 / 1024, "GB": 1e9 / 2**30, "MB": 1e6 / 2**30}
UNITS = {
    "memory": GIB,
    **dict.fromkeys(("matmul_8bit", "matmul_16bit", "matmul_fp32"), TFLOPS),
    **dict.fromkeys(("memory_bandwidth", "link", "network", "host_link"), GB_PER_S),
    **dict.fromkeys(("product_start", "launch"), MICROSECONDS),
    "half_ranks": {"ranks": 1.0},
    "watts": {"W": 1.0, "kW": 1e3},
}
# Range of a figure in the internal unit; the maximum is ten times that of any known device.
LIMITS = {
    "memory": (1, 3_000),
    **dict.fromkeys(("matmul_8bit", "matmul_16bit", "matmul_fp32"), (0.1, 50_000)),
    **dict.fromkeys(("link", "network", "host_link"), (0.01, 20_000)),
    "memory_bandwidth": (1, 200_000),
    **dict.fromkeys(("overlap_coe", "receive_coe"), (1, 10)),
    "tensor_in_pipeline": (0.1, 10),
    **dict.fromkeys(("product_start", "launch"), (LEAST, 1e6)),
    "half_ranks": (1, MOST),
    "watts": (1, 20_000),
}
SHARE = (LEAST, 1)  # range of other figures
OF_UNITS = ("", "a call", "dense", "dense TF32", *(f"a direction{of}" for of in ("", " and GPU", " and node")))


class Figure(BaseModel):
    """One number, its source, and a second source."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    value: float = Field(ge=LEAST, le=MOST, allow_inf_nan=False)
    unit: str
    source: str = Field(min_length=1)
    checked: str = Field(min_length=1)  # a second source that agrees, or a statement that there is none


class Stack(StrEnum):
    """Software that trains."""

    PADDLE = "paddle"  # ours
    PYTORCH = "pytorch"  # PyTorch without compilation; Megatron-LM before Transformer Engine
    TRANSFORMER_ENGINE = "transformer-engine"  # NVIDIA's layers on PyTorch, as NeMo and Megatron-Bridge have them


_GIVEN = read_json(Path(__file__).with_name("figures.json"), LARGEST_OPTIONS)
LAUNCH = {Stack(name): Figure(**figure) for name, figure in _GIVEN.pop("launch").items()}
DEFAULTS = {name: Figure(**figure) for name, figure in _GIVEN.items()}  # figures that a sheet leaves out


class PublishedSpread(BaseModel):
    """Speed of published runs / prediction from the sheet, for any software: 8 of 10 are in this range."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    low: float = Field(gt=0, allow_inf_nan=False)
    high: float = Field(gt=0, allow_inf_nan=False)
    runs: int = Field(ge=1)


HALF_RANKS = DEFAULTS["half_ranks"]


class DataSheet(BaseModel):
    """One kind of node."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    device: str = Field(min_length=1)  # name of the device, the driver's if possible
    drivers: tuple[str, ...] = ()  # further full names of this device in drivers
    gpus_per_node: Ranks
    stack: Stack = Stack.PADDLE  # software to whose speed the figures apply
    stacks: dict[Stack, dict[str, Figure]] = {}  # figures of other software, by name
    memory: Figure  # GiB of a device
    matmul_16bit: Figure  # peak of bf16 and fp16 matrix products, TFLOP/s
    matmul_fp32: Figure  # peak of fp32 matrix products, TFLOP/s
    matmul_8bit: Figure | None = None  # peak of FP8 matrix products that sum in fp32, TFLOP/s; None: the chip has none
    memory_bandwidth: Figure  # GB/s of a device's memory
    link: Figure  # GB/s a direction from one device to the others of its node
    network: Figure  # GB/s a direction from one node to the others
    matmul_efficiency: Figure  # share of the peak that matrix products reach
    attention_efficiency: Figure = DEFAULTS["attention_efficiency"]  # share of the peak: flash attention, long samples
    product_start: Figure = DEFAULTS["product_start"]  # µs of start and end of a matrix product of any size
    memory_efficiency: Figure  # share of the memory bandwidth that elementwise work reaches
    link_efficiency: Figure  # share of `link` that collectives reach
    switch_efficiency: Figure | None = None  # share of `link` that all-reduces in switches reach; None: none
    network_efficiency: Figure  # share of `network` that collectives reach
    half_ranks: Figure = HALF_RANKS  # ranks of a ring across nodes at which it reaches half of `network`'s share
    allocator: Figure | None = None  # additional allocator memory, as a share of tensors
    host_link: Figure = DEFAULTS["host_link"]  # GB/s a direction between a device and its host's memory
    watts: Figure | None = None  # limit of a device's power; None: energy is not computed
    overlap_coe: Figure  # how much slower compute and communication run side by side
    receive_coe: Figure = DEFAULTS["receive_coe"]  # how much slower a pipeline's passes run during a posted receive
    tensor_in_pipeline: Figure = DEFAULTS["tensor_in_pipeline"]  # how much longer tp collectives take in a pipeline
    tensor_shown: Figure = DEFAULTS["tensor_shown"]  # exposed share of the time of tp collectives
    published: dict[Literal["dense", "MoE"], PublishedSpread] = {}  # speed of published runs by kind of model
    launch: Figure  # µs of the host for one kernel launch; unset: the stack's

    @model_validator(mode="before")
    @classmethod
    def _of_its_stack(cls, sheet: object) -> object:
        if not isinstance(sheet, dict):
            return sheet
        stack = sheet.get("stack")
        return {"launch": LAUNCH[Stack(stack) if stack in list(Stack) else Stack.PADDLE], **sheet}

    @field_validator("stacks")
    @classmethod
    def _known(cls, stacks: dict[Stack, dict[str, Figure]]) -> dict[Stack, dict[str, Figure]]:
        figures = {name for name, field in cls.model_fields.items() if field.annotation in (Figure, Figure | None)}
        if unknown := {name for reached in stacks.values() for name in reached} - figures:
            raise ValueError(f"{', '.join(sorted(unknown))}: no figure of a data sheet")
        return {stack: {name: _in_unit(figure, name) for name, figure in row.items()} for stack, row in stacks.items()}

    def with_stack(self, stack: Stack | None) -> DataSheet:
        """The sheet of the same node under other software; None: the sheet's own."""
        if stack in (None, self.stack):
            return self
        return self.model_copy(update={"stack": stack, "launch": LAUNCH[stack], **self.stacks.get(stack, {})})

    def with_network(self, network: str | None) -> DataSheet:
        """The sheet of such nodes behind another network; None: the sheet's own."""
        if network is None:
            return self
        value = gb_per_s(network, self.gpus_per_node)
        figure = Figure(value=value, unit="GB/s", source="the option network", checked="no")
        return self.model_copy(update={"network": figure})

    def is_named(self, name: str) -> bool:
        """Whether this is the sheet's name, its beginning, or a driver's full name of the device, ignoring case and
        punctuation."""
        word = _plain(name)
        return bool(word) and (_plain(self.name).startswith(word) or word in map(_plain, (self.device, *self.drivers)))

    @field_validator("*")
    @classmethod
    def _in_its_unit(cls, value: object, info: ValidationInfo) -> object:
        """Each figure in the internal unit."""
        return _in_unit(value, info.field_name) if isinstance(value, Figure) and info.field_name else value


def _in_unit(figure: Figure, name: str) -> Figure:
    """A figure converted to the unit of its name. Raises ValueError."""
    units = UNITS.get(name, RATIO)
    unit, _, rest = figure.unit.replace(",", " ").strip().partition(" ")
    if unit not in units or " ".join(rest.split()) not in OF_UNITS:
        raise ValueError(f"unit {figure.unit!r} is unknown; give the figure in {' or '.join(units)}")
    base = next(name for name, factor in units.items() if factor == 1)
    value = figure.value * units[unit]
    least, most = LIMITS.get(name, SHARE)
    if not least <= value <= most:
        raise ValueError(f"{value:,g} {base} is not between {least:,g} and {most:,g}; is the unit {unit} right?")
    return figure if units[unit] == 1 else figure.model_copy(update={"value": value, "unit": f"{base} {rest}".strip()})


def data_sheets() -> dict[str, Path]:
    """Shipped data sheets: name -> file."""
    return {path.stem: path for folder in FOLDERS for path in sorted(folder.glob("*.json"))}


def load_data_sheet(name_or_path: str | Path) -> DataSheet:
    """A shipped data sheet by its name, its beginning (h100) or the driver's full name, ignoring case and punctuation;
    or any sheet by path. Raises UserError."""
    path = Path(name_or_path)
    if not path.is_file():
        path = _shipped(str(name_or_path))
    try:
        return DataSheet.model_validate(read_json(path, LARGEST_OPTIONS))
    except ValidationError as error:
        raise UserError(
            f"{path}: {'.'.join(map(str, item['loc']))}: {plain_fault(item)}; correct the data sheet, as {GUIDE} says"
            for item in error.errors()
        ) from None


def sheet_of_driver(name: str) -> DataSheet | None:
    """The shipped data sheet of a device by the driver's full name: NVIDIA H100 80GB HBM3."""
    return _by_driver().get(name)


def sheets_named(name: str) -> list[str]:
    """Names of the shipped data sheets that match, by `DataSheet.is_named`."""
    short = SHORT.get(_plain(name))
    return [short] if short else sorted({sheet.name for sheet in _by_driver().values() if sheet.is_named(name)})


def _shipped(name: str) -> Path:
    sheets, plain = data_sheets(), _plain(name)
    if plain in SHORT:
        return sheets[SHORT[plain]]
    named = {stem: _plain(stem) == plain or plain in _beginnings(stem) for stem in sheets}
    named |= {sheet.name: True for driver, sheet in _by_driver().items() if _plain(driver) == plain}
    meant = [stem for stem, is_meant in named.items() if is_meant]
    if len(meant) != 1:
        what = f"could be {' or '.join(meant)}" if meant else "is no known device"
        if "," in name:
            what = "are several, which galvatron fit alone compares"
        elif name.endswith(".json"):
            what = "is no file here"
        raise UserError(
            f"device: {name} {what}; known: {', '.join(sheets)}; for another GPU write a data sheet and give its file "
            f"({GUIDE})"
        )
    return sheets[meant[0]]


def _plain(name: str) -> str:
    """The name without capitals and punctuation."""
    return re.sub(r"[\W_]", "", name.casefold().removeprefix("nvidia ").removeprefix("geforce "))


def _beginnings(stem: str) -> Iterator[str]:
    """`rtx4090` and `4090` of rtx4090-24gb."""
    chip = stem.partition("-")[0]
    yield chip
    yield chip.removeprefix("rtx")


@cache
def _by_driver() -> dict[str, DataSheet]:
    sheets = [load_data_sheet(path) for path in data_sheets().values()]
    return {name: sheet for sheet in sheets for name in (sheet.device, *sheet.drivers)}


class Device(BaseModel):
    """A device. None: not known."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str | None = Field(None, description="as the driver, the CPU or the data sheet has it")
    is_gpu: bool = False
    memory_gib: Positive | None = Field(None, description="memory that programs can use, GiB")
    peak_16bit_tflops: Positive | None = Field(None, description="peak of bf16 and fp16 matrix products, TFLOP/s")
    peak_fp32_tflops: Positive | None = Field(None, description="peak of fp32 matrix products, TFLOP/s")
    peak_8bit_tflops: Positive | None = Field(None, description="peak of FP8 matrix products, TFLOP/s")
    gpus_per_node: Ranks | None = None
    host_link_gb_per_s: Positive | None = Field(None, description="GB/s a direction to the host's memory")

    @classmethod
    def of(cls, sheet: DataSheet) -> Device:
        return cls(
            name=sheet.device,
            is_gpu=True,
            memory_gib=sheet.memory.value,
            peak_16bit_tflops=sheet.matmul_16bit.value,
            peak_fp32_tflops=sheet.matmul_fp32.value,
            peak_8bit_tflops=sheet.matmul_8bit and sheet.matmul_8bit.value,
            gpus_per_node=sheet.gpus_per_node,
            host_link_gb_per_s=sheet.host_link.value,
        )

    @classmethod
    def named(cls, name: str, memory_gib: float | None = None) -> Device:
        """A GPU by its driver's full name, with its memory if the driver reports it; other figures come from shipped
        data sheets."""
        sheet = sheet_of_driver(name)
        base = cls.of(sheet) if sheet else cls(is_gpu=True)
        return base.model_copy(update={"name": name, "memory_gib": memory_gib or base.memory_gib})

    @classmethod
    def searched(cls, plan: Plan) -> Device:
        """The device that a plan was searched for, from its file."""
        try:
            return cls.model_validate((plan.metadata.get("searched_from") or {}).get("device") or {})
        except ValidationError:  # written by another program
            return cls()

    def peak_tflops(self, assumed: Assumptions) -> float | None:
        if assumed.products:
            return self.peak_8bit_tflops
        return self.peak_fp32_tflops if assumed.mixed_precision is Precision.FP32 else self.peak_16bit_tflops

    def mfu(
        self,
        tokens_per_s: float,
        plan: Plan,
        shape: ModelShape,
        frozen: bool = False,
        document_tokens: float | None = None,
    ) -> float | None:
        """MFU, the same in every command: the share of the peak of a plan's devices that a model's own operations take,
        by `flops_per_token`. None where the peak is not known."""
        peak = self.peak_tflops(plan.assumed)
        flops = flops_per_token(shape, plan.assumed.seq_length or 0, frozen, document_tokens)
        return tokens_per_s * flops / (plan.world_size * peak * 1e12) if peak else None
