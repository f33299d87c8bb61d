"""Every option of the search and of the task that it prices, under one canonical name; the seeds' names are aliases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from re import fullmatch
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from ..base.errors import UserError
from ..base.limits import MOST_SAMPLES, Count, Layers, Number, Positive, Ranks, Samples, Size
from ..cost_model import CostOptions, Task
from ..model.layer import MODULES, PARTLY
from ..options.group import Options
from ..options.prices import RANK, TWO_SOURCES, Kind
from ..plan import Assumptions, DataParallel, Plan, Precision, Recompute, Schedule
from ..plan.mesh import Axis, Degrees, divisors, every_degrees
from ..plan.strategy import IMBALANCE, IMBALANCE_BOUND
from ..profiles.analytic import GROUPED, ONE_BY_ONE
from ..profiles.data_sheet import load_data_sheet

DIMENSIONS = ("dp", "sdp", "tp", "sp", "cp", "ep", "etp", "pp", "ckpt", "vtp")

PATH_OPTIONS = (
    "time_profiling_path",
    "memory_profiling_path",
    "allreduce_bandwidth_config_path",
    "p2p_bandwidth_config_path",
    "overlap_coe_path",
    "sp_time_path",
)
PROFILE_OPTIONS = (  # arguments of `cost_model.load`
    "time_profile_mode",
    "memory_profile_mode",
    "profile_dialect",
    "allow_foreign_profiles",
    *PATH_OPTIONS,
)
GPUS_PER_NODE = 8  # where only world_size is given, and is larger
# Defaults of fit, search and what-if.
BATCH = 256  # global batch size, samples

# Limits: a value beyond them is a slip of the pen, and would take hours or all memory.
MOST_BATCHES, MOST_PLANS = 10_000, 1000


def _settled(number: int) -> int:
    if number == -1 or 0 < number <= MOST_SAMPLES:
        return number
    raise ValueError(f"must be a number above 0 and at most {MOST_SAMPLES}, or -1 for any")


Settled = Annotated[int, AfterValidator(_settled)]
SlowerPercent = Annotated[float, Field(ge=0, le=100)]
Imbalance = Annotated[float, Field(ge=1, le=1e4)]


class TaskOptions(Options):
    """The weights that learn, and the models computed in addition."""

    task: Kind = Field(
        "pretrain",
        description="the task: pretrain; sft and dpo (same cost: dpo's reference is a table); lora (adapters)",
    )
    lora_rank: Size | None = Field(
        None,
        description=f"rank of the adapters; unset: {RANK} with lora; if given, dpo trains adapters, not all weights",
    )
    document_tokens: Positive | None = Field(
        None,
        description="packed rows: tokens of the document that a token stands in, on average over rows; unset: as "
        "dataset_name_or_path has them, else all of a row",
    )
    offload_optimizer: bool = Field(
        False, description="keep the optimizer's states in the hosts' memory between updates; planned only"
    )
    moe_imbalance: Imbalance = Field(
        IMBALANCE, description="rows of the rank whose experts get most, over the mean, by which times are priced"
    )
    moe_imbalance_bound: Imbalance = Field(
        IMBALANCE_BOUND, description="the same for the bound of memory, which a plan must keep within"
    )
    experts_one_by_one: bool = Field(
        False, description="price a rank's experts as run one after the other, not by grouped kernels"
    )

    @model_validator(mode="after")
    def _ranked(self) -> Self:
        if self.lora_rank is not None and self.task not in ("lora", "dpo"):
            raise ValueError(f"lora_rank: {self.task} trains all weights; give --task lora or dpo, or leave it out")
        return self

    @property
    def priced(self) -> CostOptions:
        """The task for the cost model."""
        return CostOptions(
            task=self.trained,
            offload_optimizer=self.offload_optimizer,
            imbalance=self.moe_imbalance,
            imbalance_bound=max(self.moe_imbalance, self.moe_imbalance_bound),
            kernels=ONE_BY_ONE if self.experts_one_by_one else GROUPED,
            padded=True,
        )

    @property
    def trained(self) -> Task:
        rank = (self.lora_rank or RANK) if self.task == "lora" else self.lora_rank
        return Task(rank, self.document_tokens)


class SearchOptions(TaskOptions):
    """The search space, its limits and its assumptions."""

    panel = "Search"

    # The cluster and what fits.
    num_nodes: Ranks = Field(1, description="number of nodes; all are the same")
    num_gpus_per_node: Ranks = Field(
        GPUS_PER_NODE, description=f"GPUs per node; unset: as the data sheet of device has, else {GPUS_PER_NODE}"
    )
    world_size: Ranks = Field(
        GPUS_PER_NODE,
        description="number of devices; sets num_nodes or num_gpus_per_node if one of them is unset",
    )
    profile_gpu_num: Ranks | None = Field(
        None, description="number of devices that were profiled; refused unless it equals world_size"
    )
    device: str | None = Field(
        None, description="data sheet to derive the profiles from, such as h100-80gb; unset: measured profiles are read"
    )
    memory_constraint: Positive | None = Field(
        None, description="memory of a GPU, GiB; unset: all that it has by its data sheet or the profiles"
    )
    context_mib: Number | None = Field(
        None,
        description="memory left free on a device, MiB; unset: for CUDA, NCCL and allocator on GPUs, else 0",
    )

    # Batches.
    min_bsz: Samples = Field(8, description="smallest global batch size that is tried, samples")
    max_bsz: Samples | None = Field(
        None, description="largest global batch size that is tried, samples; unset: min_bsz"
    )
    bsz_scale: Samples = Field(8, description="step (not ratio) from one global batch size to the next, samples")
    settle_bsz: Settled = Field(
        -1, description=f"global batch size, samples; -1: min_bsz to max_bsz; unset, like these two: {BATCH}"
    )
    settle_chunk: Settled = Field(
        -1, description="the only number of micro-batches that is tried; -1: all divisors of the batch size"
    )

    # The space.
    search_space: str = Field("full", description="full, 3d, or dimensions joined by +: " + ", ".join(DIMENSIONS))
    fine_grained_mode: bool = Field(True, description="0: one strategy for all layers")
    sp_space: Literal["tp", "tp+sp", "sp"] = Field(
        "tp", description="search tensor parallelism (tp), Ulysses (sp) or both (tp+sp)"
    )
    max_tp_deg: Ranks = Field(8, description="largest tensor-parallel or Ulysses degree")
    max_sp_deg: Ranks | None = Field(None, description="largest Ulysses degree; refused unless it equals max_tp_deg")
    max_cp_deg: Ranks = Field(1, description="largest number of ranks over which context parallelism splits a sample")
    max_ep_deg: Ranks | None = Field(
        None, description="largest number of ranks that share a layer's experts out among them; unset: one for each"
    )
    max_etp_deg: Ranks = Field(8, description="largest number of ranks that split each expert")
    max_pp_deg: Ranks = Field(16, description="largest number of pipeline stages")
    max_virtual_pp_deg: Layers = Field(
        1, description="largest number of layer chunks per stage (interleaved 1F1B); above 1 a gap may remain"
    )
    disable_dp: bool = Field(False, description="no data parallelism")
    disable_sdp: bool = Field(False, description="do not try zero3 in addition to default_dp_type")
    disable_tp: bool = Field(False, description="no tensor parallelism")
    disable_sp: bool = Field(False, description="no Ulysses")
    disable_cp: bool = Field(False, description="no context parallelism, for any max_cp_deg")
    disable_ep: bool = Field(False, description="all ranks of a stage have all experts of its layers")
    disable_etp: bool = Field(False, description="do not split experts")
    disable_pp: bool = Field(False, description="no pipeline")
    disable_ckpt: bool = Field(False, description="no recompute")
    recompute_parts: bool = Field(
        False, description="also try recomputing only norms, attention or MLP, besides nothing and whole layers"
    )
    disable_vtp: bool = Field(False, description="do not split embedding and LM head")
    embed_sdp: bool | None = Field(
        None, description="zero3 for embedding and LM head; 0: never; 1: where several ranks hold them; unset: searched"
    )
    tp_consec: bool = Field(True, description="0: also try tensor-parallel groups of strided ranks")
    pipeline_type: Schedule | None = Field(None, description="gpipe or pipedream_flush (1F1B); unset: both are tried")
    sharding_sizes: str = Field(
        "1", description="numbers of nodes within which ZeRO may shard, besides all ranks: 1,2; 0: all ranks alone"
    )
    default_dp_type: DataParallel = Field(
        DataParallel.ZERO2, description="data parallelism of layers without zero3: zero2 or ddp; zero3: all layers"
    )

    trainer: Literal["galvatron", "paddlenlp", "paddlefleet", "paddleformers"] = Field(
        "galvatron",
        description="whose trainer must be able to run the plan: galvatron, or paddlenlp, paddlefleet, paddleformers: "
        "even stages, one strategy for all layers",
    )

    # Assumptions of prices.
    seq_length: Size | None = Field(None, description="sequence length")
    sequence_parallel: bool = Field(True, description="Megatron-SP in every layer with tp > 1")
    mixed_precision: Precision = Field(Precision.BF16, description="type of weights and activations")
    no_async_grad_reduce: bool = Field(
        False, description="reduce gradients after every micro-batch instead of once a step"
    )
    amp_master_grad: bool | None = Field(
        None, description="sum and reduce gradients in fp32; unset: yes in 16-bit training"
    )
    use_flash_attention: bool | None = Field(
        None, description="plan with Paddle's flash attention; unset: as in the memory profile, else left to training"
    )
    no_global_memory_buffer: bool = Field(
        False, description="do not count the buffer for Megatron-SP's gathered activations"
    )

    # Where the profiles are, and how they are read.
    profiles: Path = Field(
        Path("configs"), description="folder of the profile files; single files can be named by the options *_path"
    )
    profile_mode: Literal["static", "batch", "sequence"] | None = Field(
        None,
        description="sets time_profile_mode and memory_profile_mode if unset; batch: times by batch, memory static",
    )
    time_profile_mode: Literal["static", "batch", "sequence"] = Field(
        "static", description="how times are read: static, batch or sequence"
    )
    memory_profile_mode: Literal["static", "sequence"] = Field(
        "static", description="how memory is read: static or sequence"
    )
    profile_dialect: Literal["galvatron", "paddlenlp"] | None = Field(
        None, description="units of the memory file, galvatron's or paddlenlp's, where the file does not show them"
    )
    time_profiling_path: Path | None = Field(None, description="computation_profiling_*.json, or its folder")
    memory_profiling_path: Path | None = Field(None, description="memory_profiling_*.json, or its folder")
    allreduce_bandwidth_config_path: Path | None = Field(None, description="allreduce_bandwidth_*.json, or its folder")
    p2p_bandwidth_config_path: Path | None = Field(None, description="p2p_bandwidth_*.json, or its folder")
    overlap_coe_path: Path | None = Field(None, description="overlap_coefficient.json, or its folder")
    sp_time_path: Path | None = Field(None, description="sp_time_*.json, or its folder")
    allow_foreign_profiles: bool = Field(False, description="accept profiles of another model or device")

    # How it is searched.
    simplest_within: SlowerPercent = Field(
        0.5,
        description="per cent of the fastest plan's step time that a plan with fewer strategies may take more; 0: the "
        "fastest plan",
    )
    top_k: int = Field(
        1,
        ge=1,
        le=MOST_PLANS,
        description="number of plans to keep; no two share batch size, micro-batches, stages and schedule",
    )
    effort: Count = Field(
        100_000_000, description="largest number of passes simulated per family of plans; a gap may remain beyond it"
    )

    @field_validator("sharding_sizes", mode="before")
    @classmethod
    def _numbers_of_nodes(cls, value: Any) -> str:
        if not fullmatch(r"\d{1,5}(,\d{1,5})*", text := str(value).replace(" ", "")):
            raise ValueError("must be numbers of nodes joined by commas, such as 1,2; 0 for all ranks alone")
        return text

    @model_validator(mode="before")
    @classmethod
    def _spelled_out(cls, values: Any) -> Any:
        """profile_mode and world_size stand for other options; the batch is the usual one by default."""
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
        if self.trainer != "galvatron" and self.max_virtual_pp_deg > 1:
            raise ValueError(f"max_virtual_pp_deg: for {self.trainer} only one chunk a stage is searched; give 1")
        unknown = [name for name in self._listed() if name not in DIMENSIONS]
        if unknown:
            known = ", ".join(DIMENSIONS)
            raise ValueError(f"search_space: {unknown[0]!r} is unknown; use full, 3d, or join some of {known} by +")
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
        """Options that leave all degrees that a plan has."""
        return {
            "sp_space": "tp+sp" if any(layer.ulysses for layer in plan.layers) else "tp",
            "max_cp_deg": max(part.context for part in (*plan.layers, plan.vocab)),
            "max_etp_deg": max(layer.etp for layer in plan.layers),
        }

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
            Axis.CONTEXT: self.max_cp_deg if self.allows("cp") else 1,
        }
        fewest = 1 if self.allows("dp") or not self.allows(tensor) else size  # ranks
        return [
            one
            for one in every_degrees(size)
            if one.ranks >= fewest and all(degree <= limits[axis] for axis, degree in one.axes)
        ]

    def expert_degrees(self, size: int) -> list[tuple[int, int]]:
        """Degrees (ep, etp) of the experts of layers on a stage of `size` ranks."""
        most_ep = (self.max_ep_deg or size) if self.allows("ep") else 1
        most_etp = self.max_etp_deg if self.allows("etp") else 1
        return [(ep, etp) for ep in divisors(size) for etp in divisors(size // ep) if ep <= most_ep and etp <= most_etp]

    def shardings(self, sharing: int, apart: int) -> list[int | None]:
        """Ranks over which ZeRO may shard the weights that `sharing` ranks hold, so far apart from each other."""
        parts = {int(nodes) * self.num_gpus_per_node // apart for nodes in self.sharding_sizes.split(",")}
        return [None, *(part for part in sorted(parts) if 1 < part < sharing and sharing % part == 0)]

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
        summed = self.amp_master_grad
        if summed is None and self.mixed_precision is not Precision.FP32:
            summed = True
        return Assumptions(
            self.sequence_parallel,
            self.mixed_precision,
            not self.no_async_grad_reduce,
            self.seq_length,
            summed,
            self.use_flash_attention,
        )

    @property
    def profile_arguments(self) -> dict[str, Any]:
        """Arguments of `cost_model.load` besides model, cluster and assumptions."""
        given = {name: getattr(self, name) for name in PROFILE_OPTIONS}
        return given | {"folder": self.profiles, "options": self.cost_options}

    @property
    def cost_options(self) -> CostOptions:
        return replace(self.priced, context_mib=self.reserve_mib, global_memory_buffer=not self.no_global_memory_buffer)


def _modes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Modes by profile_mode. Memory has no mode `batch`: it grows in proportion to the batch."""
    mode = values.get("profile_mode")
    if mode not in ("static", "batch", "sequence"):
        return {}  # unset, or reported by the field
    return {"time_profile_mode": mode, "memory_profile_mode": "static" if mode == "batch" else mode}


def _batches(values: Mapping[str, Any]) -> dict[str, Any]:
    """The usual batch where none is given."""
    is_range = any(values.get(name) is not None for name in ("min_bsz", "max_bsz"))
    return {} if is_range or str(values.get("settle_bsz", -1)) != "-1" else {"settle_bsz": BATCH}


def _cluster(values: Mapping[str, Any]) -> dict[str, Any]:
    """num_nodes, num_gpus_per_node and world_size, from any two of them or fewer, on nodes as the data sheet has them.

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
