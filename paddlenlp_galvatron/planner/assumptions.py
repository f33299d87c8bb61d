"""The numbers and choices on which an answer depends, each with its origin and the option that changes it."""

from __future__ import annotations

from ..base import Note
from ..cost_model import CostModel
from ..plan.assumption import Assumption
from ..profiles.data_sheet import CALIBRATED, DataSheet, Figure, data_sheets, load_data_sheet
from .options import SearchOptions

MANY = 64  # GPUs; clusters from this size seldom have the data sheet's network


def assumptions_of(options: SearchOptions, cost: CostModel) -> dict[str, Assumption]:
    """The assumptions by name, in display order."""

    def chosen(words: str, value: float | str, option: str) -> Assumption:
        is_default = getattr(options, option) == type(options).model_fields[option].default
        return Assumption(words, value, "", "default" if is_default else "option", option)

    device, document, chunks = cost.profiles.device, options.document_tokens, options.most_chunks
    sheet = load_data_sheet(options.device).with_network(options.network) if options.device else None
    source = "data sheet" if sheet else "measured"
    has_all = options.memory_constraint in (None, device.memory_gib)
    assumptions = {
        "device": Assumption("device", device.name or "unnamed", "", source, "device"),
        "memory": Assumption("memory", options.memory_gib, "GiB", source if has_all else "option", "memory_constraint"),
        **(_links(sheet, options) if sheet else {"links": Assumption("links", "as measured", "", source, "profiles")}),
        "attention": chosen("attention", "flash" if cost.assumed.flash_attention else "plain", "use_flash_attention"),
    }
    if options.products:
        assumptions["products"] = chosen("products of layers", options.products, "products")
    if load := cost.load:
        assumptions["imbalance"] = chosen("expert load imbalance", load.moe_imbalance, "moe_imbalance")
    return assumptions | {
        "chunks": chosen(
            "interleaving", f"up to {chunks} chunks a stage" if chunks > 1 else "none", "max_virtual_pp_deg"
        ),
        "context": chosen("cp up to", options.most_context, "max_cp_deg"),
        "packing": chosen("packing", f"documents of {document:g} tokens" if document else "none", "document_tokens"),
    }


def _links(sheet: DataSheet, options: SearchOptions) -> dict[str, Assumption]:
    def stated(words: str, figure: Figure, option: str) -> Assumption:
        origin = "calibrated" if figure.source.startswith(CALIBRATED) else "data sheet"
        return Assumption(words, figure.value, "GB/s", origin, option)

    links = {"link": stated("link of a GPU", sheet.link, "device")}
    if options.num_nodes > 1:
        network = stated("network of a node", sheet.network, "network")
        links["network"] = network._replace(origin="option") if options.network else network
    return links | {"software": Assumption("software", sheet.stack, "", "data sheet", "device")}


def note_doubts(options: SearchOptions, cost: CostModel, note: Note) -> None:
    """Note defaults that are likely wrong for the cluster, each with the option that sets another."""
    network = assumptions_of(options, cost).get("network")
    if network and network.origin == "data sheet" and options.world_size > MANY:
        note(f"{network}: the data sheet's, for so many GPUs; give your cluster's, as 25 or 8x200Gb/s")
    device = (options.device or "").casefold()  # a driver's full name identifies the variant
    chips = tuple(f"{device.partition('-')[0]}-{link}" for link in ("pcie", "nvl"))
    cards = [] if device.endswith(".json") else [name for name in data_sheets() if name.startswith(chips)]
    if cards and load_data_sheet(device).name not in cards and options.num_gpus_per_node > 1:
        note(f"device: {device} is taken as the SXM part with NVLink; for others give --device {' or '.join(cards)}")
