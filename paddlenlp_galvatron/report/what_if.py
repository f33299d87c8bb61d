"""The what-if page: a question from its form, the best plan drawn, and the commands that give it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from ..base.errors import GalvatronError, Infeasible, UserError
from ..base.limits import Positive, Ranks, Samples, Size
from ..cost_model import CostModel
from ..model import load_model, preset_names
from ..options.group import Options
from ..options.model_options import SEQ, Model, ModelOptions
from ..plan import plan_to_dict
from ..planner import SearchOptions, SearchResult, search
from ..planner.fit import DEVICE
from ..planner.options import BATCH
from ..planner.prices import on_device, prices
from ..profiles.data_sheet import data_sheets, load_data_sheet
from ..profiles.reserve import GIB_MIB
from .facts import PlanFacts
from .page import drawn, fill
from .why import best_of

NODE_FACTORS = (2, 4, 8)  # of nodes that are tried where nothing fits
SEARCH_S = 10.0  # of processor time, that an answer's search may take: a page that is silent for longer seems dead


def _known(model: str) -> str:
    """Told beside the faults of the other fields."""
    try:
        load_model(model)
    except UserError as error:
        raise PydanticCustomError(
            "model", "{told}", {"told": error.faults[0].removeprefix(f"model {model}: ")}
        ) from None
    return model


class Question(Options):
    """The form of a question: model, devices, options."""

    model_size: Annotated[str, AfterValidator(_known)] = Field(
        "qwen2.5-7b", description="a preset's name, a config.json, or its folder"
    )
    seq_length: Size | None = Field(
        None, description=f"sequence length; unset: {SEQ}, or the model's positions where they are fewer"
    )
    global_train_batch_size: Samples = Field(BATCH, description="global batch size, samples")
    device: str | None = Field(
        None, description=f"data sheet of the nodes: name of a shipped one, or a file; unset: {DEVICE}"
    )
    profiles: Path | None = Field(None, description="folder of measured profiles, used instead of a data sheet")
    num_nodes: Ranks = Field(1, description="number of nodes; all are alike")
    num_gpus_per_node: Ranks | None = Field(None, description="GPUs per node; unset: as the data sheet has, or 8")
    memory_constraint: Positive | None = Field(None, description="memory of a GPU, GiB; unset: all that it has")
    search_options: str = Field("", description="more options of `galvatron search`: sp_space=tp+sp max_tp_deg=4")


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
# Placeholders of empty fields.
UNSET = {
    "seq_length": str(SEQ),
    "device": DEVICE,
    "profiles": "none: the data sheet of the device",
    "num_gpus_per_node": "as the data sheet says",
    "memory_constraint": "all that it has",
    "search_options": "sp_space=tp+sp max_tp_deg=4",
}
# Fields of the form by what errors call them.
FIELDS = {"settle_bsz": "global_train_batch_size", "world_size": "num_nodes"}
SEARCHED = {**ModelOptions.model_fields, **SearchOptions.model_fields}  # options of a search
SET_BY_THE_FORM = {
    *("model_size", "seq_length", "settle_bsz", "min_bsz", "max_bsz", "bsz_scale", "profiles", "memory_constraint"),
    *("num_nodes", "num_gpus_per_node", "world_size"),
}


@dataclass(frozen=True)
class Answer:
    """The best plan, or what would have to be different."""

    model: Model
    cost: CostModel
    options: SearchOptions
    result: SearchResult
    notes: tuple[str, ...]
    commands: tuple[str, ...]
    enough_nodes: int | None = None  # where nothing fits: a number of nodes with which something does

    @property
    def plan(self) -> dict[str, Any]:
        """The content of its file. Raises Infeasible."""
        return plan_to_dict(self.result.plan)


def answer(question: Question, more: Mapping[str, Any], look_wider: bool = True) -> Answer:
    """`more`: further options of model and search, by canonical name. Raises UserError that names the fields; a search
    in which nothing fits is an answer, which then says how many nodes would do, unless `look_wider` is false."""
    if both := sorted(SET_BY_THE_FORM & set(more)):
        raise UserError(f"search_options: {both[0]} has a field of its own; leave it out here")
    if question.profiles and question.device:
        raise UserError("device: profiles say which one it is; leave one of them out")
    heard: list[str] = []
    with _about("model_size"):
        asked = ModelOptions.from_values({**more, "model_size": question.model_size, "seq_length": question.seq_length})
        model = asked.resolve_usual(SEQ)
    with _about("device"):
        device = None if question.profiles else question.device or DEVICE
        per_node = question.num_gpus_per_node or (load_data_sheet(device).gpus_per_node if device else None)
    given = {
        **more,
        "device": device,
        "num_nodes": question.num_nodes,
        "num_gpus_per_node": per_node,
        "settle_bsz": question.global_train_batch_size,
        "seq_length": model.seq_length,
        "memory_constraint": question.memory_constraint,
        "profiles": question.profiles,
    }
    options = SearchOptions.from_values({name: value for name, value in given.items() if value is not None})
    with _about("profiles" if question.profiles else "search_options"):
        cost = prices(model.shapes, options, heard.append)
    commands = tuple(_commands(question, options, more))
    options, cost = on_device(options, cost, heard.append)
    result = search(model.shapes, cost, options, seconds=SEARCH_S)
    if result.best:
        told = {"model_size": question.model_size, "seq_length": model.seq_length}
        result.best.plan.metadata["searched_from"]["model_options"] = told | asked.model_dump(
            mode="json", exclude_unset=True, exclude_none=True
        )
    enough = (
        _enough_nodes(question, more)
        if look_wider and not question.profiles and not result.best and not result.given_up
        else None
    )
    return Answer(model, cost, options, result, tuple(dict.fromkeys(heard)), commands, enough)


def _enough_nodes(question: Question, more: Mapping[str, Any]) -> int | None:
    """With how many nodes a plan fits, if the next power of two times as many do or a few more."""
    for nodes in (factor * question.num_nodes for factor in NODE_FACTORS):
        wider = answer(question.model_copy(update={"num_nodes": nodes}), more, look_wider=False)
        if wider.result.best:
            return nodes
    return None


@contextmanager
def _about(field: str) -> Iterator[None]:
    """Faults that name no field are this one's."""
    try:
        yield
    except UserError as error:
        raise UserError(
            fault if fault.partition(":")[0] in SEARCHED else f"{field}: {fault}" for fault in error.faults
        ) from None


