"""Every option of the search and of the task that it prices, under one canonical name; Galvatron's names are
aliases."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from re import fullmatch
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from ..base.errors import UserError
from ..base.limits import MOST_SAMPLES, Count, Layers, NodeLinks, Number, Positive, Ranks, Samples, Size
from ..cost_model import CostOptions, Task
from ..model.layer import MODULES, PARTLY
from ..options.group import Options
from ..options.prices import MEASURED_NETWORK, RANK, TWO_SOURCES, Kind, LimitOptions
from ..plan import Assumptions, DataParallel, Plan, Precision, Products, Recompute, Schedule
from ..plan.mesh import Axis, Degrees, divisors, every_degrees
from ..plan.strategy import IMBALANCE, IMBALANCE_BOUND
from ..profiles.analytic import GROUPED, ONE_BY_ONE
from ..profiles.data_sheet import load_data_sheet
from ..profiles.files import ProfileSource

DIMENSIONS = ("dp", "sdp", "tp", "sp", "cp", "ep", "etp", "pp", "ckpt", "vtp")

PROFILE_OPTIONS = ProfileSource.__optional_keys__ - {"folder"}
PATH_OPTIONS = tuple(name for name in ProfileSource.__annotations__ if name.endswith("_path"))
GPUS_PER_NODE = 8  # default for a larger world_size
# Defaults of fit, search and what-if.
BATCH = 256  # global batch size, samples

# Defaults: the sequence length from which this many ranks may split a sample; the most chunks a stage.
LONG, MOST_CONTEXT, MOST_CHUNKS = 16_384, 8, 8

# Limits: a larger value is a typing error and would take hours or all memory.
MOST_BATCHES, MOST_PLANS = 10_000, 1000


def _settled(number: int) -> int:
    if number == -1 or 0 < number <= MOST_SAMPLES:
        return number
    raise ValueError(f"must be a number above 0 and at most {MOST_SAMPLES}, or -1 for any")


Settled = Annotated[int, AfterValidator(_settled)]
SlowerPercent = Annotated[float, Field(ge=0, le=100)]
Imbalance = Annotated[float, Field(ge=1, le=1e4)]


class TaskOptions(Options):
    """The trained weights and the additional models to compute."""

    task: Kind = "pretrain"
    lora_rank: Size | None = None
    document_tokens: Positive | None = None
    offload_optimizer: bool = False
    offload_activations: bool = False
    moe_imbalance: Imbalance = IMBALANCE
    moe_imbalance_bound: Imbalance = IMBALANCE_BOUND
    experts_one_by_one: bool = False

    @model_validator(mode="after")
    def _ranked(self) -> Self:
        if self.lora_rank is not None and self.task not in ("lora", "dpo"):
            raise ValueError(f"lora_rank: {self.task} trains all weights; give --task lora or dpo, or leave it out")
        return self

    @property
    def cost_options(self) -> CostOptions:
        """The task for the cost model."""
        return CostOptions(
            task=self.trained,
            imbalance=self.moe_imbalance,
            imbalance_bound=max(self.moe_imbalance, self.moe_imbalance_bound),
            kernels=ONE_BY_ONE if self.experts_one_by_one else GROUPED,
            padded=True,
        )

    @property
    def trained(self) -> Task:
        rank = (self.lora_rank or RANK) if self.task == "lora" else self.lora_rank
        return Task(rank, self.document_tokens)


class SearchOptions(TaskOptions, LimitOptions):
    """The search space, its limits and its assumptions."""

    panel = "Search"

    # The cluster and what fits.
    num_nodes: Ranks = 1
    num_gpus_per_node: Ranks = GPUS_PER_NODE
    world_size: Ranks = GPUS_PER_NODE
    profile_gpu_num: Ranks | None = None
    device: str | None = None
    network: NodeLinks | None = None
    products: Products | None = None
    memory_constraint: Positive | None = None
    context_mib: Number | None = None

    # Batches.
    min_bsz: Samples = 8
    max_bsz: Samples | None = None
    bsz_scale: Samples = 8
    settle_bsz: Settled = -1
    settle_chunk: Settled = -1

    # The space.
    search_space: str = "full"
    fine_grained_mode: bool = True
    sp_space: Literal["tp", "tp+sp", "sp"] = "tp"
    max_tp_deg: Ranks = 8
    max_sp_deg: Ranks | None = None
    max_cp_deg: Ranks | None = None
    max_ep_deg: Ranks | None = None
    max_etp_deg: Ranks = 8
    max_pp_deg: Ranks = 16
    max_virtual_pp_deg: Layers | None = None
    disable_dp: bool = False
    disable_sdp: bool = False
    disable_tp: bool = False
    disable_sp: bool = False
    disable_cp: bool = False
    disable_ep: bool = False
    disable_etp: bool = False
    disable_pp: bool = False
    disable_ckpt: bool = False
    recompute_parts: bool = False
    disable_vtp: bool = False
    embed_sdp: bool | None = None
    tp_consec: bool = True
    pipeline_type: Schedule | None = None
    sharding_sizes: str = "1"
    default_dp_type: DataParallel = DataParallel.ZERO2

    trainer: Literal["galvatron", "paddlenlp", "paddlefleet", "paddleformers"] = "galvatron"

    # Assumptions of prices.
    seq_length: Size | None = None
    sequence_parallel: bool = True
    mixed_precision: Precision = Precision.BF16
    no_async_grad_reduce: bool = False
    amp_master_grad: bool | None = None
    use_flash_attention: bool | None = None
    no_global_memory_buffer: bool = False

    # Where the profiles are, and how they are read.
    profiles: Path = Path("configs")
    profile_mode: Literal["static", "batch", "sequence"] | None = None
    time_profile_mode: Literal["static", "batch", "sequence"] = "static"
    memory_profile_mode: Literal["static", "sequence"] = "static"
    profile_dialect: Literal["galvatron", "paddlenlp"] | None = None
    time_profiling_path: Path | None = None
    memory_profiling_path: Path | None = None
    allreduce_bandwidth_config_path: Path | None = None
    p2p_bandwidth_config_path: Path | None = None
    overlap_coe_path: Path | None = None
    sp_time_path: Path | None = None
    allow_foreign_profiles: bool = False

    # How it is searched.
    simplest_within: SlowerPercent = 0.5
    top_k: int = Field(1, ge=1, le=MOST_PLANS)
    effort: Count = 40_000_000

    @field_validator("sharding_sizes", mode="before")
    @classmethod
    def _numbers_of_nodes(cls, value: Any) -> str:
        if not fullmatch(r"\d{1,5}(,\d{1,5})*", text := str(value).replace(" ", "")):
            raise ValueError("must be numbers of nodes joined by commas, such as 1,2; 0 for all ranks alone")
        return text

    @model_validator(mode="before")
    @classmethod
    def _spelled_out(cls, values: Any) -> Any:
        """Resolve profile_mode and world_size into other options, and the default batch."""
        if not isinstance(values, Mapping):
            return values
        return {**_modes(values), **values, **_cluster(values), **_batches(values)}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.settle_bsz == -1 and self.largest_bsz < self.min_bsz:
            raise ValueError(f"max_bsz: {self.max_bsz} is below min_bsz {self.min_bsz}")
        if self.profile_gpu_num not in (None, self.world_size):
            raise ValueError(
                f"profile_gpu_num: {self.profile_gpu_num}, but {self.world_size} are searched for; make them agree"
            )
        if self.max_sp_deg not in (None, self.max_tp_deg):
            raise ValueError(
                f"max_sp_deg: {self.max_sp_deg}, but one limit holds for both, and max_tp_deg is {self.max_tp_deg}; "
                "make them agree"
            )
        if (number := (self.largest_bsz - self.min_bsz) // self.bsz_scale) >= MOST_BATCHES:
            raise ValueError(f"bsz_scale: {number + 1} batches up to max_bsz are too many; take a wider step")
        if not self.tp_consec and self.sp_space != "tp":
            raise ValueError(f"tp_consec: 0 does not go together with sp_space {self.sp_space}; use sp_space tp")
        if self.device is not None and not self.model_fields_set.isdisjoint(("profiles", *PATH_OPTIONS)):
            raise ValueError(TWO_SOURCES)
        if self.network is not None and self.device is None:
            raise ValueError(MEASURED_NETWORK)
        if self.trainer not in ("galvatron", "paddlefleet") and (self.max_virtual_pp_deg or 1) > 1:
            raise ValueError(f"max_virtual_pp_deg: for {self.trainer} only one chunk a stage is searched; give 1")
        if self.trainer != "galvatron" and self.offload_activations:
            raise ValueError(f"offload_activations: is not searched for {self.trainer}; leave it out")
        if unknown := [name for name in self._listed() if name not in DIMENSIONS]:
            names = ", ".join(DIMENSIONS)
            raise ValueError(f"search_space: {unknown[0]!r} is unknown; use full, 3d, or join some of {names} by +")
        return self

    def _listed(self) -> tuple[str, ...]:
        presets = {"full": DIMENSIONS, "3d": ("dp", "tp", "pp")}
        return presets.get(self.search_space) or tuple(self.search_space.split("+"))

    def allows(self, dimension: str) -> bool:
        """Whether a dimension (one of DIMENSIONS) is searched. Ulysses and the vocabulary's degree belong to tp."""
        listed = dimension in self._listed() or (dimension in ("sp", "vtp") and "tp" in self._listed())
        if not listed or getattr(self, f"disable_{dimension}"):
            return False
        return dimension not in ("tp", "sp") or dimension in self.sp_space.split("+")

    @staticmethod
    def wide_enough(plan: Plan) -> dict[str, Any]:
        """Options that allow all degrees of a plan."""
        return {
            "sp_space": "tp+sp" if any(layer.ulysses for layer in plan.layers) else "tp",
            "max_cp_deg": max(strategy.context for strategy in (*plan.layers, plan.vocab)),
            "max_etp_deg": max(layer.etp for layer in plan.layers),
        }

    @property
    def most_context(self) -> int:
        """Most ranks that split a sample. Default: several for long samples, but 1 with measured profiles, which may
        lack their messages, and for other trainers."""
        return self.max_cp_deg or (MOST_CONTEXT if self._is_free and (self.seq_length or 0) >= LONG else 1)

    @property
    def most_chunks(self) -> int:
        """Most chunks of layers a stage. Default: several; one with profiles measured by Galvatron and for other
        trainers, whose plans have one."""
        return self.max_virtual_pp_deg or (MOST_CHUNKS if self._is_free else 1)

    @property
    def _is_free(self) -> bool:
        return self.device is not None and self.trainer == "galvatron"

    @property
    def one_strategy(self) -> bool:
        """Whether all layers share one strategy."""
        return not self.fine_grained_mode or self.search_space == "3d"

    @property
    def reserve_mib(self) -> float:
        """Memory reserved on each device."""
        return self.context_mib or 0.0

    @property
    def budget_mib(self) -> float:
        """Memory for a plan on each device."""
        return self.memory_gib * 1024 - self.reserve_mib

    @property
    def memory_gib(self) -> float:
        """Memory of a device. Raises UserError where it is not settled."""
        if self.memory_constraint is None:
            raise UserError("memory_constraint: missing; give the memory of a GPU in GiB")
        return self.memory_constraint

    @property
    def largest_bsz(self) -> int:
        return self.min_bsz if self.max_bsz is None else self.max_bsz

    @property
    def batches(self) -> list[int]:
        """Global batches tried, in samples."""
        if self.settle_bsz != -1:
            return [self.settle_bsz]
        return list(range(self.min_bsz, self.largest_bsz + 1, self.bsz_scale))

    def degrees(self, size: int, tensor: str) -> list[Degrees]:
        """Degrees of layers (`tensor` "tp") or of the vocabulary ("vtp") on a stage of `size` ranks."""
        limits = {
            Axis.TENSOR: self.max_tp_deg if self.allows(tensor) else 1,
            Axis.ULYSSES: self.max_tp_deg if self.allows("sp") else 1,
            Axis.CONTEXT: self.most_context if self.allows("cp") else 1,
        }
        fewest = 1 if self.allows("dp") or not self.allows(tensor) else size  # ranks
        return [
            split
            for split in every_degrees(size)
            if split.ranks >= fewest and all(degree <= limits[axis] for axis, degree in split.axes)
        ]

    def expert_degrees(self, size: int) -> list[tuple[int, int]]:
        """Degrees (ep, etp) of the experts of layers on a stage of `size` ranks."""
        most_ep = (self.max_ep_deg or size) if self.allows("ep") else 1
        most_etp = self.max_etp_deg if self.allows("etp") and self.trainer == "galvatron" else 1
        return [(ep, etp) for ep in divisors(size) for etp in divisors(size // ep) if ep <= most_ep and etp <= most_etp]

    def shardings(self, sharing: int, apart: int) -> list[int | None]:
        """Numbers of ranks over which ZeRO may shard the weights of `sharing` ranks at this distance from each
        other."""
        parts = {int(nodes) * self.num_gpus_per_node // apart for nodes in self.sharding_sizes.split(",")}
        return [None, *(ranks for ranks in sorted(parts) if 1 < ranks < sharing and sharing % ranks == 0)]

    @property
    def recomputes(self) -> tuple[Recompute, ...]:
        """Recompute choices of layers."""
        if not self.allows("ckpt"):
            return (Recompute.NONE,)
        parts = MODULES if self.trainer == "paddlefleet" else PARTLY if self.recompute_parts else ()
        return (Recompute.NONE, Recompute.FULL, *parts)

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        return (self.pipeline_type,) if self.pipeline_type else tuple(Schedule)

    @property
    def assumptions(self) -> Assumptions:
        by_default = self.amp_master_grad is None and self.mixed_precision.mixed
        return Assumptions(
            self.sequence_parallel,
            self.mixed_precision,
            not self.no_async_grad_reduce,
            self.seq_length,
            by_default or self.amp_master_grad,
            self.use_flash_attention,
            offload_optimizer=self.offload_optimizer or None,
            products=self.products,
        )

    @property
    def profile_arguments(self) -> dict[str, Any]:
        """Arguments of `cost_model.load` besides model, cluster and assumptions."""
        arguments = {name: getattr(self, name) for name in PROFILE_OPTIONS}
        return arguments | {"folder": self.profiles, "options": self.cost_options}

    @property
    def cost_options(self) -> CostOptions:
        """The task, the reserve and the buffer for the cost model."""
        buffer = not self.no_global_memory_buffer
        theirs = self.trainer != "galvatron"
        return replace(
            super().cost_options, context_mib=self.reserve_mib, global_memory_buffer=buffer, masters_first=theirs
        )

    @property
    def priced_by(self) -> tuple[object, ...]:
        """The options that prices depend on, besides model and profiles."""
        return self.cost_options, self.assumptions, self.num_nodes, self.num_gpus_per_node, self.network


def _modes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Modes by profile_mode. Memory has no mode `batch`: it grows in proportion to the batch."""
    mode = values.get("profile_mode")
    if mode not in ("static", "batch", "sequence"):
        return {}  # unset, or reported by the field
    return {"time_profile_mode": mode, "memory_profile_mode": "static" if mode == "batch" else mode}


def _batches(values: Mapping[str, Any]) -> dict[str, Any]:
    """The default batch if none is given."""
    is_range = any(values.get(name) is not None for name in ("min_bsz", "max_bsz"))
    return {} if is_range or str(values.get("settle_bsz", -1)) != "-1" else {"settle_bsz": BATCH}


def _cluster(values: Mapping[str, Any]) -> dict[str, Any]:
    """num_nodes, num_gpus_per_node and world_size from any two of them or fewer, with the data sheet's nodes.

    Raises UserError for more GPUs in a node than those have."""
    device = values.get("device")
    sheet = load_data_sheet(device) if isinstance(device, str) else None
    most = sheet.gpus_per_node if sheet else GPUS_PER_NODE
    try:
        nodes, gpus, world = (
            int(values[name]) if values.get(name) is not None else None
            for name in ("num_nodes", "num_gpus_per_node", "world_size")
        )
    except (TypeError, ValueError, OverflowError):
        return {}  # the fields report the fault
    if world is None:
        nodes, gpus = (1 if nodes is None else nodes), (most if gpus is None else gpus)
        world = nodes * gpus or 1  # no field says how many
    else:
        if gpus is None:
            gpus = world // nodes if nodes else min(world, most)
        number = nodes or "whole number of"
        if nodes is None:
            nodes = world // gpus if gpus else 0
        if nodes * gpus != world:
            raise ValueError(f"world_size: {world} GPUs are no {number} nodes of {gpus}; make them agree")
    if sheet and gpus > most:
        raise UserError(
            f"num_gpus_per_node: {gpus}, but a node of {sheet.name} has {most}; set num_nodes to "
            f"{-(-world // most)}, or give a data sheet of nodes with {gpus}"
        )
    return {"num_nodes": nodes, "num_gpus_per_node": gpus, "world_size": world}
