"""The strategy file: Galvatron's fields, and our object "galvatron"."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from math import lcm
from pathlib import Path
from typing import Any

from ..base import MIB, UserError, read_json, within
from ..base.limits import MOST_LAYERS, MOST_RANKS
from ..base.writing import write_text
from ..model import MODULES, PARTLY, ModelShape, Recompute
from .check import require_fits, require_trainable, require_valid
from .fields import GalvatronObject, StrategyFile, parse
from .precision import Precision
from .strategy import Assumptions, DataParallel, LayerStrategy, Plan, VocabStrategy, runs, sharded_over_all

FORMAT_VERSION = 1
LISTED = 10  # newest files that an error names
LARGEST_BYTES = 4 * MIB  # limit of a strategy file; 1,000 layers in 100 stages take 60 kB


SIZES = ("sharding_sizes_enc", "sharding_sizes_of_ep_enc")
# Fields of strategies by the file's fields: those with an entry per layer, and those of the vocabulary.
OF_LAYERS = {
    "tp_sizes_enc": "degree",
    "use_sp": "ulysses",
    "tp_consecutive_flags": "consecutive",
    "dp_types_enc": "dp_type",
    "recompute_enc": "recompute",
    "offload_enc": "offload",
    "cp_sizes_enc": "context",
    "ep_sizes_enc": "ep",
    "tp_of_ep_sizes_enc": "etp",
    "dp_types_of_ep_enc": "experts_dp_type",
    "sharding_sizes_enc": "sharding",
    "sharding_sizes_of_ep_enc": "experts_sharding",
}
OF_VOCABULARY = {
    "vtp": "degree",
    "vsp": "ulysses",
    "embed_sdp": "dp_type",
    "vcp": "context",
    "vsharding": "sharding",
    "loss_pieces": "pieces",
}


def read_plan(
    path: str | Path,
    world_size: int | None = None,
    *,
    default: int | None = None,
    smallest_world: bool = False,
    valid: bool = True,
) -> Plan:
    """Read and validate a strategy file; without `valid`, also read a plan with faults (`check.find_faults`).

    `world_size` is the number of available ranks and must equal the file's, if the file has one. A file without it is
    read for `default` ranks or, with `smallest_world`, for the fewest that fit. Raises UserError.
    """
    data = read_json(path, LARGEST_BYTES, comments=True)
    if world_size is None and isinstance(data, dict) and data.get("world_size") is None:
        world_size = default
    return plan_from_dict(data, world_size, smallest_world=smallest_world, source=str(path), valid=valid)


def plan_from_dict(
    data: object,
    world_size: int | None = None,
    *,
    smallest_world: bool = False,
    source: str = "plan",
    valid: bool = True,
) -> Plan:
    """Read a plan from a parsed JSON value, as `read_plan` does. `source` names the file in messages."""
    from .dialects import as_current  # here: a search reads no plans

    with within(source):
        current, note = as_current(data)
        plan = _to_plan(_parse(current), world_size, smallest_world)
        if valid:
            require_valid(plan)
    return replace(plan, note=note)


def newest_plan(
    folder: str | Path, shape: ModelShape, world_size: int, task: str = "pretrain", adapts: bool = False
) -> Path:
    """The plan that training uses by default: the newest strategy file in a folder that fits. Other JSON files are
    skipped. Raises UserError if none fits, with the reason of each."""
    misfits: list[str] = []
    for path in sorted(Path(folder).glob("*.json"), key=lambda file: (-file.stat().st_mtime_ns, file.name)):
        try:
            if _fits(path, shape, world_size, task, adapts):
                return path
        except UserError as error:
            misfits.append(f"{path}: {error.faults[0].removeprefix(f'{path}: ')}")
    headline = f"{folder}: no plan fits {shape.name} on {world_size} ranks; run galvatron search, or name a plan"
    older = [f"{folder}: {len(misfits) - LISTED} older files fit no better"] if len(misfits) > LISTED else []
    raise UserError([headline, *misfits[:LISTED], *older])


def _fits(path: Path, shape: ModelShape, world_size: int, task: str, adapts: bool) -> bool:
    """Whether a file is a plan. Raises UserError for a plan that does not fit."""
    from .dialects import is_strategy

    fields = read_json(path, LARGEST_BYTES, comments=True)
    if not isinstance(fields, dict) or not is_strategy(fields):
        return False
    plan = plan_from_dict(fields, world_size, source=str(path))
    require_trainable(plan, task, adapts)
    require_fits(plan, shape)
    return True


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """The strategy file's content: every field that this project and Galvatron read."""
    layers = plan.layers
    listed: dict[str, Any] = {field: _written(getattr(plan.vocab, name)) for field, name in OF_VOCABULARY.items()}
    listed |= {field: [_written(getattr(layer, name)) for layer in layers] for field, name in OF_LAYERS.items()}
    listed["dp_types_of_ep_enc"] = [_written(layer.experts.dp_type) for layer in layers]
    listed["sharding_sizes_enc"] = [layer.shards(plan.stage_size) for layer in layers]
    listed["sharding_sizes_of_ep_enc"] = [layer.experts.shards(plan.stage_size) for layer in layers]
    fields = StrategyFile.model_construct(
        pp_deg=plan.pipeline,
        **listed,
        checkpoint=[int(layer.recompute is Recompute.FULL) for layer in layers],
        global_bsz=plan.global_batch,
        chunks=plan.micro_batches,
        pp_division=list(plan.stages),
        pipeline_type=plan.schedule,
        default_dp_type=plan.default_dp_type.value,
        vocab_sdp=_written(plan.vocab.dp_type),
        world_size=plan.world_size,
        virtual_pp_deg=plan.chunks,
    )
    content = fields.model_dump(exclude_none=True, exclude=set(_left_out(plan)))
    assumed = {key: value for key, value in asdict(plan.assumed).items() if value is not None}
    content["galvatron"] = {"format_version": FORMAT_VERSION, "assumed": assumed, **plan.metadata}
    return content