def _commands(question: Question, options: SearchOptions, more: Mapping[str, Any]) -> Iterator[str]:
    """Commands for the same plan."""
    words: dict[str, Any] = {"device": options.device, "profiles": question.profiles, "seq_length": options.seq_length}
    words |= {"num_nodes": options.num_nodes, "num_gpus_per_node": options.num_gpus_per_node}
    words |= {"memory_constraint": question.memory_constraint, "settle_bsz": options.settle_bsz, **more}
    given = [word for name, value in words.items() if value is not None for word in (f"--{name}", f"{value}")]
    yield f"galvatron search {shlex.join([question.model_size, *given, '-o', 'plan.json'])}"


def faults_of(error: GalvatronError) -> dict[str, str]:
    """Faults by field of the form; under "" those of no field."""
    if isinstance(error, Infeasible):
        about = "memory_constraint" if "GiB per device" in str(error) else "global_train_batch_size"
        return {about: str(error)}
    found: dict[str, str] = {}
    for fault in str(error).split("\n"):
        name, _, why = fault.partition(": ")
        name = name.rpartition(".")[2]  # of galvatron.assumed.seq_length
        field = FIELDS.get(name, name)
        if field not in Question.model_fields:
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
            "help": Question.model_fields[name].description,
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
    try:
        best_of(told.result, SEARCH_S)
    except GalvatronError as error:
        faults = faults_of(error)
        if told.enough_nodes:
            faults["num_nodes"] = f"{told.enough_nodes} nodes would do"
        return faults
    return {}


def fragment(told: Answer, query: str) -> str:
    """The answer as a part of the page. Raises Infeasible."""
    best, shapes = told.result.require(), told.model.shapes
    shape = shapes[0] if len(shapes) == 1 else None
    facts = PlanFacts(best.plan, best.prediction, told.cost, shape, told.options.memory_constraint * GIB_MIB)
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
