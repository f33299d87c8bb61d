"""Stages, recompute and offload of a plan in PaddleFleet's settings. `fleet_layers` has the rules, by which they are
read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..model import Recompute
from .fleet_layers import ALL, FULL, HEAD, OFFLOAD, TAIL, offloaded, selected
from .strategy import Plan

Settings = dict[str, Any]
MODULES = {Recompute.SUBLAYER: "mlp", Recompute.GATE_UP: "moe_gate_up"}  # PaddleFleet's names


def stage_settings(plan: Plan, mtp: int = 0) -> Settings | None:
    """Stages, chunks and empty layers. None: PaddleFleet cannot divide the layers so; it gives all parts the same
    number, of which the empty layers shorten the first and the last. `mtp`: layers of the last part that it does not
    count."""
    short = empty_layers((*plan.stages[:-1], plan.stages[-1] - mtp))
    if short is None:
        return None
    settings = {"pipeline_model_parallel_size": plan.pipeline}
    if plan.chunks > 1:
        settings["virtual_pipeline_model_parallel_size"] = plan.chunks
    return settings | (dict(zip((HEAD, TAIL), short, strict=True)) if plan.pipeline > 1 else {})


def empty_layers(parts: Sequence[int]) -> tuple[int, int] | None:
    """Empty layers in front and behind that make all parts equal; None where the parts between are shorter."""
    most = max(parts)
    even = all(part == most for part in parts[1:-1])
    return (most - parts[0], most - parts[-1] if len(parts) > 1 else 0) if even else None


def recompute_settings(plan: Plan, stages: Mapping[str, Any]) -> Settings | None:
    """Recompute, by lists of layers wherever these count; None: PaddleFleet cannot select the plan's layers. All of a
    layer recomputes by a count alone, and empty layers in front use the count up."""
    layers = [layer.recompute for layer in plan.layers]
    ids = {kind: [at for at, each in enumerate(layers) if each is kind] for kind in set(layers)}
    full = ids.get(Recompute.FULL, [])
    if not full:
        if not ids.keys() <= {Recompute.NONE, *MODULES}:
            return None
        lists = {name: ids[kind] for kind, name in MODULES.items() if kind in ids}
        modules = {name: ALL if len(layer_ids) == len(layers) else layer_ids for name, layer_ids in lists.items()}
        return {"recompute_granularity": "selective", "recompute_modules": modules} if modules else {}
    if not ids.keys() <= {Recompute.NONE, Recompute.FULL}:
        return None
    whole = len(full) == len(layers)
    count = 1 if whole else layers[: plan.stages[0]].count(Recompute.FULL)
    method = "uniform" if whole else "block"
    settings = {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": count}
    if not whole and (stages.get(HEAD) or not count):
        return None
    made = selected({"num_hidden_layers": len(layers)} | dict(stages) | settings)
    return settings if sorted(made[FULL]) == full else None


def offload_settings(plan: Plan, stages: Mapping[str, Any]) -> Settings | None:
    """Layers whose inputs are in the host's memory; None: PaddleFleet cannot select the plan's layers."""
    layers = [at for at, layer in enumerate(plan.layers) if layer.offload]
    if any(plan.layers[at].offload < 100 or plan.layers[at].recompute is not Recompute.FULL for at in layers):
        return None
    rule = {"type": "layer_idxs", "value": [stages.get(HEAD, 0) + at for at in layers]}
    made = offloaded({"num_hidden_layers": len(plan.layers)} | dict(stages), rule) if layers else []
    return None if sorted(made) != layers else {OFFLOAD: rule} if layers else {}