def plan_id(plan: Plan) -> str:
    """The id of a plan in a training log: hexadecimal digits that depend on strategies, batch and ranks, but not on
    predictions or assumptions."""
    content = {key: value for key, value in plan_to_dict(plan).items() if key != "galvatron"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def _written(value: Any) -> Any:
    """A field of a strategy in the file's form."""
    if isinstance(value, DataParallel):
        return int(value is DataParallel.ZERO3)
    return int(value) if isinstance(value, bool) else value


def _left_out(plan: Plan) -> Iterator[str]:
    """Fields omitted because they add nothing, so that Galvatron and older readers accept the file."""
    if plan.chunks == 1:
        yield "virtual_pp_deg"
    if not any(layer.recompute in (*PARTLY, *MODULES) for layer in plan.layers):  # `checkpoint` has it
        yield "recompute_enc"
    if not any(layer.offload for layer in plan.layers):
        yield "offload_enc"
    for axis, _ in plan.vocab.extra:
        if all(dict(strategy.extra)[axis] == 1 for strategy in (*plan.layers, plan.vocab)):
            yield from (f"{axis}_sizes_enc", f"v{axis}")
    if all(layer.experts.ranks == 1 for layer in plan.layers):
        yield from ("ep_sizes_enc", "tp_of_ep_sizes_enc")
    if not any(layer.experts_dp_type for layer in plan.layers):
        yield "dp_types_of_ep_enc"
    if not any(layer.sharding for layer in plan.layers):
        yield "sharding_sizes_enc"
    if not any(layer.experts_sharding for layer in plan.layers):
        yield "sharding_sizes_of_ep_enc"
    if plan.vocab.pieces == 1:
        yield "loss_pieces"


def write_plan(plan: Plan, path: str | Path) -> None:
    """Validate a strategy file and write it atomically."""
    require_valid(plan)
    write_text(path, json.dumps(plan_to_dict(plan), indent=2) + "\n")


def json_schema() -> dict[str, Any]:
    """JSON Schema of the strategy file."""
    schema = StrategyFile.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["anyOf"] = [{"required": ["embed_sdp"]}, {"required": ["vocab_sdp"]}]
    schema["required"] = [name for name in schema["required"] if name != "embed_sdp"]
    return schema


def _parse(data: dict[str, Any]) -> StrategyFile:
    if "embed_sdp" in data and "vocab_sdp" in data and data["embed_sdp"] != data["vocab_sdp"]:
        raise UserError("embed_sdp and vocab_sdp are two names of one field but differ; keep one of them")
    if "vocab_sdp" in data:
        data.setdefault("embed_sdp", data["vocab_sdp"])
    fields = parse(StrategyFile, data)
    if faults := _wrong_lengths(fields):
        raise UserError(faults)
    return fields


def _wrong_lengths(fields: StrategyFile) -> list[str]:
    layers = sum(fields.pp_division)
    if layers > MOST_LAYERS:
        return [f"pp_division: sums to {layers} layers; a model has at most {MOST_LAYERS}"]
    faults = [
        f"{name}: has {len(getattr(fields, name))} entries for {layers} layers (pp_division sums to {layers}); "
        "give one entry a layer"
        for name in (*OF_LAYERS, "checkpoint")
        if getattr(fields, name) is not None and len(getattr(fields, name)) != layers
    ]
    pairs = [*zip(fields.recompute_enc or (), fields.checkpoint, strict=False)]
    for run, (recompute, flag) in runs(pairs):
        if flag != (recompute is Recompute.FULL):
            where = f"layer {run[0]}" if len(run) == 1 else f"layers {run[0]}-{run[-1]}"
            faults.append(
                f"recompute_enc: {recompute.words} in {where}, but checkpoint {flag}; make checkpoint 1 for full and 0 "
                "for all else"
            )
    count, chunks = len(fields.pp_division), fields.virtual_pp_deg
    if count != fields.pp_deg * chunks:
        faults.append(
            f"pp_division: has {count} stages but pp_deg is {fields.pp_deg}; give one entry a stage"
            if chunks == 1
            else f"pp_division: has {count} entries for {fields.pp_deg} stages of {chunks} chunks; give "
            f"{fields.pp_deg * chunks}: the first chunk of every stage, then the second of every stage, and so on"
        )
    return faults


def _to_plan(fields: StrategyFile, given_world: int | None, smallest_world: bool) -> Plan:
    default, count = DataParallel(fields.default_dp_type), sum(fields.pp_division)

    def strategy(names: Iterable[str], values: Iterable[Any]) -> dict[str, Any]:
        entry = dict(zip(names, values, strict=True))
        flags = {name: bool(entry[name]) for name in ("ulysses", "consecutive") if name in entry}
        types = ("dp_type", "experts_dp_type")
        return entry | flags | {name: DataParallel.ZERO3 if entry[name] else default for name in types if name in entry}

    columns = {field: getattr(fields, field) or [1] * count for field in OF_LAYERS}  # degrees may be left out
    columns |= {field: getattr(fields, field) or [None] * count for field in SIZES}
    columns["dp_types_of_ep_enc"] = fields.dp_types_of_ep_enc or fields.dp_types_enc
    columns["offload_enc"] = fields.offload_enc or [0] * count
    columns["recompute_enc"] = fields.recompute_enc or map(Recompute, fields.checkpoint)
    rows = zip(*columns.values(), strict=True)
    layers = tuple(LayerStrategy(**strategy(OF_LAYERS.values(), row)) for row in rows)
    vocab = VocabStrategy(**strategy(OF_VOCABULARY.values(), (getattr(fields, name) for name in OF_VOCABULARY)))
    parts = *layers, vocab.as_layer()
    ranks = {placed.ranks for placed in parts} | {placed.tp * (placed.sharding or 1) for placed in parts}
    ranks |= {layer.experts.ranks * (layer.experts_sharding or 1) for layer in layers}
    extra = fields.galvatron or GalvatronObject()
    assumed = extra.assumed
    plan = Plan(
        world_size=_world_size(fields, given_world, ranks if smallest_world else None),
        global_batch=fields.global_bsz,
        micro_batches=fields.chunks,
        stages=tuple(fields.pp_division),
        layers=layers,
        vocab=vocab,
        schedule=fields.pipeline_type,
        chunks=fields.virtual_pp_deg,
        default_dp_type=default,
        assumed=Assumptions(
            **assumed.model_dump()
            | {"mixed_precision": Precision(assumed.mixed_precision), "offload_optimizer": _offloads(extra)}
        ),
        stated=frozenset(assumed.model_dump(exclude_unset=True, exclude_none=True)),
        metadata=extra.model_dump(exclude={"format_version", "assumed"}, exclude_unset=True),
    )
    return sharded_over_all(plan)


def _offloads(extra: GalvatronObject) -> bool | None:
    """Whether a plan offloads the optimizer. Files of version 0.1.0 have this in the search's options."""
    searched = extra.model_dump().get("searched_from") or {}
    options = searched.get("options")
    asked = isinstance(options, dict) and options.get("offload_optimizer")
    return extra.assumed.offload_optimizer or bool(asked) or None


def _world_size(fields: StrategyFile, started: int | None, fitting: set[int] | None) -> int:
    """The file's number of ranks or the given one; without both, the smallest number in `fitting`."""
    if started is not None and fields.world_size not in (None, started):
        raise UserError(
            f"world_size: the plan is for {fields.world_size} ranks but {started} are started; "
            f"start {fields.world_size} ranks or search a plan for {started}"
        )
    if world_size := fields.world_size or started:
        return world_size
    if fitting is None:
        raise UserError("world_size: missing; add it to the file")
    stage = 1
    for ranks in sorted(fitting):
        stage = lcm(stage, ranks)
        if fields.pp_deg * stage > MOST_RANKS:
            raise UserError(f"tp_sizes_enc: no world of up to {MOST_RANKS} ranks fits all these degrees; correct them")
    return fields.pp_deg * stage
