"""Measured runs from any source: a training log with its plan, a validation, or a table (CSV) with the columns of
docs/en/profile.md."""

import csv
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from ...base import GIB_MIB, UserError
from ...base.reading import read_json, read_text
from ...model import ModelShape, Recompute, load_model, preset_names
from ...model.shape import flops_per_token
from ...options.uniform import UniformOptions
from ...plan import Assumptions, DataParallel, Plan, Precision, plan_from_dict, read_plan
from ...plan.uniform import even_stages
from ...profiles.data_sheet import Stack, load_data_sheet, sheets_named
from ...report.measured import WARM_UP_STEPS, stage_peaks_mib
from ..run_log import is_time, steps_under
from .fit import MeasuredRun, expected

Row = Mapping[str, str]  # an absent column is empty
NEEDED = {"source", "model", "gpus"}
RECOMPUTE = {"none": Recompute.NONE, "full": Recompute.FULL, "core_attn": Recompute.ATTENTION}
RECOMPUTE["norm+act"] = Recompute.NORMS  # also the activation between an expert's products
ZERO = {"none": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3}
# ZeRO-1 is our zero2 with one gradient reduction a step: whole gradients, sharded optimizer states.
DEFAULT_DP_TYPES = (DataParallel.DDP, DataParallel.ZERO2, DataParallel.ZERO2, DataParallel.DDP)
SECOND = "selective layer"  # recompute of every second layer
# Columns of words and their values; an empty cell means the first value.
WORDS = {
    "zero": tuple(ZERO),
    "recompute": (*RECOMPUTE, SECOND),
    "attention": ("flash", "triton", "unfused", "plain"),
    "kernels": ("fused", "plain"),
    "cp_kind": ("gather", "ring", "ulysses"),
    "gathers": ("again", "kept"),
    "loss": ("plain", "fused"),
    "stack": ("", *Stack),
    "gpt": ("0", "1"),
    **dict.fromkeys(("sp", "grad32", "tied", "overlap"), ("1", "0")),
}
POSITIVE = re.compile(  # columns of sizes, and of measurements
    "gpus|tp|pp|vpp|cp|ep|seq|mbs|gbs|layers|hidden|ffn|heads|kv|vocab|lora_rank|sharding_group|network"
    "|step_s|tok_s_gpu|tflops_gpu|peak_gib_(alloc|reserved)"
)
# Speed of FlashAttention in Triton over that of FlashAttention-2, which is 1.3 to 2.5 times as fast (arXiv:2307.08691,
# section 4.1).
TRITON = 0.55
# Bytes per score that attention without flash writes and reads again, in 16 bits: softmax, dropout and its mask with
# Megatron's fused softmax; with separate kernels also raw, scaled and masked scores.
SCORE_BYTES = {"unfused": 5, "plain": 10}


@dataclass
class Table:
    """Runs of a file."""

    runs: list[MeasuredRun] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)  # name of a row, and what it needs


class _Unpriced(Exception):
    """A row needs a feature that the planner lacks, or lacks a value."""


def read_table(path: Path, device: str | None = None) -> Table:
    """All rows of a file, or those of a `device`, given by its data sheet. Raises UserError for any other file."""
    reader = csv.DictReader(read_text(path).splitlines(), restval="")
    rows = list(reader)
    if not rows or not NEEDED.issubset(rows[0]):
        raise UserError(f"{path}: no table of measured runs: lacks the columns source, model and gpus")
    table = Table()
    for number, row in enumerate(rows, 2):
        if None in row:
            raise UserError(f"{path}: line {number}: has more cells than the table has columns; correct the row")
        cells = _Cells({column.removeprefix("x_"): value for column, value in row.items() if value})
        name = f"{cells['model']} ({cells['source']})"
        try:
            for column, value in cells.items():
                if POSITIVE.fullmatch(column) and not 0 < float(value) < inf:
                    raise ValueError(f"{column} is {value}, which must be above 0")
            run = _run_of(cells)
            run = replace(run, device=_sheet_of(run.device, device))
            expected(run, load_data_sheet(run.device))
            table.runs.append(run)
        except _Unpriced as needs:
            table.skipped.append((name, str(needs)))
        except UserError as error:
            table.skipped.append((name, f"a plan that can run here: {error}"))
        except ValueError as error:
            raise UserError(f"{path}: line {number} ({name}): {error}; correct the row") from None
    return table


class _Cells(dict[str, str]):
    """The cells of a row by column. Raises _Unpriced for a word that the planner does not know."""

    def __missing__(self, column: str) -> str:
        return ""

    def word(self, column: str) -> str:
        word = self[column] or WORDS[column][0]
        if word not in WORDS[column]:
            raise _Unpriced(f"{column} {word}")
        return word

    def number(self, column: str) -> int | None:
        return int(self[column]) if self[column] else None


