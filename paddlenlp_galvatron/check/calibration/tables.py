"""Tables (CSV) of published runs. Columns: docs/en/profile.md."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, sqrt
from pathlib import Path

from ...base.errors import UserError
from ...base.reading import read_text
from ...base.units import GIB_MIB
from ...model import ModelShape, Recompute, load_model
from ...model.config import preset_names
from ...model.shape import flops_per_token
from ...plan import Assumptions, Plan, Precision, uniform_plan
from ...plan.strategy import DataParallel
from ...plan.uniform import even_stages
from ...profiles.analytic import GROUPED, ONE_BY_ONE, ExpertKernels
from ...profiles.data_sheet import Stack, load_data_sheet, sheets_named
from .fit import MeasuredRun

Row = Mapping[str, str]
# PaddleFleet's sweeps: sequence length where none is given, micro-batches, and GPUs.
SWEEP_LENGTH, SWEEP_MICRO_BATCHES, SWEEP_GPUS, SWEEP_DEVICE = 4096, 64, 8, "h800"
SWEEP_MODELS = ("qwen3-8b", "qwen3-30b-a3b")  # where neither the row nor the file's name names one: dense, with experts
# PaddleFleet's MoE layer without grouped products (ModularMoELayer), by its source. With ep, DeepEP sends tokens, and
# an expert's gate and up are one product. A rank with all experts looks for the rows of each in a loop, and keeps them
# and what comes out.
SWEEP_KERNELS = {True: ExpertKernels(90, 3, once=True), False: ExpertKernels(90, 20, copies=2)}
# Calls for each expert in that loop in a later sweep (column release_grads): its rows, gate and up, activation, down,
# and the sum. No source of it was read; its one row agrees. From 2 to 20 calls, ep 1 stays slower than ep 2.
LATER_LOOP = 5
# Tokens of a document in the packed rows of the sweep with experts: chosen from 1,024 to 4,096 by three of its rows.
SWEEP_DOCUMENT = 2048
RECOMPUTE = {"none": Recompute.NONE, "": Recompute.NONE, "full": Recompute.FULL, "core_attn": Recompute.ATTENTION}
SECOND = "selective layer"  # every second layer
RECOMPUTE["norm+act"] = Recompute.NORMS  # and the activation between an expert's products
# Rows of the busiest rank over the mean, where a router chooses. Over a step, LAER-MoE's counts of 32 A100: 1.66 of 8
# experts and 1.73 of 16. The tokens of one sample prefer the same experts; of several samples and experts of a rank
# preferences cancel out, by the root of their number. One of each: fitted to LAER-MoE's two runs that have it, which
# predicts its two others, with two of each, within 11 %.
OF_A_STEP, OF_A_SAMPLE = 1.7, 3.0


# Columns that say how a run was made.
SETTINGS = (
    "sp",
    "grad32",
    "attention",
    "kernels",
    "stack",
    "cp_kind",
    "sharding_group",
    "network",
    "gathers",
    "device",
)
POSITIVE = re.compile(  # columns of sizes, and of measurements
    "(x_)?(gpus|tp|pp|vpp|cp|ep|seq|mbs|gbs|micro_batch|layers|hidden|ffn|heads|kv|vocab|lora_rank|sharding_group|network"
    "|step_s|step_ms|tok_s_gpu|tflops_gpu|peak_gib_(alloc|reserved)|(allocated|reserved)_gib)"
)
# Speed of FlashAttention in Triton over that of FlashAttention-2, which is 1.3 to 2.5 times as fast (arXiv:2307.08691,
# section 4.1).
TRITON = 0.55


@dataclass
class Table:
    """Runs of a file."""

    runs: list[MeasuredRun] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)  # name of a row, and what it needs


class _Unpriced(Exception):
    """A row needs something that the planner does not have, or that the row does not say."""


def read_table(path: Path, settings: Mapping[str, Mapping[str, str]] = {}, device: str | None = None) -> Table:
    """All rows of a file, or those of a `device`, given by its data sheet. `settings`: values of SETTINGS for the rows
    of a source, by the beginning of its name, where the file leaves them out, or names another device. Raises UserError
    for a file that is no such table."""
    if unknown := {column for one in settings.values() for column in one} - set(SETTINGS):
        raise UserError(f"{', '.join(sorted(unknown))}: no column of how a run was made; known: {', '.join(SETTINGS)}")
    rows = list(csv.DictReader(read_text(path).splitlines()))
    for row in rows:
        for source, parsed in settings.items():
            if row.get("source", "").startswith(source):
                row |= {column: value for column, value in parsed.items() if column == "device" or not row.get(column)}
    columns = set(rows[0]) if rows else set()
    read: Callable[[Mapping[str, str], str], MeasuredRun]
    if "step_ms" in columns and {"config", "run"} & columns:
        read = _of_sweep
    elif {"source", "model", "gpus"} <= columns:
        read = _of_collection
    else:
        raise UserError(
            f"{path}: no table of measured runs: has neither the columns config and step_ms nor source, model and gpus"
        )
    found = Table()
    for number, row in enumerate(rows, 2):
        if None in row:
            raise UserError(f"{path}: line {number}: has more cells than the table has columns; correct the row")
        name = row.get("config") or row.get("run") or f"{row.get('model')} ({row.get('source')})"
        try:
            _require_positive(row)
            run = read(row, path.stem)
            found.runs.append(replace(run, device=_sheet_of(run.device, device)))
        except _Unpriced as needs:
            found.skipped.append((name, str(needs)))
        except UserError as error:
            found.skipped.append((name, f"a plan that can run here: {error}"))
        except ZeroDivisionError:
            raise UserError(
                f"{path}: line {number} ({name}): tp x pp x cp is more than gpus; correct the row"
            ) from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f"{path}: line {number} ({name}): {error}; correct the row") from None
    return found


def _of_sweep(row: Row, table: str) -> MeasuredRun:
    """A row of a sweep on 8 H800. Its memory is rank 0's, which is on the first stage: with several stages the figures
    are too small for the logits of the last one, and agree with the first."""
    tp, pp, ep = int(row["tp"]), int(row["pp"]), int(row.get("ep") or 1)
    shape = load_model(row.get("model") or _preset_of(table) or SWEEP_MODELS["ep" in row])
    megatron_sp = row["sp"] == "1" if "sp" in row else tp > 1
    length, micro_batch = int(row.get("seq") or SWEEP_LENGTH), int(row.get("micro_batch") or 1)
    assumed = Assumptions(megatron_sp, Precision.BF16, True, length, True, True)
    batch = SWEEP_GPUS // tp // pp * SWEEP_MICRO_BATCHES * micro_batch
    etp = tp if shape.experts and ep == 1 else 1
    plan = _plan(
        shape, assumed, gpus=SWEEP_GPUS, tp=tp, pp=pp, ep=ep, etp=etp, micro_batch=micro_batch, batch=batch, zero=1
    )
    how, each = row["recompute"], int(row["recompute_layers"] or 0)
    layers = list(plan.layers)
    for stage in range(plan.pipeline if how != "none" else 0):
        own = plan.stage_layers(stage)
        for layer in own if how == "uniform" else own[:each]:  # block: the first `each` of each stage
            layers[layer] = replace(layers[layer], recompute=Recompute.FULL)
    kernels = SWEEP_KERNELS[ep > 1]
    if ep == 1 and row.get("release_grads") == "1":
        kernels = kernels._replace(expert=LATER_LOOP)
    return MeasuredRun(
        row.get("config") or row["run"],
        "PaddleFleet",
        row.get("device") or SWEEP_DEVICE,
        shape,
        replace(plan, layers=tuple(layers)),
        float(row["step_ms"]) / 1000,
        float(row["allocated_gib"]) * GIB_MIB,
        float(row["reserved_gib"]) * GIB_MIB,
        stage=0,
        offload_optimizer=row["offload_optimizer"] == "1",
        imbalance=1.0,  # its router's default: the load is forced to be even
        kernels=kernels if shape.experts else GROUPED,
        document_tokens=SWEEP_DOCUMENT if shape.experts else None,
        keeps_gathered=True,
    )


def _of_collection(row: Row, table: str) -> MeasuredRun:
    """A row of any source. Speed is a step's seconds, or tokens or operations of a GPU and second."""
    row = {name.removeprefix("x_"): value for name, value in row.items() if value or not name.startswith("x_")}
    tp, pp, chunks, cp, ep = (int(row.get(name) or 1) for name in ("tp", "pp", "vpp", "cp", "ep"))
    gpus, note = int(row["gpus"]), row.get("routing_or_note") or ""
    if row["precision"] not in ("bf16", "fp16"):
        raise _Unpriced(f"precision {row['precision'] or '(not published)'}")
    if not (row["mbs"] and row["gbs"] and row["seq"]):
        raise _Unpriced("sizes of batch, micro-batch and sample, which its source does not publish")
    if "overlap" in note and "no EP overlap" not in note:
        raise _Unpriced("experts' exchange during the compute of another micro-batch")
    how = _word(row, "recompute", (*RECOMPUTE, SECOND))
    ring = _word(row, "cp_kind", ("ring", "gather", "ulysses")) != "ulysses"
    attention = _word(row, "attention", ("flash", "triton", "unfused"))
    flash = attention != "unfused"
    fused = _word(row, "kernels", ("fused", "plain")) != "plain"
    shape = _listed(row, tp) if row.get("layers") else _known(row["model"])
    zero, sharding = _sharding(row, note, dp=gpus // tp // pp // cp)
    megatron_sp = row.get("sp") != "0"
    assumed = Assumptions(
        megatron_sp,
        Precision(row["precision"]),
        zero < 3,
        int(row["seq"]),
        fp32_gradients=row.get("grad32") != "0",
        flash_attention=flash,
        fused_rope=fused and flash,
        fused_rms_norm=fused and flash,
    )
    plan = _plan(
        shape,
        assumed,
        gpus=gpus,
        tp=tp if ring else cp,
        pp=pp,
        micro_batch=int(row["mbs"]),
        batch=int(row["gbs"]),
        zero=zero,
        sharding=sharding,
        chunks=chunks,
        ep=ep,
        cp=cp if ring else 1,
    )
    layers = (
        replace(layer, recompute=Recompute.FULL if how == SECOND and number % 2 else RECOMPUTE.get(how, Recompute.NONE))
        for number, layer in enumerate(plan.layers)
    )
    plan = replace(plan, layers=tuple(layers))
    kernels = ONE_BY_ONE if "no grouped GEMM" in note else GROUPED
    return MeasuredRun(
        row["model"],
        row["source"],
        row.get("device") or "",
        shape,
        plan,
        _step_s(row, shape, plan),
        float(row["peak_gib_alloc"]) * GIB_MIB if row.get("peak_gib_alloc") else None,
        float(row["peak_gib_reserved"]) * GIB_MIB if row.get("peak_gib_reserved") else None,
        adapter_rank=_adapter_rank(row),
        kept_bytes=None if flash else _unfused_kept_bytes(shape, megatron_sp),
        imbalance=_imbalance(shape, plan) if "real routing" in note else 1.0,  # benchmarks force an even load
        kernels=kernels._replace(once="DeepEP" in note or "HybridEP" in note),
        stack=Stack(stack) if (stack := _word(row, "stack", list(Stack))) else None,
        attention_speed=TRITON if attention == "triton" else 1.0,
        network=float(row["network"]) if row.get("network") else None,
        keeps_gathered=_word(row, "gathers", ("again", "kept")) == "kept",
    )


def _imbalance(shape: ModelShape, plan: Plan) -> float:
    """Rows of the busiest rank over the mean in a micro-batch, where a router chooses."""
    layer = plan.layers[0]
    samples = plan.micro_batch / plan.dp(layer) * max(layer.ep / layer.tp, 1)  # of the ranks that exchange rows
    return max(OF_A_STEP, 1 + (OF_A_SAMPLE - 1) / sqrt(samples * shape.experts / layer.ep))


def _word(row: Row, column: str, known: Sequence[str]) -> str:
    """The row's word in a column, of which the planner knows these; empty: it is not given."""
    if (word := row.get(column) or "") and word not in known:
        raise _Unpriced(f"{column} {word}")
    return word


def _require_positive(row: Row) -> None:
    """Raise ValueError for a number that must be above 0."""
    for column, value in row.items():
        if value and POSITIVE.fullmatch(column) and not 0 < float(value) < inf:
            raise ValueError(f"{column} is {value}, which must be above 0")


def _sheet_of(device: str, asked: str | None) -> str:
    """The data sheet of a device as a table names it, such as A100-80G: `asked`, by its name or its file's, else one
    that ships."""
    sheet, file = (load_data_sheet(asked), Path(asked)) if asked else (None, None)
    if asked and sheet and file and (not device or sheet.is_named(device) or device in (file.name, file.stem)):
        return asked
    found = sheets_named(device)
    if len(found) != 1:
        needed = f"a data sheet of {device or 'its device, which is not published'}"
        raise _Unpriced(needed + (f"; that of {asked} is called {sheet.name}" if sheet else ""))
    if sheet:
        raise _Unpriced(f"--device {found[0]}")
    return found[0]


def _sharding(row: Row, note: str, dp: int) -> tuple[int, int | None]:
    """ZeRO's stage, and the ranks that share its states where those are not all `dp` that hold the same weights."""
    parsed = re.match(r"(?:zero|stage|fsdp)(\d)?", row["zero"])
    zero = int(parsed[1] or 3) if parsed else 0
    size = row.get("sharding_group") or ("8" if "sharded within a node" in note else "")
    return zero, int(size) if size and zero and int(size) < dp else None


def _plan(
    shape: ModelShape,
    assumed: Assumptions,
    *,
    gpus: int,
    tp: int,
    pp: int,
    micro_batch: int,
    batch: int,
    zero: int,
    sharding: int | None = None,
    chunks: int = 1,
    ep: int = 1,
    etp: int = 1,
    cp: int = 1,
) -> Plan:
    """`micro_batch`: samples of one data-parallel rank. ZeRO-1 is our zero2 whose gradients are reduced once a step:
    they are whole, and the optimizer's states are sharded."""
    kind = (DataParallel.DDP, DataParallel.ZERO2, DataParallel.ZERO2, DataParallel.ZERO3)[zero]
    plan = uniform_plan(
        layers=shape.layers,
        dense_layers=shape.dense_layers,
        world_size=gpus,
        pp_deg=pp,
        global_tp_deg=tp,
        vocab_tp=tp,
        global_train_batch_size=batch,
        chunks=batch // (gpus // tp // pp // cp * micro_batch),
        default_dp_type=DataParallel.ZERO2 if kind is DataParallel.ZERO2 else DataParallel.DDP,
        sdp=kind is DataParallel.ZERO3,
        global_ep_deg=ep,
        global_tp_of_ep_deg=etp,
        global_cp_deg=cp,
        global_sharding_deg=sharding,
        assumed=assumed,
    )
    return replace(plan, stages=even_stages(shape.layers, pp * chunks), chunks=chunks)


def _preset_of(table: str) -> str:
    """The longest preset's name that the file's name has, or none."""
    return max((name for name in preset_names() if name in table.lower()), key=len, default="")


def _adapter_rank(row: Row) -> int | None:
    """The rank of the row's LoRA adapters; None: all weights learn."""
    if not row["model"].endswith(" LoRA"):
        return None
    if not row.get("lora_rank"):
        raise _Unpriced("the rank of its adapters, which its source does not publish")
    return int(row["lora_rank"])


def _known(model: str) -> ModelShape:
    """A preset, also with fewer layers, or more and smaller experts: mixtral-8x7b-e16k4 (24 layers)."""
    model = model.removesuffix(" SFT").removesuffix(" LoRA")
    parsed = re.fullmatch(r"(.*?)(?:-e(\d+)k(\d+))?(?: \((\d+) layers\))?", model.lower())
    if parsed is None or parsed[1] not in preset_names():
        raise _Unpriced(f"the model {model}, which is no preset")
    shape = load_model(parsed[1])
    if parsed[2]:
        experts, chosen = int(parsed[2]), int(parsed[3])
        size = shape.expert_size * shape.experts // experts
        shape = replace(shape, experts=experts, experts_per_token=chosen, expert_size=size)
    return shape.having(int(parsed[4])) if parsed[4] else shape


def _step_s(row: Row, shape: ModelShape, plan: Plan) -> float:
    if row["step_s"]:
        return float(row["step_s"])
    seq = plan.assumed.seq_length or 0
    tokens = plan.global_batch * seq / plan.world_size
    if row["tok_s_gpu"]:
        return tokens / float(row["tok_s_gpu"])
    if row["tflops_gpu"]:
        return tokens * flops_per_token(shape, seq) / float(row["tflops_gpu"]) / 1e12
    raise _Unpriced("a speed")


def _listed(row: Row, tp: int) -> ModelShape:
    """The shape that the row lists. A plain MLP of 4 times the width counts as a gated one of 8/3: with as many weights
    and operations."""
    hidden, heads = int(row["hidden"]), int(row["heads"])
    inner = int(row["ffn"]) if row.get("ffn") else round(8 * hidden / 3 / tp) * tp
    sizes = int(row["layers"]), hidden, inner, heads, int(row.get("kv") or heads), int(row["vocab"]), int(row["seq"])
    return ModelShape(row["model"], "llama", *sizes, tied_embeddings=row.get("tied") != "0")


def _unfused_kept_bytes(shape: ModelShape, megatron_sp: bool) -> Callable[[int, int], float]:
    """Activation bytes of a layer of GPT with plain attention and dropout a token and rank: Korthikanti et al.
    (arXiv:2205.05198), table 2, at a width of two bytes. Norms and dropouts are split with Megatron-SP alone."""
    whole = 0 if megatron_sp else 10
    return lambda seq, tp: shape.hidden_size * (whole + (34 - whole) / tp) + 5 * shape.heads * seq / tp
