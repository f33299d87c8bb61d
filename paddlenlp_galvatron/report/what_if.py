"""The what-if page: its form, the best plan drawn, and the commands that give it."""

from __future__ import annotations

from collections.abc import Mapping

from ..base.errors import GalvatronError, Infeasible
from ..model import preset_names
from ..options.texts import text_of
from ..planner.fit import DEVICE
from ..planner.form import SEARCHED, UNSET, Answer, Form
from ..profiles.data_sheet import data_sheets
from .page import drawn, fill
from .plan import assumed

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
# Fields of the form by their names in errors.
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


def page(values: Mapping[str, str], outcome: Answer | GalvatronError, query: str) -> str:
    """The whole page: the form with these values, and what is answered."""
    fields = [
        {
            "name": name,
            "label": label,
            "value": values.get(name, ""),
            "unset": UNSET.get(name, ""),
            "help": text_of(Form, name),
        }
        for name, label in LABELS.items()
    ]
    choices = {"model_size": {name: name for name in preset_names()}, "device": {name: name for name in data_sheets()}}
    choices["device"] = {"": f"{DEVICE} (default)"} | choices["device"]
    for name, known in choices.items():  # a path, say
        known.setdefault(values.get(name, ""), values.get(name, ""))
    faults = faults_of(outcome) if isinstance(outcome, GalvatronError) else failed(outcome)
    shown = fragment(outcome, query) if isinstance(outcome, Answer) and outcome.result.best else ""
    return fill("what_if.html.jinja", fields=fields, choices=choices, faults=faults, shown=shown)


def failed(outcome: Answer) -> dict[str, str]:
    """The faults of a question that no plan answers."""
    faults = faults_of(outcome.why_not) if outcome.why_not else {}
    if outcome.enough_nodes:
        faults["num_nodes"] = f"{outcome.enough_nodes} nodes would do"
    return faults


def fragment(outcome: Answer, query: str) -> str:
    """The answer as a part of the page. Raises Infeasible."""
    question = outcome.question
    facts = question.facts_of(outcome.result.plan)
    return fill(
        "answer.html.jinja",
        **drawn(facts),
        model=question.model.name,
        result=outcome.result,
        tokens_per_s=facts.tokens_per_s,
        notes=[assumed(facts.assumptions), *outcome.notes, *([str(facts.cost.load)] if facts.cost.load else [])],
        commands=outcome.commands,
        query=query,
    )