def _run_of(row: _Cells) -> MeasuredRun:
    is_fp8 = row["precision"].startswith(("fp8", "mxfp8"))  # scales per tensor or per block, by the recipe's name
    if not is_fp8 and row["precision"] not in ("bf16", "fp16"):
        raise _Unpriced(f"precision {row['precision'] or '(not published)'}")
    if not (row["mbs"] and row["gbs"] and row["seq"]):
        raise _Unpriced("sizes of batch, micro-batch and sample, which its source does not publish")
    recompute, attention = row.word("recompute"), row.word("attention")
    flash, megatron_sp = attention in ("flash", "triton"), row.word("sp") == "1"
    fused = flash and row.word("kernels") == "fused"
    zero = ZERO[row.word("zero")]
    assumed = Assumptions(
        megatron_sp,
        Precision.BF16 if is_fp8 else Precision(row["precision"]),
        zero < 3,
        int(row["seq"]),
        fp32_gradients=row.word("grad32") == "1",
        flash_attention=flash,
        fused_rope=fused,
        fused_rms_norm=fused,
        products="fp8" if is_fp8 else None,
    )
    shape = _shape(row)
    plan = _plan(row, shape, assumed, zero)
    layers = (
        Recompute.FULL if recompute == SECOND and number % 2 else RECOMPUTE.get(recompute, Recompute.NONE)
        for number in range(shape.layers)
    )
    plan = replace(
        plan, layers=tuple(replace(layer, recompute=parts) for layer, parts in zip(plan.layers, layers, strict=True))
    )
    stack = row.word("stack")
    return MeasuredRun(
        row["model"],
        row["source"],
        row["device"],
        shape,
        plan,
        _step_s(row, shape, plan),
        float(row["peak_gib_alloc"]) * GIB_MIB if row["peak_gib_alloc"] else None,
        float(row["peak_gib_reserved"]) * GIB_MIB if row["peak_gib_reserved"] else None,
        adapter_rank=row.number("lora_rank"),
        kept_bytes=None if flash else _unfused_kept_bytes(shape, megatron_sp, SCORE_BYTES[attention]),
        imbalance=1.0,  # benchmarks force an even load
        stack=Stack(stack) if stack else None,
        attention_speed=TRITON if attention == "triton" else 1.0,
        network=float(row["network"]) if row["network"] else None,
        keeps_gathered=row.word("gathers") == "kept",
        loss_in_place=row.word("loss") == "fused",
        overlaps=row.word("overlap") == "1",
        keeps_keys=row.word("cp_kind") == "gather",
    )


