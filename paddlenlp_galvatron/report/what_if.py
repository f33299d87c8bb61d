"""The what-if page: its form, the best plan drawn, and the commands that give it."""

from __future__ import annotations

from collections.abc import Mapping

from ..base.errors import GalvatronError, Infeasible
from ..cost_model.facts import PlanFacts
from ..model import preset_names
from ..planner.fit import DEVICE
from ..planner.form import SEARCHED, UNSET, Answer, Form
from ..profiles.data_sheet import data_sheets
from ..profiles.reserve import GIB_MIB
from .page import drawn, fill

# Labels of the form's fields.
LABELS = {
    "model_size": "Model",
    "seq_length": "Sequence length",
    "global_train_batch_size": "Global batch size",
    "device": "GPU",
    "profiles": "Measured profiles",
    "num_nodes": "Nodes",
    "num_gpus_per_node": "GPUs per node",
    "memory_constraint": "Memory of a GPU, GiB",
    "search_options": "More options of the search",
}
# Fields of the form by what errors call them.
FIELDS = {"settle_bsz": "global_train_batch_size", "world_size": "num_nodes"}


def faults_of(error: GalvatronError) -> dict[str, str]:
    """Faults by field of the form; under "" those of no field."""
    if isinstance(error, Infeasible):
        about = "memory_constraint" if "GiB per GPU" in str(error) else "global_train_batch_size"
        return {about: str(error)}
    found: dict[str, str] = {}
    for fault in str(error).split("\n"):
        name, _, why = fault.partition(": ")
        name = name.rpartition(".")[2]  # of galvatron.assumed.seq_length
        field = FIELDS.get(name, name)
        if field not in Form.model_fields:
            field, why = "search_options" if field in SEARCHED else "", fault
        found.setdefault(field, why)
    return found


def page(values: Mapping[str, str], told: Answer | GalvatronError, query: str) -> str:
    """The whole page: the form with these values, and what is answered."""
    fields = [
        {
            "name": name,
            "label": label,
            "value": values.get(name, ""),
            "unset": UNSET.get(name, ""),
            "help": Form.model_fields[name].description,
        }
        for name, label in LABELS.items()
    ]
    choices = {"model_size": {name: name for name in preset_names()}, "device": {name: name for name in data_sheets()}}
    choices["device"] = {"": f"{DEVICE} (default)"} | choices["device"]
    for name, known in choices.items():  # a path, say
        known.setdefault(values.get(name, ""), values.get(name, ""))
    faults = faults_of(told) if isinstance(told, GalvatronError) else failed(told)
    shown = fragment(told, query) if isinstance(told, Answer) and told.result.best else ""
    return fill("what_if.html.jinja", fields=fields, choices=choices, faults=faults, shown=shown)


def failed(told: Answer) -> dict[str, str]:
    """The faults of a question that no plan answers."""
    faults = faults_of(told.why_not) if told.why_not else {}
    if told.enough_nodes:
        faults["num_nodes"] = f"{told.enough_nodes} nodes would do"
    return faults


def fragment(told: Answer, query: str) -> str:
    """The answer as a part of the page. Raises Infeasible."""
    best, shapes = told.result.require(), told.model.shapes
    shape = shapes[0] if len(shapes) == 1 else None
    facts = PlanFacts(best.plan, best.prediction, told.cost, shape, told.options.memory_gib * GIB_MIB)
    return fill(
        "answer.html.jinja",
        **drawn(facts),
        model=told.model.name,
        options=told.options,
        result=told.result,
        tokens_per_s=facts.tokens_per_s,
        notes=[*told.notes, *([str(told.cost.load)] if told.cost.load else [])],
        commands=told.commands,
        query=query,
    )
