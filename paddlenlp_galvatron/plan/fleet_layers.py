"""The layers that PaddleFleet's settings select and their stages, by the rules of release/0.4. Also converts a plan's
stages, recompute and offload to such settings, which these rules check.

Settings are a mapping by PaddleFleet's names. A layer's id counts from 0 over the decoder layers; MTP layer i follows
as num_hidden_layers + i. Empty layers, which lengthen the first and last stages, have a physical number but no id:
lists of ids skip them, counts include them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

from ..base.errors import UserError
from ..model import Recompute
from .strategy import Plan

ALL = "all"
FULL = "(full)"  # the key of layers that recompute as a whole
OF_THE_MODEL = ("lm_head", "loss_fn")  # modules outside the layers: listing them turns them on
REFINED = ("flash_attn", "moe_combine")  # inside a recomputed part: layers that are *not* selected keep their output
BLOCKS = "mhc_block"
OFFLOAD = "decoderlayer_act_offload_settings"
HEAD, TAIL, MTP = "num_empty_layers_add_in_head", "num_empty_layers_add_in_tail", "num_nextn_predict_layers"
COUNTS = ("num_hidden_layers", MTP, HEAD, TAIL)
PARTS = ("pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size")
MODULES = {Recompute.SUBLAYER: "mlp", Recompute.GATE_UP: "moe_gate_up"}  # PaddleFleet's names
Ids = frozenset[int]
Settings = dict[str, Any]


class Slots(NamedTuple):
    """The layers of a model between embedding and head, and the parts into which they are divided."""

    layers: int
    mtp: int = 0  # MTP layers, behind the others
    head: int = 0  # empty layers in front
    tail: int = 0  # empty layers behind
    stages: int = 1
    chunks: int = 1  # chunks of a stage

    @staticmethod
    def of(settings: Mapping[str, Any]) -> Slots:
        if "num_hidden_layers" not in settings:
            raise UserError("num_hidden_layers: missing; give the number of the model's layers")
        counts = (settings.get(name) or 0 for name in COUNTS)
        return Slots(*counts, *(max(settings.get(name) or 1, 1) for name in PARTS))

    @property
    def physical(self) -> int:
        """Layers and empty layers, without MTP."""
        return self.head + self.layers + self.tail

    @property
    def ids(self) -> Ids:
        return frozenset(range(self.layers + self.mtp))

    @property
    def each(self) -> int:
        """Physical layers of a part as counts assume; the last part may have fewer."""
        return -(-self.physical // (self.stages * self.chunks))

    def ids_of(self, numbers: Iterable[int]) -> Ids:
        """Ids of physical numbers. MTP layer i shares the physical number i with a layer."""
        numbers = frozenset(numbers)
        decoders = {number - self.head for number in numbers if self.head <= number < self.head + self.layers}
        return frozenset(decoders | {self.layers + number for number in numbers if 0 <= number < self.mtp})

    def first(self, count: int, method: str | None, field: str) -> Ids:
        """Layers that a count selects: the first of each part by block, of each stage by first_n."""
        most = self.each if method == "block" else -(-self.physical // self.stages)
        if count > most:
            raise UserError(
                f"{field}: {count} is more than the {most} layers that recompute_method {method} counts in; lower it"
            )
        every = range(self.physical)
        starts = range(0, len(every), max(self.each, 1))
        if method == "block" or self.chunks == 1:
            return self.ids_of(chain.from_iterable(every[at : at + count] for at in starts))
        # As in PaddleFleet, which multiplies the start of a chunk by its length twice and loses layers.
        chunks = [every[at * self.each : (at + 1) * self.each] for at in starts]
        stages = (list(chain.from_iterable(chunks[stage :: self.stages])) for stage in range(self.stages))
        return self.ids_of(chain.from_iterable(stage[:count] for stage in stages))


def selected(settings: Mapping[str, Any]) -> dict[str, Ids]:
    """Ids of the layers that recompute each module; under FULL, those that recompute fully; for REFINED modules, the
    layers in which they keep their output. A module of OF_THE_MODEL is present if it is recomputed.

    Raises UserError for settings that PaddleFleet refuses.
    """
    slots, method = Slots.of(settings), settings.get("recompute_method")
    granularity = settings.get("recompute_granularity", "selective")
    modules = settings.get("recompute_modules") or {}
    if not isinstance(modules, Mapping | list):
        raise UserError(f"recompute_modules: must be a list of names, or layers by name; it is {modules!r}")
    shared = not isinstance(modules, Mapping)
    selectors = dict(modules) if not shared else dict.fromkeys(modules, settings.get("recompute_num_layers"))
    if BLOCKS in selectors and not (settings.get("enable_hyper_connections") and granularity == "selective"):
        raise UserError(f"recompute_modules.{BLOCKS}: none; set enable_hyper_connections and granularity selective")
    result: dict[str, Ids] = {}
    for module, selector in selectors.items():
        field = f"recompute_modules.{module}"
        if module == BLOCKS and selector not in (None, ALL):
            result[module] = _blocks(selector, slots, field)
        elif module in OF_THE_MODEL:
            if isinstance(selector, list):
                raise UserError(f"{field}: has no layers to list; write all")
            result[module] = frozenset()
        elif module in REFINED:
            plain = frozenset() if shared else _ids(selector, slots, "first_n", field)
            result[module] = slots.ids - plain
        elif granularity == "selective":
            if not shared and _is_count(selector) and method not in ("first_n", "block"):
                raise UserError(f"{field}: a count of layers needs recompute_method first_n or block; list layers")
            if shared and _is_count(selector) and method == "uniform":
                raise UserError(
                    "recompute_num_layers: a count of modules' layers does not go with uniform; list layers"
                )
            result[module] = _ids(selector, slots, method, field)
    if granularity == "full":
        result[FULL] = _full(slots, method, settings.get("recompute_num_layers"))
    return result


def _is_count(selector: object) -> bool:
    return type(selector) is int and selector >= 0


def _ids(selector: object, slots: Slots, method: str | None, field: str) -> Ids:
    if selector is None or selector == ALL or (type(selector) is int and selector < 0):
        return slots.ids
    if isinstance(selector, list):
        if wrong := [each for each in selector if type(each) is not int or each not in slots.ids]:
            raise UserError(f"{field}: {wrong[0]!r} is no layer; ids are 0 to {max(slots.ids)}, without empty layers")
        return frozenset(selector)
    if type(selector) is not int:
        raise UserError(f"{field}: must be all, ids of layers, or a count; it is {selector!r}")
    return slots.first(selector, method or "first_n", field)


def _full(slots: Slots, method: str | None, count: object) -> Ids:
    field = "recompute_num_layers"
    if method not in ("uniform", "first_n", "block"):
        return frozenset()
    if type(count) is not int or (method == "uniform" and count != 1) or (method == "first_n" and count < 0):
        raise UserError(
            f"{field}: {count!r} does not go with recompute_method {method}; uniform takes 1, others a count"
        )
    return slots.ids if method == "uniform" or count < 0 else slots.first(count, method, field)


def _blocks(selector: object, slots: Slots, field: str) -> Ids:
    """Ids of blocks of consecutive layers, none of which spans two chunks."""
    blocks: list[Any] = selector if isinstance(selector, list) and selector else [selector]
    for block in blocks:
        good = isinstance(block, list) and block and all(type(each) is int for each in block)
        if not good or block != list(range(block[0], block[0] + len(block))) or not slots.ids >= set(block):
            raise UserError(f"{field}: {block!r} is no list of consecutive layers; give a list for each block")
        if len({(slots.head + each) // slots.each for each in block}) > 1:
            raise UserError(f"{field}: {block} spans two chunks; split it")
    return frozenset(chain.from_iterable(blocks))


def offloaded(settings: Mapping[str, Any], rule: Mapping[str, Any]) -> Ids:
    """Ids of layers whose input is offloaded by this rule, whose numbers are physical."""
    slots, value = Slots.of(settings), rule.get("value")
    every = range(max(slots.physical, slots.mtp))
    if rule.get("type") == "layer_idxs" and isinstance(value, list):
        return slots.ids_of(value)
    match rule.get("type"), value:
        case "mod", [int(divisor), int(rest)] if divisor > 0:
            return slots.ids_of(number for number in every if number % divisor == rest)
    raise UserError(f"{OFFLOAD}: {dict(rule)!r} is unknown; give mod [divisor, rest] or layer_idxs")


def division(settings: Mapping[str, Any]) -> list[str]:
    """The items of each chunk of each stage in the model's order, a letter an item: E embedding, t layer, e empty
    layer, m MTP layer, M its embedding, N last norm, L LM head. Raises UserError if PaddleFleet cannot divide the
    layers."""
    slots = Slots.of(settings)
    parts, mtp = slots.stages * slots.chunks, "m" * slots.mtp
    counted = "te" + "m" * bool(settings.get("separate_mtp_headloss"))
    items = "E" + "e" * slots.head + "t" * slots.layers + "N" + mtp + "e" * slots.tail + "L"
    tail = slots.tail
    if settings.get("stage") == "ernie_pretrain":
        tail = max(tail, slots.mtp)  # MTP layers count among the tail's slots
        embedding = "M" * bool(mtp and slots.stages > 1 and settings.get("enable_mtp_magic_send"))
        items = "E" + "t" * slots.layers + embedding + mtp + "e" * (tail - slots.mtp) + "NL"
        if slots.layers % slots.stages:
            bounds = [len(items) * number // parts for number in range(parts + 1)]  # the last parts are larger
            return [items[start:stop] for start, stop in pairwise(bounds)]
        counted = "tem"
    places = [at for at, item in enumerate(items) if item in counted]
    each, rest = divmod(len(places), parts)
    if rest or not each:
        raise UserError(
            f"pipeline_model_parallel_size: {parts} chunks of stages do not divide {len(places)} layers, empty ones "
            f"included; write {TAIL} into the recipe, such as {tail + -len(places) % parts}"
        )
    bounds = [0, *(places[each * number - 1] + 1 for number in range(1, parts)), len(items)]
    return [items[start:stop] for start, stop in pairwise(bounds)]


def stage_settings(plan: Plan, mtp: int = 0) -> Settings | None:
    """Stages, chunks and empty layers. None: PaddleFleet cannot divide the layers like this; it gives all parts the
    same number, and empty layers shorten the first and the last. `mtp`: layers of the last part that it does not
    count."""
    short = empty_layers((*plan.stages[:-1], plan.stages[-1] - mtp))
    if short is None:
        return None
    settings = {"pipeline_model_parallel_size": plan.pipeline}
    if plan.chunks > 1:
        settings["virtual_pipeline_model_parallel_size"] = plan.chunks
    return settings | (dict(zip((HEAD, TAIL), short, strict=True)) if plan.pipeline > 1 else {})


def empty_layers(parts: Sequence[int]) -> tuple[int, int] | None:
    """Empty layers at the start and end that make all parts equal; None if a middle part is shorter."""
    most = max(parts)
    even = all(size == most for size in parts[1:-1])
    return (most - parts[0], most - parts[-1] if len(parts) > 1 else 0) if even else None


def recompute_settings(plan: Plan, stages: Mapping[str, Any], mtp: int = 0) -> Settings | None:
    """Recompute settings, by lists of layers where PaddleFleet honours them; None: it cannot select the plan's layers.
    Full recompute is selected only by a count, which includes empty layers at the start."""
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
    made = selected({"num_hidden_layers": len(layers) - mtp, MTP: mtp} | dict(stages) | settings)
    return settings if sorted(made[FULL]) == full else None


def offload_settings(plan: Plan, stages: Mapping[str, Any], mtp: int = 0) -> Settings | None:
    """The layers with offloaded inputs; None: PaddleFleet cannot select them. An MTP layer shares its number with an
    earlier layer."""
    layers = [at for at, layer in enumerate(plan.layers) if layer.offload]
    if any(plan.layers[at].offload < 100 or plan.layers[at].recompute is not Recompute.FULL for at in layers):
        return None
    decoders = len(plan.layers) - mtp
    numbers = {stages.get(HEAD, 0) + at if at < decoders else at - decoders for at in layers}
    rule = {"type": "layer_idxs", "value": sorted(numbers)}
    made = offloaded({"num_hidden_layers": decoders, MTP: mtp} | dict(stages), rule) if layers else []
    return None if sorted(made) != layers else {OFFLOAD: rule} if layers else {}
