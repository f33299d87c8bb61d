"""The question of the what-if page's form, and the answer: the best plan, or the changes needed for one."""

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from ..base.errors import GalvatronError, UserError
from ..base.limits import Positive, Ranks, Samples, Size
from ..model import load_model
from ..options.group import Options
from ..options.model_options import SEQ, ModelOptions
from ..options.prices import TWO_SOURCES
from ..plan import plan_to_dict
from ..profiles.data_sheet import load_data_sheet
from .fit import DEVICE
from .options import BATCH, SearchOptions
from .question import Question
from .result import SearchResult

NODE_FACTORS = (2, 4, 8)  # factors of nodes to try if nothing fits
SEARCH_S = 10.0  # default of a search's processor time: a page that is silent for longer seems dead


def _known(model: str) -> str:
    """The model; its fault is raised so that it is shown with those of other fields."""
    try:
        load_model(model)
    except UserError as error:
        raise PydanticCustomError(
            "model", "{fault}", {"fault": error.faults[0].removeprefix(f"model {model}: ")}
        ) from None
    return model


class Form(Options):
    """The form of a question: model, devices, options."""

    model_size: Annotated[str, AfterValidator(_known)] = "qwen2.5-7b"
    seq_length: Size | None = None
    global_train_batch_size: Samples = BATCH
    device: str | None = None
    profiles: Path | None = None
    num_nodes: Ranks = 1
    num_gpus_per_node: Ranks | None = None
    memory_constraint: Positive | None = None
    time_limit: Positive = SEARCH_S
    search_options: str = ""


# The meaning of empty fields, shown in their place.
UNSET = {
    "seq_length": str(SEQ),
    "device": DEVICE,
    "profiles": "none: the data sheet of the device",
    "num_gpus_per_node": "as the data sheet says",
    "memory_constraint": "all that it has",
    "time_limit": f"{SEARCH_S:g}",
    "search_options": "sp_space=tp+sp max_tp_deg=4",
}
SEARCHED = {**ModelOptions.model_fields, **SearchOptions.model_fields}  # options of a search
SET_BY_THE_FORM = {
    *("model_size", "seq_length", "settle_bsz", "min_bsz", "max_bsz", "bsz_scale", "profiles", "memory_constraint"),
    *("num_nodes", "num_gpus_per_node", "world_size", "time_limit"),
}


@dataclass(frozen=True)
class Answer:
    """The best plan, or the changes needed for one."""

    question: Question
    result: SearchResult
    notes: tuple[str, ...]
    commands: tuple[str, ...]
    enough_nodes: int | None = None  # if nothing fits: a number of nodes with which a plan fits

    @property
    def why_not(self) -> GalvatronError | None:
        """The reason if there is no plan."""
        try:
            self.result.require_in(self.question.options.time_limit or inf)
        except GalvatronError as error:
            return error
        return None

    @property
    def plan(self) -> dict[str, Any]:
        """The content of the plan's file. Raises Infeasible."""
        return plan_to_dict(self.result.plan)


def answer(form: Form, more: Mapping[str, Any], look_wider: bool = True) -> Answer:
    """`more`: further options of model and search, by canonical name. Raises UserError that names the fields; if
    nothing fits, the answer has a sufficient number of nodes, unless `look_wider` is false."""
    if both := sorted(SET_BY_THE_FORM & set(more)):
        raise UserError(f"search_options: {both[0]} has a field of its own; leave it out here")
    if form.profiles and form.device:
        raise UserError(TWO_SOURCES)
    noted: list[str] = []
    with _about("model_size"):
        values = {**more, "model_size": form.model_size, "seq_length": form.seq_length}
        seq_length = ModelOptions.from_values(values).resolve_usual(SEQ).seq_length
    with _about("device"):
        device = None if form.profiles else form.device or DEVICE
        per_node = form.num_gpus_per_node or (load_data_sheet(device).gpus_per_node if device else None)
    values |= {
        "device": device,
        "num_nodes": form.num_nodes,
        "num_gpus_per_node": per_node,
        "settle_bsz": form.global_train_batch_size,
        "seq_length": seq_length,
        "memory_constraint": form.memory_constraint,
        "time_limit": form.time_limit,
        "profiles": form.profiles,
    }
    with _about("profiles" if form.profiles else "search_options"):
        question = Question.of({name: value for name, value in values.items() if value is not None}, noted.append)
    result = question.search()
    fixed = form.profiles or result.best or result.undecided
    enough = _enough_nodes(form, more) if look_wider and not fixed else None
    notes, commands = tuple(dict.fromkeys(noted)), tuple(_commands(form, question.options, more))
    return Answer(question, result, notes, commands, enough)


def _enough_nodes(form: Form, more: Mapping[str, Any]) -> int | None:
    """The number of nodes on which a plan fits, if the next power of two or a few more are enough."""
    for nodes in (factor * form.num_nodes for factor in NODE_FACTORS):
        wider = answer(form.model_copy(update={"num_nodes": nodes}), more, look_wider=False)
        if wider.result.best:
            return nodes
    return None


@contextmanager
def _about(field: str) -> Iterator[None]:
    """Assign faults without a field to this one."""
    try:
        yield
    except UserError as error:
        raise UserError(
            fault if fault.partition(":")[0] in SEARCHED else f"{field}: {fault}" for fault in error.faults
        ) from None


def _commands(form: Form, options: SearchOptions, more: Mapping[str, Any]) -> Iterator[str]:
    """Commands for the same plan."""
    words: dict[str, Any] = {"device": options.device, "profiles": form.profiles, "seq_length": options.seq_length}
    words |= {"num_nodes": options.num_nodes, "num_gpus_per_node": options.num_gpus_per_node}
    words |= {"memory_constraint": form.memory_constraint, "settle_bsz": options.settle_bsz, **more}
    arguments = [word for name, value in words.items() if value is not None for word in (f"--{name}", f"{value}")]
    yield f"galvatron search {shlex.join([form.model_size, *arguments, '-o', 'plan.json'])}"