def _plan(row: _Cells, shape: ModelShape, assumed: Assumptions, zero: int) -> Plan:
    gpus, batch = int(row["gpus"]), int(row["gbs"])
    tp, pp, chunks, cp, ep = (row.number(name) or 1 for name in ("tp", "pp", "vpp", "cp", "ep"))
    if not (ranks := gpus // (tp * pp * cp)):
        raise _Unpriced(f"{tp * pp * cp} gpus for its tp x pp x cp, and has {gpus}")
    sharding = row.number("sharding_group")
    if ulysses := row.word("cp_kind") == "ulysses" and tp == 1:
        tp, cp = cp, 1
    options = UniformOptions(
        pp_deg=pp,
        global_tp_deg=tp,
        vocab_tp=tp,
        use_ulysses=ulysses,
        global_train_batch_size=batch,
        chunks=batch // (ranks * int(row["mbs"])),
        default_dp_type=DEFAULT_DP_TYPES[zero],
        sdp=zero == 3,
        global_ep_deg=ep,
        global_cp_deg=cp,
        global_sharding_deg=sharding if zero and sharding and sharding < ranks else None,
    )
    plan = options.plan(shape.layers, gpus, assumed, shape.dense_layers)
    return replace(plan, stages=even_stages(shape.layers, pp * chunks), chunks=chunks)


def _sheet_of(device: str, requested: str | None) -> str:
    """The data sheet of a device as a table names it, such as A100-80G: `requested` if its name or its file's matches,
    else a sheet that ships."""
    sheet, file = (load_data_sheet(requested), Path(requested)) if requested else (None, None)
    if requested and sheet and file and (not device or sheet.is_named(device) or device in (file.name, file.stem)):
        return requested
    sheets = sheets_named(device)
    if len(sheets) != 1:
        needed = f"a data sheet of {device or 'its device, which is not published'}"
        raise _Unpriced(needed + (f"; that of {requested} is called {sheet.name}" if sheet else ""))
    if sheet:
        raise _Unpriced(f"--device {sheets[0]}")
    return sheets[0]


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


def _shape(row: _Cells) -> ModelShape:
    """A preset, possibly with fewer layers, as in `mixtral-8x7b (16 layers)`, or the listed shape, without experts. A
    plain MLP counts as a gated MLP of 2/3 of its width, which has as many weights and operations."""
    name, _, layers = row["model"].lower().partition(" (")
    preset = load_model(name) if name in preset_names() else None
    if not row["layers"] or (preset and preset.experts):
        count = re.fullmatch(r"(\d+) layers\)", layers)
        if preset is None or bool(layers) != bool(count):
            raise _Unpriced(f"the model {row['model']}, which is no preset")
        return preset.having(int(count[1]), 0) if count else preset
    if (row.number("ep") or 1) > 1:
        raise _Unpriced(f"a preset for {row['model']}, as the columns of a shape state no experts")
    hidden, heads, tp = int(row["hidden"]), int(row["heads"]), row.number("tp") or 1
    width = row.number("ffn") or 4 * hidden
    inner = round(2 * width / 3 / tp) * tp if row.word("gpt") == "1" or not row["ffn"] else width
    sizes = int(row["layers"]), hidden, inner, heads, row.number("kv") or heads, int(row["vocab"]), int(row["seq"])
    return ModelShape(row["model"], "llama", *sizes, tied_embeddings=row.word("tied") == "1")


def _unfused_kept_bytes(shape: ModelShape, megatron_sp: bool, score: int) -> Callable[[int, int], float]:
    """Activation bytes per token and rank of a GPT layer with dropout and without flash attention: Korthikanti et al.
    (arXiv:2205.05198), table 2, in two bytes. Only Megatron-SP splits norms and dropouts. `score`: bytes per head and
    pair of tokens."""
    whole = 0 if megatron_sp else 10
    return lambda seq, tp: shape.hidden_size * (whole + (34 - whole) / tp) + score * shape.heads * seq / tp


FEWEST = 3  # steps after the warm-up


def read_runs(source: Path, plan: Path | None, model: str | None, device: str | None) -> Table:
    """Read the runs. `plan`: the plan of a log. `model` and `device` are used where the source names none. Raises
    UserError."""
    if source.suffix == ".csv":
        return read_table(source, device=device)
    if device is None:
        raise UserError(f"device: {source} does not name it; give the data sheet to start from, such as h100")
    if source.suffix == ".json":
        return Table(_of_validation(source, _model_of(model, source), device))
    if plan is None:
        raise UserError(f"plan: missing; {source} is a training's log, so name the plan that it ran by --plans")
    return Table([_of_log(source, plan, model, device)])


def _model_of(model: str | None, source: Path) -> ModelShape:
    if model is None:
        raise UserError(f"model_size: missing, and {source} names no model; give --model_size")
    return load_model(model)


def _of_log(source: Path, plan_path: Path, model: str | None, device: str) -> MeasuredRun:
    plan = read_plan(plan_path)
    searched: dict[str, Any] = plan.metadata.get("searched_from") or {}
    requested = searched.get("model_options")
    named = requested.get("model_size") if isinstance(requested, dict) else searched.get("model")
    shape = _model_of(model or (str(named) if named else None), plan_path)
    records = steps_under(plan, source)
    settled = records[WARM_UP_STEPS:]
    if len(settled) < FEWEST:
        raise UserError(
            f"{source}: {len(records)} steps, of which the first {WARM_UP_STEPS} warm up; train {FEWEST} more at least"
        )
    step_s = median(record["step_time_s"] - record.get("data_s", 0.0) for record in settled)
    allocated = max(stage_peaks_mib(plan, records))
    return MeasuredRun(plan_path.stem, str(source), device, shape, plan, step_s, allocated, ours=True)


def _of_validation(source: Path, shape: ModelShape, device: str) -> list[MeasuredRun]:
    content = read_json(source)
    plans = content.get("plans") if isinstance(content, dict) else None
    if not isinstance(plans, list):
        raise UserError(f"{source}: is no validation.json of galvatron validate, no list of plans in it")
    runs = []
    for number, row in enumerate(plans):
        if not isinstance(row, dict) or not is_time(row.get("measured_s")):
            raise UserError(f"{source}: plans.{number}: no measured_s; write it again with galvatron validate")
        plan = plan_from_dict(row.get("plan"))
        name = str(row.get("key", number))
        runs.append(MeasuredRun(name, str(source), device, shape, plan, float(row["measured_s"]), ours=True))
    return runs
